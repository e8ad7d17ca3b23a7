"""The whole method on embedded data and an embedded model, in minutes on a laptop.

python -m experiments.run --config configs/quickstart.py --workdir runs/quickstart
"""

import ml_collections

from clusterjax import config as config_lib

# Real functions to be written from signature and docstring, and short exact tasks:
# about 3,000 examples, unequal in kind and redundant, 307,000 tokens.
SETS = (
    "builtin:stdlib_functions?cap_per_group=150",
    "builtin:skills?num_examples=1400",
)


def get_config() -> ml_collections.ConfigDict:
    config = config_lib.default()
    config.data.sources = _sources("train")
    config.data.eval_sources = _sources("heldout")
    config.data.max_length = 512
    config.clustering.num_clusters = 4
    config.selection.ratio = 1.0
    config.allocation.batch_size = 32
    config.allocation.num_epochs = 2
    config.train.optimizer.learning_rate = 2e-3
    config.train.eval_every = 25
    config.mesh.num_simulated_devices = 4
    return config


def _sources(split: str) -> tuple[ml_collections.ConfigDict, ...]:
    """Sources are the module groups of the library, and the tasks."""
    return tuple(
        config_lib.source(path=path, split=split, source_column="source")
        for path in SETS
    )
