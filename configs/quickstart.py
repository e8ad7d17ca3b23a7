"""The whole method on embedded data and an embedded model, in minutes on a laptop.

python -m experiments.run --config configs/quickstart.py --workdir runs/quickstart
"""

import ml_collections

from clusterjax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
    config = config_lib.default()
    config.data.sources = (
        config_lib.source(path="builtin:stdlib_functions"),
        config_lib.source(path="builtin:skills"),
    )
    config.data.eval_sources = (
        config_lib.source(path="builtin:stdlib_functions", split="heldout"),
        config_lib.source(path="builtin:skills", split="heldout"),
    )
    config.data.max_length = 256
    config.clustering.num_clusters = 4
    config.selection.ratio = 1.0
    config.allocation.batch_size = 32
    config.allocation.num_epochs = 2
    config.train.optimizer.learning_rate = 1e-3
    config.mesh.num_simulated_devices = 4
    return config
