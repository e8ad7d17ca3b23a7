"""Selection by cheaper passes on SmolLM2 and real text: is what they keep as good?

    python -m experiments.compare --config configs/compare_passes.py

Each keeps three fifths by herding and sees them once, as `herding once` does in
configs/compare_smollm2.py. What the passes cost: `experiments.bench passes`.
"""

from experiments import grid


def get_config() -> grid.Comparison:
    return grid.Comparison(
        base="configs/smollm2_real.py",
        methods={
            "plain": {},
            "first 6 layers": {"features.num_layers": 6},
            "first 15 layers": {"features.num_layers": 15},
            "first 48 tokens": {"features.max_tokens": 48},
            "bfloat16": {"features.compute_dtype": "bfloat16"},
            "smaller model": {"features.model": "builtin"},
            "random": {"selection.method": "random"},
        },
        seeds=(0, 1, 2),
        shared={
            "selection.quota": "waterfill",
            "selection.keep": "herding",
            "selection.share": "tokens",
            "allocation.order": "herded",
            "selection.target_fraction": 0.6,
            "allocation.num_epochs": 1,
            "train.optimizer.learning_rate": 2e-4,
        },
        full="plain",
    )
