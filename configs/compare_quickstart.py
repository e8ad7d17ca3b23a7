"""The quickstart beside its full-data twin and the random one at equal budget.

    make compare      # or: python -m experiments.compare
                      #       --config configs/compare_quickstart.py
                      #       --workdir runs/compare_quickstart

A finished `runs/quickstart` counts as the run with clusters, so two runs remain.
"""

from experiments import grid


def get_config() -> grid.Comparison:
    return grid.Comparison(
        base="configs/quickstart.py",
        methods={
            "cluster": {},
            "full": {"selection.method": "full"},
            "random": {"selection.method": "random"},
        },
        budget_of="cluster",
        finished=("runs/quickstart",),
    )
