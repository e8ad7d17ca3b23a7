"""CodeLlama-Python-7B on Evol-Instruct-Code-80K.

    python -m experiments.estimate --config configs/evol_codellama_7b.py \\
        --topology v5e:4x4 --num_examples 78264 \\
        --model_config configs/models/codellama_7b.json
    python -m experiments.run --config configs/evol_codellama_7b.py \\
        --workdir runs/evol_codellama_7b

Model: a Hugging Face directory of codellama/CodeLlama-7b-Python-hf at `model.path`.
Data: nickrosh/Evol-Instruct-Code-80k-v1, columns `instruction` and `output`.
Not run at full size so far; docs/estimates.md has what it should take.
"""

import ml_collections

from configs import paper


def get_config() -> ml_collections.ConfigDict:
    config = paper.config(
        model="models/CodeLlama-7b-Python-hf",
        data="data/EvolInstruct-Code-80k.json",
        layout="alpaca",
        template="magicoder",
    )
    config.allocation.accumulation_steps = 8
    return config
