"""Pre-trains the embedded model on the standard library and generated tasks.

    python -m experiments.pretrain --out clusterjax/models/assets/builtin --steps 1000

Trains a byte-level BPE tokenizer and a small Llama-shaped decoder on the documents of
`experiments/pretraining/text.py`, writes them in Hugging Face form (bfloat16), and
measures the held-out bits per byte against a Kneser–Ney byte 5-gram fitted to the same
documents. `MODEL_CARD.md` gets the command, the time and the numbers. The number of
steps decides the result: the same steps, seed and library give the same model, up to
the rounding of the machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from clusterjax import files, progress
from clusterjax.data import tokenizer as tokenizer_lib
from clusterjax.data.builtin import stdlib_functions
from clusterjax.models import checkpoints, decoder, parameters
from experiments import kneser_ney
from experiments.pretraining import card, tokens, training
from experiments.pretraining import text as text_lib

_OUT = flags.DEFINE_string("out", None, "Directory of the model.", required=True)
_STEPS = flags.DEFINE_integer("steps", 1000, "Optimiser steps.", lower_bound=2)
_SKILLS = flags.DEFINE_integer("num_skills", 3000, "Generated tasks in the text.")
_OTHER_ROOTS = flags.DEFINE_multi_string(
    "other_root",
    [],
    "Standard library of another Python version, whose held-out functions are kept out "
    "of the text as well; may be repeated.",
)
_REMARK = flags.DEFINE_string("remark", "", "Said in the card after the time.")
_SAVE_EVERY = flags.DEFINE_integer("save_every", 100, "Steps between snapshots.")
_STATE = flags.DEFINE_string(
    "state", None, "File that keeps the training state; a second start goes on from it."
)


def save(
    out: pathlib.Path,
    config: decoder.DecoderConfig,
    params: Mapping[parameters.Path, jax.Array],
    tokenizer: tokenizer_lib.Tokenizer,
) -> None:
    """Writes the model in bfloat16 and the tokenizer, in Hugging Face form."""
    half = {path: jnp.asarray(value, jnp.bfloat16) for path, value in params.items()}
    checkpoints.save_decoder(checkpoints.assemble(config, half), out)
    tokenizer.save(out)
    generation = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        "do_sample": False,
        "max_new_tokens": 128,
    }
    files.write_json(out / "generation_config.json", generation)


def run(
    out: pathlib.Path,
    documents: text_lib.PretrainingText,
    recipe: training.Recipe,
    num_steps: int,
    state_file: pathlib.Path | None = None,
    save_every: int = 100,
) -> dict[str, Any]:
    """Tokenizer, training, files and figures; returns what the model card states."""
    begin = time.monotonic()
    tokenizer = tokens.train_tokenizer(documents.train, recipe.vocab_size)
    rows = tokens.pack(documents.train, tokenizer)
    config = training.decoder_config(recipe, tokenizer)
    progress.say(f"text: {len(documents.train):,} documents, {rows.size:,} tokens")
    heldout = {
        name: [part for item in items for part in tokens.pieces(item, tokenizer)]
        for name, items in (
            ("standard library", documents.heldout_stdlib),
            ("skills", documents.heldout_skills),
        )
    }

    def on_save(step: int, params: training.Params, loss: float) -> None:
        save(out, config, params, tokenizer)
        sample = heldout["standard library"][::32]
        score = training.bits_per_byte(config, params, tokenizer, sample)
        progress.say(
            f"step {step:,}: training loss {loss:.3f} nats per token, held-out sample "
            f"{score:.3f} bits per byte, {time.monotonic() - begin:,.0f} s"
        )

    params, losses = training.train(
        config, rows, recipe, num_steps, state_file, save_every, on_save
    )
    seconds = time.monotonic() - begin
    # The figures are those of the stored, rounded weights.
    params = {p: v.astype(jnp.bfloat16).astype(jnp.float32) for p, v in params.items()}
    save(out, config, params, tokenizer)
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "machine": f"{os.cpu_count()} {platform.machine()} cores",
        "seconds": seconds,
        "steps": num_steps,
        "recipe": dataclasses.asdict(recipe),
        "row_tokens": tokens.ROW_TOKENS,
        "begin": tokens.BOS,
        "end": tokens.END,
        "parameters": sum(value.size for value in params.values()),
        "train_documents": len(documents.train),
        "train_bytes": sum(len(d.encode()) for d in documents.train),
        "train_tokens": int(rows.shape[0] * tokens.ROW_TOKENS),
        "seen_tokens": num_steps * recipe.rows * tokens.ROW_TOKENS,
        "final_loss": float(np.mean(losses[-50:])),
        "heldout": compare(config, params, tokenizer, documents.train, heldout),
    }


def compare(
    config: decoder.DecoderConfig,
    params: training.Params,
    tokenizer: tokenizer_lib.Tokenizer,
    train: Sequence[str],
    heldout: Mapping[str, Sequence[str]],
) -> dict[str, dict[str, float]]:
    """Held-out bits per byte of the model and of a 5-gram fitted to `train`."""
    baseline = kneser_ney.KneserNey([text.encode() for text in train], order=5)
    result = {}
    for name, texts in heldout.items():
        encoded = [text.encode() for text in texts]
        result[name] = {
            "documents": len(texts),
            "bytes": sum(map(len, encoded)),
            "model": training.bits_per_byte(config, params, tokenizer, texts),
            "kneser_ney": baseline.bits_per_byte(encoded),
        }
    return result


def main(argv: Sequence[str]) -> None:
    """Parses the flags and runs."""
    del argv
    documents = text_lib.collect(
        stdlib_functions.library_root(),
        _SKILLS.value,
        [pathlib.Path(root) for root in _OTHER_ROOTS.value],
    )
    out = pathlib.Path(_OUT.value)
    state_file = pathlib.Path(_STATE.value) if _STATE.value else None
    facts = run(
        out, documents, training.Recipe(), _STEPS.value, state_file, _SAVE_EVERY.value
    )
    roots = [pathlib.Path(root).name for root in _OTHER_ROOTS.value]
    facts |= {
        "command": f"python -m experiments.pretrain --out DIR --steps {_STEPS.value}"
        f" --num_skills {_SKILLS.value}"
        + "".join(f" \\\n    --other_root …/lib/{name}" for name in roots),
        "other_libraries": roots,
        "remark": _REMARK.value,
    }
    progress.say(json.dumps(facts))
    files.write_text(out / "MODEL_CARD.md", card.render(facts))


if __name__ == "__main__":
    app.run(main)
