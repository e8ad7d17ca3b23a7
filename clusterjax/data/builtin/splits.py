"""Train or held-out, by a hash of the example's key: the same on every Python."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

HELDOUT_FRACTION = 0.1
SPLITS = ("train", "heldout")


class Example(NamedTuple):
    """One instruction with its answer.

    Attributes:
      key: what the split is drawn by (qualified name, or family and task); rewordings
        of one task share it.
      source: name used in reports.
      family: ground-truth group of the example.
      instruction: the prompt.
      response: the answer.
    """

    key: str
    source: str
    family: str
    instruction: str
    response: str


def is_heldout(key: str) -> bool:
    """Whether `key` belongs to the held-out part (a tenth of all keys).

    The first 8 bytes of SHA-256 of the key, as a fraction of 2^64, are compared with
    `HELDOUT_FRACTION`: no Python version, hash seed or file order enters.
    """
    head = hashlib.sha256(key.encode()).digest()[:8]
    return int.from_bytes(head, "big") < int(HELDOUT_FRACTION * 2**64)


def normalise(text: str) -> str:
    """`text` without differences of case and whitespace, to find duplicates by."""
    return "".join(text.split()).casefold()


def split(
    examples: Iterable[Example], fingerprints: Callable[[Example], tuple[str, ...]]
) -> dict[str, list[Example]]:
    """Divides examples by `is_heldout`, without a duplicate across the two parts.

    Args:
      examples: all examples, in order.
      fingerprints: the texts that make two examples duplicates when one of them is
        equal after `normalise`.

    Returns:
      `{'train': [...], 'heldout': [...]}` in the given order. A training example
      with a fingerprint of a held-out one is removed.
    """
    parts: dict[str, list[Example]] = {name: [] for name in SPLITS}
    for example in examples:
        parts["heldout" if is_heldout(example.key) else "train"].append(example)
    taken = {
        normalise(text)
        for example in parts["heldout"]
        for text in fingerprints(example)
    }
    parts["train"] = [
        example
        for example in parts["train"]
        if not any(normalise(text) in taken for text in fingerprints(example))
    ]
    return parts
