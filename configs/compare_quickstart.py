"""The quickstart beside full data, a random choice as large, and 5 % at random.

    make compare      # or: python -m experiments.compare
                      #       --config configs/compare_quickstart.py
                      #       --workdir runs/compare_quickstart

A finished `runs/quickstart` counts as the run with clusters, so three runs remain.
"""

from experiments import grid


def get_config() -> grid.Comparison:
    return grid.Comparison(
        base="configs/quickstart.py",
        methods={
            "cluster": {},
            "full": {"selection.method": "full"},
            "random": {"selection.method": "random"},
            "random 5 %": {
                "selection.method": "random",
                "selection.target_fraction": 0.05,
            },
        },
        budget_of="cluster",
        finished=("runs/quickstart",),
    )
