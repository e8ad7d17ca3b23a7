"""SmolLM2-135M on real sources: the paper's setting, ours, random, everything.

    python -m experiments.compare --config configs/compare_smollm2.py

Model and data come from the commands in configs/smollm2_real.py; other places go in as
`--set model.path=DIR`. The budget is what the paper's setting keeps at its ratio 0.5.
`--seeds` and `--methods` run a part; a second start goes on where the first stopped.
"""

from experiments import grid

_BALANCED = {
    "selection.quota": "waterfill",
    "selection.keep": "herding",
    "selection.share": "tokens",
    "allocation.order": "herded",
}
_ONCE = {"selection.target_fraction": 0.6, "allocation.num_epochs": 1}


def get_config() -> grid.Comparison:
    return grid.Comparison(
        base="configs/smollm2_real.py",
        methods={
            "paper": {"selection.ratio": 0.5},
            "full": {"selection.method": "full"},
            "full one epoch": {"selection.method": "full", "allocation.num_epochs": 1},
            "random": {"selection.method": "random"},
            "herding": {
                **_BALANCED,
                "features.kind": "probe",
                "features.dim": 1024,
            },
            # Two epochs as well, of which the first is on everything.
            "first epoch": {**_BALANCED, "features.during_first_epoch": True},
            # More examples, but each once: by a pass through a fifth of the layers.
            "herding once": {**_BALANCED, "features.num_layers": 6, **_ONCE},
            "random once": {"selection.method": "random", **_ONCE},
        },
        seeds=(0, 1, 2),
        budget_of="paper",
        # Of 5e-5 and 2e-4 the better one for a random third of the data.
        shared={"train.optimizer.learning_rate": 2e-4},
    )
