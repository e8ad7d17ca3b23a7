"""CodeLlama-Python-13B on Magicoder-OSS-Instruct-75K.

    python -m experiments.estimate --config configs/magicoder_codellama_13b.py \\
        --topology v5e:8x8 --num_examples 75197 \\
        --model_config configs/models/codellama_13b.json
    python -m experiments.run --config configs/magicoder_codellama_13b.py \\
        --workdir runs/magicoder_codellama_13b

Model: a Hugging Face directory of codellama/CodeLlama-13b-Python-hf at `model.path`.
Data: the file of ise-uiuc/Magicoder-OSS-Instruct-75K, columns `problem` and `solution`.
Not run at full size so far; docs/estimates.md has what it should take.
"""

import ml_collections

from configs import paper


def get_config() -> ml_collections.ConfigDict:
    config = paper.config(
        model="models/CodeLlama-13b-Python-hf",
        data="data/data-oss_instruct-decontaminated.jsonl",
        layout="instruction_response",
        template="magicoder",
    )
    config.allocation.accumulation_steps = 8
    return config
