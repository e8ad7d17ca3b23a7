"""The paper's ablations: which examples, how many clusters, how much, which weights.

    python -m experiments.compare --config configs/compare_ablations.py \
        --methods "nearest,random inside,paper"

Sizes differ by design where K or the ratio changes: the table gives what each keeps.
"""

from experiments import grid


def get_config() -> grid.Comparison:
    keep = {
        "nearest": {"selection.keep": "nearest"},
        "random inside": {"selection.keep": "random"},
        "mixed": {"selection.keep": "mixed"},
        "largest norm": {"selection.keep": "largest_norm"},
        "k-center inside": {"selection.keep": "k_center"},
        "herding inside": {"selection.keep": "herding"},
    }
    clusters = {
        f"K {count}": {"clustering.num_clusters": count} for count in (2, 8, 16, 32, 64)
    }
    ratio = {f"ratio {value}": {"selection.ratio": value} for value in (0.75, 0.5)}
    weights = {
        "no weights": {"selection.weighting": "none"},
        "root weights": {"selection.weighting": "sqrt"},
        "uniform weights": {"selection.weighting": "uniform"},
        "token shares": {"selection.share": "tokens"},
        "example mean": {"selection.normalise": "example"},
        "dedicated": {"allocation.placement": "dedicated"},
    }
    # What a size is worth by itself, for those whose size differs.
    sizes = {
        f"random {count}": {
            "selection.method": "random",
            "selection.num_kept": count,
        }
        for count in (512, 1536, 2304)
    }
    features = {
        "head": {"features.kind": "head"},
        "probe": {"features.kind": "probe", "features.dim": 1024},
        "centred": {"features.center": "mean"},
    }
    return grid.Comparison(
        base="configs/quickstart.py",
        methods={
            "paper": {},
            "full": {"selection.method": "full"},
            "random": {"selection.method": "random"},
            **keep,
            **clusters,
            **ratio,
            **sizes,
            **weights,
            **features,
        },
        seeds=(0, 1, 2),
        budget_of="paper",
        # Once over what is kept: half the time, and nothing is learned by heart.
        shared={"allocation.num_epochs": 1, "report.html": False},
    )
