"""CodeLlama-Python-7B on Magicoder-OSS-Instruct-75K.

    python -m experiments.estimate --config configs/magicoder_codellama_7b.py \\
        --topology v5e:4x4 --num_examples 75197 \\
        --model_config configs/models/codellama_7b.json
    python -m experiments.run --config configs/magicoder_codellama_7b.py \\
        --workdir runs/magicoder_codellama_7b

Model: a Hugging Face directory of codellama/CodeLlama-7b-Python-hf at `model.path`.
Data: the file of ise-uiuc/Magicoder-OSS-Instruct-75K, columns `problem` and `solution`.
Not run at full size so far; docs/estimates.md has what it should take.
"""

import ml_collections

from configs import paper


def get_config() -> ml_collections.ConfigDict:
    config = paper.config(
        model="models/CodeLlama-7b-Python-hf",
        data="data/data-oss_instruct-decontaminated.jsonl",
        layout="instruction_response",
        template="magicoder",
    )
    config.allocation.accumulation_steps = 8
    return config
