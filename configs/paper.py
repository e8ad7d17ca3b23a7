"""What all paper-scale configs have in common: the settings of arXiv 2609.12584.

CluSTER's experiments: full fine-tuning with a global batch of 512, Adafactor at 5e-5
without parameter scaling, 15 warm-up steps and a linear decay, no clipping, 2 epochs,
1,216 tokens; 4 clusters, keep-farthest, a cluster's loss over its label tokens.
A command line chooses the ratio (1.0, 0.75 or 0.5): --config.selection.ratio=0.5
"""

import ml_collections

from clusterjax import config as config_lib


def config(
    model: str, data: str, layout: str, template: str
) -> ml_collections.ConfigDict:
    """The paper's settings for a model directory and a file of the public layout."""
    result = config_lib.default()
    result.model.path = model
    # Masters stay in float32: at 5e-5 most updates are below bfloat16's rounding.
    result.model.param_dtype = "float32"
    result.model.compute_dtype = "bfloat16"

    result.data.sources = (config_lib.source(path=data, layout=layout),)
    result.data.template = template
    result.data.max_length = 1216

    result.features.kind = "proxy"
    result.clustering.num_clusters = 4
    result.clustering.num_restarts = 10
    result.selection.method = "cluster"
    result.selection.quota = "min"
    result.selection.ratio = 0.75
    result.selection.keep = "farthest"
    result.selection.share = "examples"
    result.selection.normalise = "token"

    result.allocation.batch_size = 512
    result.allocation.num_epochs = 2
    result.allocation.packing = True

    optimizer = result.train.optimizer
    optimizer.name = "adafactor"
    optimizer.learning_rate = 5e-5
    optimizer.schedule = "linear"
    optimizer.warmup_steps = 15
    optimizer.clip_norm = None
    optimizer.adafactor_parameter_scale = False
    result.train.checkpoint_every = 50

    # Everything is sharded over all devices; a block's input is all that is kept.
    result.mesh.data = 1
    result.mesh.fsdp = -1
    result.perf.remat = "full"
    return result
