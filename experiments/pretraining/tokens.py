"""Tokenizer and rows of the pre-training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models

from clusterjax.data import tokenizer as tokenizer_lib

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


def row_order(num_rows: int, count: int, seed: int) -> Iterator[np.ndarray]:
    """`count` row numbers for one step after another; each pass has a new order."""
    rng = np.random.default_rng(seed)
    waiting = np.empty(0, np.int64)
    while True:
        while len(waiting) < count:
            waiting = np.concatenate([waiting, rng.permutation(num_rows)])
        yield waiting[:count]
        waiting = waiting[count:]


def pieces(document: str, tokenizer: tokenizer_lib.Tokenizer) -> list[str]:
    """A document cut where its tokens would not fit a row with the begin token."""
    encoding = tokenizer.encode_batch([document])[0]
    starts = [encoding.offsets[i][0] for i in range(0, len(encoding), ROW_TOKENS - 1)]
    stops = [*starts[1:], len(document)]
    return [document[a:b] for a, b in zip(starts, stops, strict=True)]
