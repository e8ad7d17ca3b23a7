"""Pre-trains the embedded model on the standard library and generated tasks.

    python -m experiments.pretrain --out clusterjax/models/assets/builtin --steps 2000

Trains a byte-level BPE tokenizer and a small Llama-shaped decoder on the documents of
`experiments/pretraining_text.py`, writes them in Hugging Face form (bfloat16), and
measures the held-out bits per byte against a Kneser–Ney byte 5-gram fitted to the same
documents. `MODEL_CARD.md` gets the command, the time and the numbers. The number of
steps decides the result: the same steps, seed and library give the same model, up to
the rounding of the machine.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from absl import app, flags
from flax import nnx
from optax import contrib
from tokenizers import decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models

from clusterjax import files, progress
from clusterjax.data import tokenizer as tokenizer_lib
from clusterjax.data.builtin import stdlib_functions
from clusterjax.models import checkpoints, decoder, parameters
from experiments import kneser_ney, model_card, pretraining_text

_OUT = flags.DEFINE_string("out", None, "Directory of the model.", required=True)
_STEPS = flags.DEFINE_integer("steps", 2000, "Optimiser steps.", lower_bound=2)
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

BOS, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = (PAD, BOS, END, "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ROW_TOKENS = 512
Params = dict[parameters.Path, jax.Array]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What decides the model, besides the text.

    Attributes:
      vocab_size: entries of the tokenizer, special tokens included.
      hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim:
        as in `DecoderConfig`.
      rows: rows of `ROW_TOKENS` tokens in a step.
      learning_rate: peak of Muon, for the matrices of the blocks.
      adam_learning_rate: peak of Adam, for embedding and norms.
      weight_decay: of the matrices of the blocks, times the learning rate.
      warmup_steps: steps of the linear rise of both rates; then they are constant.
      decay_fraction: last share of the steps, in which they fall linearly to zero.
        Before it, rows are cut in half, which makes attention cheaper.
      seed: of the initial values and of the order of the rows.
    """

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 640
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rows: int = 8
    learning_rate: float = 0.02
    adam_learning_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup_steps: int = 50
    decay_fraction: float = 0.3
    seed: int = 0


def train_tokenizer(
    documents: Sequence[str], vocab_size: int
) -> tokenizer_lib.Tokenizer:
    """A byte-level BPE that splits numbers into digits, with the chat template."""
    backend = tokenizers.Tokenizer(tokenizer_models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(documents, trainer)
    settings = {
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": ROW_TOKENS,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return tokenizer_lib.Tokenizer(backend, settings, CHAT_TEMPLATE)


def pack(documents: Sequence[str], tokenizer: tokenizer_lib.Tokenizer) -> np.ndarray:
    """int32 [rows, ROW_TOKENS + 1]: the documents one after another, cut into rows.

    Each document stands between begin and end token. A row shares its last token with
    the next one's first, so that every token is predicted once; what does not fill a
    row is dropped.
    """
    pieces: list[np.ndarray] = []
    for encoding in tokenizer.encode_batch(documents):
        ids = [tokenizer.bos_id, *encoding.ids, tokenizer.eos_id]
        pieces.append(np.asarray(ids, np.int32))
    stream = np.concatenate(pieces)
    num_rows = (len(stream) - 1) // ROW_TOKENS
    starts = np.arange(num_rows)[:, None] * ROW_TOKENS
    return stream[starts + np.arange(ROW_TOKENS + 1)]


def halves(rows: np.ndarray) -> np.ndarray:
    """int32 [2 · rows, T / 2 + 1]: each row [T + 1] as two that share a token."""
    middle = rows.shape[1] // 2
    return np.concatenate([rows[:, : middle + 1], rows[:, middle:]])


def row_order(num_rows: int, recipe: Recipe) -> Iterator[np.ndarray]:
    """Row numbers of one step after another; every pass has a new order."""
    rng = np.random.default_rng(recipe.seed)
    waiting = np.empty(0, np.int64)
    while True:
        while len(waiting) < recipe.rows:
            waiting = np.concatenate([waiting, rng.permutation(num_rows)])
        yield waiting[: recipe.rows]
        waiting = waiting[recipe.rows :]


def decoder_config(
    recipe: Recipe, tokenizer: tokenizer_lib.Tokenizer
) -> decoder.DecoderConfig:
    """The decoder of a recipe, with the token ids that config.json keeps."""
    source = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    names = (field.name for field in dataclasses.fields(decoder.DecoderConfig))
    shape = {n: getattr(recipe, n) for n in names if hasattr(recipe, n)}
    return decoder.DecoderConfig(
        **shape,
        max_positions=ROW_TOKENS,
        tie_embeddings=True,
        source_json=json.dumps(source),
    )


def optimizer(recipe: Recipe, num_steps: int) -> optax.GradientTransformation:
    """Muon on the matrices of the blocks (arXiv 2502.16982), Adam on the rest."""

    def schedule(peak: float) -> optax.Schedule:
        decay = round(recipe.decay_fraction * num_steps)
        warmup = min(recipe.warmup_steps, num_steps - decay)
        return optax.join_schedules(
            [
                optax.linear_schedule(peak / (warmup + 1), peak, warmup),
                optax.constant_schedule(peak),
                optax.linear_schedule(peak, 0.0, decay),
            ],
            [warmup, num_steps - decay],
        )

    def matrix_axes(params: Params) -> dict[parameters.Path, Any]:
        # The first axis counts layers: each layer is a matrix of its own.
        axes = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
        return {path: axes if path[-1] == "kernel" else None for path in params}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        contrib.muon(
            schedule(recipe.learning_rate),
            weight_decay=recipe.weight_decay,
            adam_b2=0.98,
            adam_learning_rate=schedule(recipe.adam_learning_rate),
            muon_weight_dimension_numbers=matrix_axes,  # pyright: ignore
        ),
    )


def parameters_of(model: decoder.Decoder) -> Params:
    """The parameters of a decoder, by path."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {tuple(map(str, path)): variable[...] for path, variable in flat}


def token_losses(
    config: decoder.DecoderConfig, params: Params, rows_BT: jax.Array
) -> jax.Array:
    """float32 [B, T − 1]: −log p of each token after the first, in nats."""
    model = checkpoints.assemble(config, params)
    return optax.softmax_cross_entropy_with_integer_labels(
        model(rows_BT[:, :-1]), rows_BT[:, 1:]
    )


def train(
    config: decoder.DecoderConfig,
    rows: np.ndarray,
    recipe: Recipe,
    num_steps: int,
    state_file: pathlib.Path | None = None,
    save_every: int = 100,
    on_save: Callable[[int, Params, float], None] = lambda step, params, loss: None,
) -> tuple[Params, list[float]]:
    """Trains from random values, or from where `state_file` stopped.

    Before the rates fall, a state does not depend on `num_steps`: a run may be
    stopped there and go on with another number.

    Args:
      config: the decoder.
      rows: int32 [rows, T + 1], from `pack`.
      recipe: batch size, learning rates and seed.
      num_steps: optimiser steps.
      state_file: where the state is kept between steps.
      save_every: steps between two savings.
      on_save: called then with (steps done, parameters, mean loss since the last).

    Returns:
      The parameters by path, and the training loss of each step in nats per token.
    """
    params = parameters_of(decoder.Decoder(config, nnx.Rngs(recipe.seed)))
    transform = optimizer(recipe, num_steps)
    state = (params, transform.init(params))
    losses: list[float] = []
    if state_file is not None and state_file.exists():
        state, losses = _read_state(state_file, state)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, rows_BT: jax.Array) -> tuple[Any, jax.Array]:
        def mean_loss(params: Params) -> jax.Array:
            return token_losses(config, params, rows_BT).mean()

        params, opt_state = state
        loss, gradient = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = transform.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    num_short = num_steps - round(recipe.decay_fraction * num_steps)
    order = itertools.islice(row_order(len(rows), recipe), len(losses), num_steps)
    count = recipe.rows * ROW_TOKENS
    total = (num_steps - len(losses)) * count
    with progress.track("pretrain", total, "tokens") as advance:
        for chosen in order:
            short = len(losses) < num_short
            state, loss = step(state, halves(rows[chosen]) if short else rows[chosen])
            losses.append(float(loss))
            advance(count)
            if len(losses) % save_every == 0:
                if state_file is not None:
                    _write_state(state_file, state, losses)
                on_save(len(losses), state[0], float(np.mean(losses[-save_every:])))
    return state[0], losses


def _write_state(path: pathlib.Path, state: Any, losses: list[float]) -> None:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]

    def write(partial: os.PathLike[str]) -> None:
        with open(partial, "wb") as file:
            np.savez(file, np.asarray(losses), *leaves)

    files.write_with(path, write)


def _read_state(path: pathlib.Path, like: Any) -> tuple[Any, list[float]]:
    with np.load(path) as stored:
        losses, *leaves = (stored[f"arr_{i}"] for i in range(len(stored.files)))
    state = jax.tree.unflatten(jax.tree.structure(like), map(jnp.asarray, leaves))
    return state, losses.tolist()


def pieces(document: str, tokenizer: tokenizer_lib.Tokenizer) -> list[str]:
    """A document cut where its tokens would not fit a row with the begin token."""
    encoding = tokenizer.encode_batch([document])[0]
    starts = [encoding.offsets[i][0] for i in range(0, len(encoding), ROW_TOKENS - 1)]
    stops = [*starts[1:], len(document)]
    return [document[a:b] for a, b in zip(starts, stops, strict=True)]


def bits_per_byte(
    config: decoder.DecoderConfig,
    params: Params,
    tokenizer: tokenizer_lib.Tokenizer,
    texts: Sequence[str],
) -> float:
    """Bits the model spends on each byte of `texts`, each after one begin token.

    The end token is not counted, so that the figure compares with a byte model's.
    """
    encodings = sorted(
        (
            np.asarray(encoding.ids, np.int32)
            for encoding in tokenizer.encode_batch(texts)
        ),
        key=len,
    )
    evaluate = jax.jit(lambda params, rows: token_losses(config, params, rows))
    begin_id = tokenizer.encode(BOS)[0]
    nats = 0.0
    batch = 32
    for i in range(0, len(encodings), batch):
        group = encodings[i : i + batch]
        # Few widths, so that few programs are compiled.
        width = 64 * math.ceil((len(group[-1]) + 1) / 64)
        rows = np.full((batch, width), tokenizer.pad_id, np.int32)
        real = np.zeros((batch, width - 1), bool)
        for row, ids in enumerate(group):
            rows[row, 0] = begin_id
            rows[row, 1 : len(ids) + 1] = ids
            real[row, : len(ids)] = True
        losses = np.asarray(evaluate(params, rows), np.float64)
        nats += losses[real].sum()
    return nats / math.log(2) / sum(len(text.encode()) for text in texts)


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
    text: pretraining_text.PretrainingText,
    recipe: Recipe,
    num_steps: int,
    state_file: pathlib.Path | None = None,
    save_every: int = 100,
) -> dict[str, Any]:
    """Tokenizer, training, files and figures; returns what the model card states."""
    begin = time.monotonic()
    tokenizer = train_tokenizer(text.train, recipe.vocab_size)
    rows = pack(text.train, tokenizer)
    config = decoder_config(recipe, tokenizer)
    progress.say(f"text: {len(text.train):,} documents, {rows.size:,} tokens")
    heldout = {
        "standard library": text.heldout_stdlib,
        "skills": text.heldout_skills,
    }
    heldout = {
        name: [piece for document in documents for piece in pieces(document, tokenizer)]
        for name, documents in heldout.items()
    }

    def on_save(step: int, params: Params, loss: float) -> None:
        save(out, config, params, tokenizer)
        sample = heldout["standard library"][::32]
        score = bits_per_byte(config, params, tokenizer, sample)
        progress.say(
            f"step {step:,}: training loss {loss:.3f} nats per token, held-out sample "
            f"{score:.3f} bits per byte, {time.monotonic() - begin:,.0f} s"
        )

    params, losses = train(
        config, rows, recipe, num_steps, state_file, save_every, on_save
    )
    seconds = time.monotonic() - begin
    # The figures are those of the stored, rounded weights.
    params = {p: v.astype(jnp.bfloat16).astype(jnp.float32) for p, v in params.items()}
    save(out, config, params, tokenizer)
    baseline = kneser_ney.KneserNey([d.encode() for d in text.train], order=5)
    scores = {
        name: {
            "documents": len(documents),
            "bytes": sum(len(d.encode()) for d in documents),
            "model": bits_per_byte(config, params, tokenizer, documents),
            "kneser_ney": baseline.bits_per_byte([d.encode() for d in documents]),
        }
        for name, documents in heldout.items()
    }
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "machine": f"{os.cpu_count()} cores ({platform.machine()})",
        "seconds": seconds,
        "steps": num_steps,
        "recipe": dataclasses.asdict(recipe),
        "row_tokens": ROW_TOKENS,
        "begin": BOS,
        "end": END,
        "parameters": sum(value.size for value in params.values()),
        "train_documents": len(text.train),
        "train_bytes": sum(len(d.encode()) for d in text.train),
        "train_tokens": int(rows.shape[0] * ROW_TOKENS),
        "seen_tokens": num_steps * recipe.rows * ROW_TOKENS,
        "final_loss": float(np.mean(losses[-50:])),
        "heldout": scores,
    }


def main(argv: Sequence[str]) -> None:
    """Parses the flags and runs."""
    del argv
    text = pretraining_text.collect(
        stdlib_functions.library_root(),
        _SKILLS.value,
        [pathlib.Path(root) for root in _OTHER_ROOTS.value],
    )
    out = pathlib.Path(_OUT.value)
    state_file = pathlib.Path(_STATE.value) if _STATE.value else None
    facts = run(out, text, Recipe(), _STEPS.value, state_file, _SAVE_EVERY.value)
    roots = [pathlib.Path(root).name for root in _OTHER_ROOTS.value]
    facts |= {
        "command": f"python -m experiments.pretrain --out DIR --steps {_STEPS.value}"
        f" --num_skills {_SKILLS.value}"
        + "".join(f" --other_root LIBRARY_OF_{name.upper()}" for name in roots),
        "other_libraries": roots,
        "remark": _REMARK.value,
    }
    progress.say(json.dumps(facts))
    files.write_text(out / "MODEL_CARD.md", model_card.render(facts))


if __name__ == "__main__":
    app.run(main)
