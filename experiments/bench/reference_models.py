"""Checks checkpoints, LoRA files and greedy text against transformers and peft.

Two environments, since ours has no torch: the first command writes logits and files
with clusterjax, the second (torch, transformers, peft) reads the same files and
compares. MODEL is any Hugging Face directory of a supported architecture.

    python -m experiments.bench.reference_models write MODEL FOLDER
    python experiments/bench/reference_models.py check MODEL FOLDER

Printed as JSON: the largest differences of the logits of the model, of the directory
that clusterjax saved, of the adapters, and of the merged model; and how many of the
greedy answers agree in all 32 tokens.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import numpy as np

_NUM_NEW = 32
_PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that computes the factorial of n.",
    "List three uses of a hammer.",
    "Translate 'good morning' to Spanish.",
    "What is 12 + 30?",
)


def write(model_dir: str, folder: pathlib.Path) -> None:
    """Writes what clusterjax computes, and the files that it saves."""
    import jax
    import jax.numpy as jnp

    from clusterjax import config as config_lib
    from clusterjax import models
    from clusterjax.models import checkpoints, lora

    if (pathlib.Path(model_dir) / "tokenizer.json").exists():
        tokenizer, model = models.load(model_dir)
        models.save(model, tokenizer, folder / "saved")
        rows = [
            tokenizer.encode(
                f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
            )
            for text in _PROMPTS
        ]
        end_ids = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    else:
        model, end_ids = checkpoints.load_decoder(model_dir), []
        checkpoints.save_decoder(model, folder / "saved")
        rng = np.random.default_rng(0)
        vocab = model.config.vocab_size
        rows = [rng.integers(3, vocab, n).tolist() for n in (3, 9, 17, 24, 40)]
    cfg = config_lib.LoraConfig(rank=4, alpha=8.0, targets=("q", "v", "o", "down"))
    factors = lora.initialize(model.config, cfg, jax.random.key(0))
    for i, pair in enumerate(factors.values()):
        pair["b"] = 0.02 * jax.random.normal(jax.random.key(i + 1), pair["b"].shape)
    lora.save(factors, cfg, model.config, folder / "adapters", model_dir)
    checkpoints.save_decoder(lora.merge(model, factors, cfg), folder / "merged")

    compute = jax.jit(lambda m, x, a: m(x, adapters=a))
    adapters = lora.adapters(factors, cfg)
    result: dict[str, np.ndarray] = {}
    for i, (row, new) in enumerate(
        zip(rows, models.generate(model, rows, _NUM_NEW, end_ids=end_ids), strict=True)
    ):
        tokens_BT = jnp.asarray(row, jnp.int32)[None]
        result[f"tokens{i}"] = np.asarray(row)
        result[f"greedy{i}"] = new
        result[f"logits{i}"] = np.asarray(compute(model, tokens_BT, None)[0])
        result[f"adapted{i}"] = np.asarray(compute(model, tokens_BT, adapters)[0])
    np.savez(folder / "clusterjax.npz", allow_pickle=False, **result)


def check(model_dir: str, folder: pathlib.Path) -> dict[str, Any]:
    """Compares with transformers and peft; returns the differences."""
    import peft
    import torch
    import transformers

    def load(path):
        return transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32
        ).eval()

    ours = dict(np.load(folder / "clusterjax.npz"))
    rows = [ours[name] for name in sorted(ours) if name.startswith("tokens")]

    def largest(model, name):
        found = 0.0
        for i, row in enumerate(rows):
            with torch.no_grad():
                logits = model(torch.tensor(row)[None]).logits[0].numpy()
            found = max(found, float(np.abs(logits - ours[f"{name}{i}"]).max()))
        return found

    model = load(model_dir)
    if not (pathlib.Path(model_dir) / "tokenizer.json").exists():
        # No tokenizer, no end: `write` went on as well.
        model.generation_config.eos_token_id = None
    same = 0
    for i, row in enumerate(rows):
        text = model.generate(
            torch.tensor(row)[None],
            attention_mask=torch.ones(1, len(row), dtype=torch.long),
            max_new_tokens=len(ours[f"greedy{i}"]),
            do_sample=False,
            pad_token_id=0,
        )
        same += text[0, len(row) :].tolist() == ours[f"greedy{i}"].tolist()
    result: dict[str, Any] = {
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "logits": largest(model, "logits"),
        "logit_spread": float(ours["logits0"].std()),
        "saved_directory": largest(load(folder / "saved"), "logits"),
        "merged": largest(load(folder / "merged"), "adapted"),
        "greedy_equal": f"{same} of {len(rows)}",
    }
    adapted = peft.PeftModel.from_pretrained(model, folder / "adapters")
    result["adapters"] = largest(adapted, "adapted")
    result["merged_by_peft"] = largest(adapted.merge_and_unload(), "adapted")
    return result


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[1] not in ("write", "check"):
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    if sys.argv[1] == "write":
        write(sys.argv[2], folder)
    else:
        print(json.dumps(check(sys.argv[2], folder), indent=2))


if __name__ == "__main__":
    main()
