"""Text to tokens, once; labels by character offsets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tokenizers

from clusterjax.data import chat
from clusterjax.data import tokenizer as tokenizer_lib


class Encoded(NamedTuple):
    """Tokens of one example, cut to the longest length.

    Attributes:
      tokens: int32 [n].
      label_mask: bool [n]; the first token is never a label.
      full_length: tokens before the cut.
      full_labels: labels before the cut.
      first_label: position of the first label before the cut, the prompt's length.
    """

    tokens: np.ndarray
    label_mask: np.ndarray
    full_length: int
    full_labels: int
    first_label: int


def encode(
    tokenizer: tokenizer_lib.Tokenizer,
    texts: Sequence[chat.Rendered],
    max_length: int,
) -> list[Encoded]:
    """Tokenises each text once and marks its labels; see `mark`."""
    encodings = tokenizer.encode_batch([text.text for text in texts])
    return mark(tokenizer, texts, encodings, max_length)


def mark(
    tokenizer: tokenizer_lib.Tokenizer,
    texts: Sequence[chat.Rendered],
    encodings: Sequence[tokenizers.Encoding],
    max_length: int,
) -> list[Encoded]:
    """Marks the labels of tokenised texts and cuts what is too long.

    A label span that begins or ends inside a token cuts it: the two parts are spelled
    with the model's own pieces, as at inference, where the prompt ends there. So the
    labels decode to exactly the span.

    Args:
      tokenizer: when it puts a begin token before texts, one begin token is there,
        whether the text spells it or not.
      texts: texts with their label spans.
      encodings: of `tokenizer.encode_batch`.
      max_length: longest example; the end of a longer one is cut off.
    """
    return [
        _one(tokenizer, text, encoding, max_length)
        for text, encoding in zip(texts, encodings)
    ]


def _one(
    tokenizer: tokenizer_lib.Tokenizer,
    text: chat.Rendered,
    encoding: tokenizers.Encoding,
    max_length: int,
) -> Encoded:
    ids = encoding.ids
    edges = [edge for span in text.spans for edge in span]
    positions = _edges(encoding, edges, len(text.text))
    if positions is None:
        ids, positions = _cut_tokens(tokenizer, encoding, edges, text.text)
    if tokenizer.adds_bos and ids[:1] != [tokenizer.bos_id]:
        ids = [tokenizer.bos_id, *ids]
        positions = [position + 1 for position in positions]
    tokens = np.array(ids, np.int32)
    mask = np.zeros(len(ids), bool)
    for first, end in zip(positions[::2], positions[1::2]):
        mask[first:end] = True
    mask[:1] = False
    full = int(np.count_nonzero(mask))
    first = int(np.argmax(mask)) if full else len(ids)
    return Encoded(tokens[:max_length], mask[:max_length], len(ids), full, first)


def _edges(
    encoding: tokenizers.Encoding, edges: list[int], length: int
) -> list[int] | None:
    """First token at or after each character edge; None if a token straddles one."""
    found = []
    for edge in edges:
        if edge >= length:
            found.append(len(encoding))
            continue
        token = encoding.char_to_token(edge)
        span = encoding.token_to_chars(token) if token is not None else None
        if span is None or span[0] != edge:
            return None
        found.append(token)
    return found


def _cut_tokens(
    tokenizer: tokenizer_lib.Tokenizer,
    encoding: tokenizers.Encoding,
    edges: list[int],
    text: str,
) -> tuple[list[int], list[int]]:
    """(ids, first token of each edge) with every straddling token cut at the edge."""
    ids: list[int] = []
    starts: list[int] = []  # first character of each id
    remaining = sorted(set(edges))
    for token_id, (start, end) in zip(encoding.ids, encoding.offsets):
        inside = [edge for edge in remaining if start < edge < end]
        pieces = [(start, [token_id])]
        if inside:
            pieces = _cut(tokenizer, token_id, text, [start, *inside, end])
        for first, piece in pieces:
            ids += piece
            starts += [first] * len(piece)
    begin = np.array(starts, np.int64)
    return ids, [int(np.searchsorted(begin, edge)) for edge in edges]


def _cut(
    tokenizer: tokenizer_lib.Tokenizer, token_id: int, text: str, bounds: list[int]
) -> list[tuple[int, list[int]]]:
    """(first character, ids) of the parts of a token between `bounds`."""
    parts = [text[a:b] for a, b in itertools.pairwise(bounds)]
    ids = tokenizer.split_token(token_id, parts)
    # Without a spelling of the parts the token stays whole and belongs to what it
    # begins in, so that no label shows a part of the prompt.
    return list(zip(bounds, ids)) if ids else [(bounds[0], [token_id])]
