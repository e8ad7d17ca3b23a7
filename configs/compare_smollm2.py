"""SmolLM2-135M on real sources: the paper's setting, ours, random, everything.

    python -m experiments.compare --config configs/compare_smollm2.py

Model and data come from the commands in configs/smollm2_real.py; other places go in as
`--set model.path=DIR`. The budget is what the paper's setting keeps (quota `min`, ratio
1.0, farthest). `--seeds` and `--methods` run a part; a second start goes on where the
first one stopped.
"""

from experiments import grid

_BALANCED = {
    "selection.quota": "waterfill",
    "selection.keep": "herding",
    "selection.share": "tokens",
    "allocation.order": "herded",
}


def get_config() -> grid.Comparison:
    return grid.Comparison(
        base="configs/smollm2_real.py",
        methods={
            "paper": {},
            "full": {"selection.method": "full"},
            "random": {"selection.method": "random"},
            "herding": {
                **_BALANCED,
                "features.kind": "probe",
                "features.dim": 1024,
            },
            # Two epochs as well, of which the first is on everything.
            "first epoch": {**_BALANCED, "features.during_first_epoch": True},
        },
        seeds=(0, 1, 2),
        budget_of="paper",
    )
