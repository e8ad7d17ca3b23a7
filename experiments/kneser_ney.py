"""Interpolated modified Kneser–Ney language model over bytes, in NumPy.

S. F. Chen and J. Goodman, "An empirical study of smoothing techniques for language
modeling", Computer Speech & Language 13 (1999), equations 21 to 26: three discounts per
order, lower orders counted by distinct left neighbours, interpolation at every order,
and the uniform distribution over 256 bytes below the unigrams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

NUM_BYTES = 256
BITS = 9  # 256 bytes and the boundary symbol
BOUNDARY = NUM_BYTES
MAX_ORDER = 64 // BITS


@dataclasses.dataclass(frozen=True)
class Level:
    """Counts of the n-grams of one order, keyed for binary search.

    Attributes:
      gram: sorted uint64 n-grams.
      probability: discounted share of each n-gram in its context, before
        interpolation.
      context: sorted uint64 contexts (n-grams without their last byte).
      backoff: what each context leaves to the order below.
    """

    gram: np.ndarray
    probability: np.ndarray
    context: np.ndarray
    backoff: np.ndarray


class KneserNey:
    """A byte n-gram model fitted to documents.

    Example:
        model = KneserNey(documents, order=5)
        bits = model.bits(document)  # float64, one value per byte
    """

    def __init__(self, documents: Sequence[bytes], order: int = 5):
        """Counts the documents; each starts after `order − 1` boundary symbols.

        Raises:
          ValueError: no byte in the documents, or an order outside 1 to 7.
        """
        if not 1 <= order <= MAX_ORDER:
            raise ValueError(f"order={order} must be from 1 to {MAX_ORDER}")
        if not any(documents):
            raise ValueError("the documents hold no byte")
        self.order = order
        symbols, inside = _symbols(documents, order)
        grams = _windows(symbols, order)[inside[order - 1 :]]
        gram, count = np.unique(grams, return_counts=True)
        levels = []
        for length in range(order, 0, -1):
            levels.append(_level(gram, count))
            if length == 1:
                break
            # The order below is counted by distinct left neighbours. A gram that
            # begins at the document's start has no left neighbour but the boundary,
            # so its own count stands (Chen & Goodman; Heafield et al. 2013 §3.1).
            gram, count = _shorten(gram, count, length)
        self.levels = levels[::-1]

    def bits(self, document: bytes) -> np.ndarray:
        """−log2 of the probability of each byte of a document, float64 [bytes]."""
        symbols, inside = _symbols([document], self.order)
        probability = np.full(len(document), 1.0 / NUM_BYTES)
        for length, level in enumerate(self.levels, start=1):
            grams = _windows(symbols, length)[inside[length - 1 :]]
            backoff = _look_up(level.context, level.backoff, grams >> BITS, 1.0)
            own = _look_up(level.gram, level.probability, grams, 0.0)
            probability = own + backoff * probability
        return -np.log2(probability)

    def bits_per_byte(self, documents: Sequence[bytes]) -> float:
        """Mean of `bits` over all bytes of the documents."""
        total = sum(float(self.bits(document).sum()) for document in documents)
        return total / sum(map(len, documents))


def _symbols(documents: Sequence[bytes], order: int) -> tuple[np.ndarray, np.ndarray]:
    """All documents after boundaries (uint64), and where a symbol is a byte."""
    boundary = np.full(order - 1, BOUNDARY, np.uint64)
    pieces = []
    for document in documents:
        pieces += [boundary, np.frombuffer(document, np.uint8).astype(np.uint64)]
    symbols = np.concatenate(pieces)
    return symbols, symbols != BOUNDARY


def _windows(symbols: np.ndarray, length: int) -> np.ndarray:
    """Every run of `length` symbols as one uint64, the last symbol lowest."""
    count = len(symbols) - length + 1
    grams = np.zeros(count, np.uint64)
    for i in range(length):
        grams = (grams << np.uint64(BITS)) | symbols[i : i + count]
    return grams


def _shorten(
    gram: np.ndarray, count: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """(length − 1)-grams with their continuation counts."""
    mask = np.uint64((1 << (BITS * (length - 1))) - 1)
    first_of_rest = (gram >> np.uint64(BITS * (length - 2))) & np.uint64(2**BITS - 1)
    at_start = (first_of_rest == BOUNDARY) & (length > 2)
    shorter, index = np.unique(gram & mask, return_inverse=True)
    weight = np.where(at_start, count, 1)
    return shorter, np.bincount(index, weight).astype(np.int64)


def _level(gram: np.ndarray, count: np.ndarray) -> Level:
    context, index = np.unique(gram >> np.uint64(BITS), return_inverse=True)
    total = np.bincount(index, count)
    discount = _discounts(count)[np.minimum(count, 3)]
    return Level(
        gram=gram,
        probability=(count - discount) / total[index],
        context=context,
        backoff=np.bincount(index, discount) / total,
    )


def _discounts(count: np.ndarray) -> np.ndarray:
    """[0, D1, D2, D3+] of Chen & Goodman, equation 26.

    With little data a count of counts may be zero and the estimate undefined or out of
    range; it then is the middle of what is allowed, half of its count.
    """
    n1, n2, n3, n4 = (int((count == i).sum()) for i in range(1, 5))
    share = n1 / (n1 + 2 * n2) if n1 + n2 else 0.5
    result = [0.0]
    for i, (here, above) in enumerate(((n1, n2), (n2, n3), (n3, n4)), start=1):
        value = i - (i + 1) * share * above / here if here else i / 2
        result.append(value if 0 < value < i else i / 2)
    return np.asarray(result)


def _look_up(
    keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, missing: float
) -> np.ndarray:
    """The value of each wanted key, or `missing`."""
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[index] == wanted, values[index], missing)
