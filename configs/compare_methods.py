"""The main methods at equal budget on the embedded model and data, five paired seeds.

    python -m experiments.compare --config configs/compare_methods.py

The budget is what the paper's setting keeps (quota `min`, ratio 1.0). `--methods` and
`--seeds` run a part; a second start goes on where the first one stopped.
"""

from experiments import grid

# The best setting found: token shares, clusters and order by herding.
_HERDING = {
    "selection.quota": "waterfill",
    "selection.keep": "herding",
    "selection.share": "tokens",
    "allocation.order": "herded",
}
_PROBE = {"features.kind": "probe"}  # 16 × 16 of each matrix: 5,376 numbers


def get_config() -> grid.Comparison:
    return grid.Comparison(
        base="configs/quickstart.py",
        methods={
            "paper": {},
            "full": {"selection.method": "full"},
            "random": {"selection.method": "random"},
            "stratified": {"selection.method": "stratified"},
            "herding by proxy": {**_HERDING, "clustering.num_clusters": 8},
            "herding by probe": {**_HERDING, **_PROBE},
            "uniform": {"selection.method": "uniform"},
            "highest loss": {"selection.method": "highest_loss"},
            "k-center": {"selection.method": "k_center"},
            "near duplicates": {"selection.method": "near_duplicate"},
            "near duplicates herded": {
                "selection.method": "near_duplicate",
                "allocation.order": "herded",
            },
            "target": {
                "selection.method": "target",
                "selection.target_source": "skills",
            },
            "full herded by probe": {
                "selection.method": "full",
                "allocation.order": "herded",
                **_PROBE,
            },
        },
        seeds=(0, 1, 2, 3, 4),
        budget_of="paper",
        # For the mechanism during training: experiments.mechanism reads them.
        shared={"train.checkpoint_every": 20, "train.keep_checkpoints": 20},
        mechanism=True,
    )
