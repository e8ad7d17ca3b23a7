"""Llama-2-7B on MedInstruct-52K.

    python -m experiments.estimate --config configs/medinstruct_llama2_7b.py \\
        --topology v5e:4x4 --num_examples 52002 \\
        --model_config configs/models/llama2_7b.json
    python -m experiments.run --config configs/medinstruct_llama2_7b.py \\
        --workdir runs/medinstruct_llama2_7b

Model: a Hugging Face directory of meta-llama/Llama-2-7b-hf at `model.path`.
Data: med_instruct_52k.json of AlpaCare, columns `instruction`, `input`, `output`.
Not run at full size so far; docs/estimates.md has what it should take.
"""

import ml_collections

from configs import paper


def get_config() -> ml_collections.ConfigDict:
    config = paper.config(
        model="models/Llama-2-7b-hf",
        data="data/med_instruct_52k.json",
        layout="alpaca",
        template="alpaca",
    )
    config.allocation.accumulation_steps = 8
    return config
