"""A run of seconds, for tests that start it many times; the model comes by a flag."""

import ml_collections

from clusterjax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
    config = config_lib.default()
    config.data.sources = (
        config_lib.source(path="builtin:skills", max_examples=12),
        config_lib.source(path="builtin:skills", name="more", split="heldout"),
    )
    config.data.sources[1].max_examples = 12
    config.data.max_length = 48
    config.clustering.num_clusters = 2
    config.clustering.num_restarts = 2
    config.clustering.min_cluster_size = 1
    config.selection.ratio = 1.0
    config.allocation.batch_size = 6
    config.allocation.max_steps = 4
    config.train.checkpoint_every = 2
    config.train.log_every = 1
    config.mesh.num_simulated_devices = 1
    config.report.html = False
    config.perf.feature_buckets = 1
    return config
