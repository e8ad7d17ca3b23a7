"""The model card of the embedded model, from the figures of its pre-training run."""

from __future__ import annotations

from typing import Any

_CARD = """\
# The embedded model

A small Llama-shaped decoder ({parameters:,} parameters, bfloat16) that comes with
clusterjax, so that the quickstart, the tests and the documentation run on a real
language model without a network. It knows Python text and a little of simple tasks; it
is a test subject for data selection, not an assistant.

| | |
| --- | --- |
| shape | vocabulary {vocab_size:,}, hidden {hidden_size}, MLP {intermediate_size}, \
{num_layers} layers, {num_heads} heads of {head_dim}, {num_kv_heads} key-value heads, \
tied embeddings |
| tokenizer | byte-level BPE, digits one by one, {bytes_per_token:.2f} bytes per token |
| context | {row_tokens} tokens |
| chat format | `{begin}<|user|>…{end}<|assistant|>…{end}`; pre-training had no chat |
| licence | Apache-2.0; the text is the standard library's (PSF licence) and generated |

## Pre-training

```
{command}
```

- Text: {train_documents:,} documents, {train_bytes:,} bytes, {train_tokens:,} tokens: \
every function and method of the standard library of Python {python}, what remains of \
each file without them, and generated `skills` tasks in plain form. Left out are the \
held-out part, tests, vendored packages and the tables of `encodings`.
- {steps:,} steps of {rows} rows × {row_tokens} tokens ({seen_tokens:,} tokens seen; \
the rows cut in half until the rates fall), \
Muon for the matrices of the blocks (peak {learning_rate}) and Adam for the rest (peak \
{adam_learning_rate}), {warmup_steps} warm-up steps, linear to zero in the last \
{decay_fraction:.0%} of the steps; float32.
- Final training loss {final_loss:.3f} nats per token (mean of the last 50 steps).
- {minutes:.0f} minutes on {machine}, jax {jax}, tokenizer included{remark}.

## What it has learnt

Held-out bits per byte, against an interpolated modified Kneser–Ney byte 5-gram (Chen
and Goodman, 1999) fitted to the same documents:

| held-out part | documents | bytes | this model | Kneser–Ney 5-gram | difference |
| --- | ---: | ---: | ---: | ---: | ---: |
{rows_of_table}

*Held out* are the functions and methods whose qualified name, and the tasks whose
family and arguments, hash below a tenth (`clusterjax/data/builtin/splits.py`): the
rule that makes the `heldout` split of the embedded data sets. The held-out functions
of the libraries of Python {libraries}
were cut from the text, and with them every function of the same body (whitespace and
case apart). Each document is scored on its own; one of more than {piece_tokens} tokens
is cut there and scored in pieces, for both models alike. The model spends bits on its
tokens after the begin token; the end token is not counted.
"""


def render(facts: dict[str, Any]) -> str:
    """The card's text, from the facts that `experiments.pretrain.run` returns."""
    others = (name.removeprefix("python") for name in facts["other_libraries"])
    rows = []
    for name, score in facts["heldout"].items():
        change = score["model"] / score["kneser_ney"] - 1
        rows.append(
            f"| {name} | {score['documents']:,} | {score['bytes']:,} | "
            f"{score['model']:.3f} | {score['kneser_ney']:.3f} | {change:+.1%} |"
        )
    values = {**facts, **facts["recipe"]}
    return _CARD.format(
        **values,
        minutes=facts["seconds"] / 60,
        bytes_per_token=facts["train_bytes"] / facts["train_tokens"],
        piece_tokens=facts["row_tokens"] - 1,
        libraries=", ".join([facts["python"], *others]),
        rows_of_table="\n".join(rows),
    )
