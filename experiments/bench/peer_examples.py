"""Examples in the form that PyTorch peers take: token ids, and labels or −100."""

from __future__ import annotations

import numpy as np

from clusterjax import datatypes


def of(corpus: datatypes.Corpus) -> list[tuple[list[int], list[int]]]:
    """(token ids, labels) of every example; −100 where no label is, as in PyTorch."""
    result = []
    for i in range(corpus.num_examples):
        tokens, is_label = corpus.example(i)
        labels = np.where(is_label, tokens, -100)
        result.append((tokens.tolist(), labels.tolist()))
    return result
