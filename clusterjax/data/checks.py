"""What was read, dropped, cut and counted: rejects, duplicates and the data report."""

from __future__ import annotations

import collections
import hashlib
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from clusterjax import datatypes, errors, packing
from clusterjax.data import layouts

# Rows that are left out by rule; every other reason is a fault of the data.
RULES = {
    "duplicate": "duplicates",
    "in_eval": "also in the held-out data",
    "zero_weight": "of weight 0",
    "no_label_tokens": "without a label token within data.max_length",
}
SHOWN = 5
SHOWN_IDS = 20
HISTOGRAM_BINS = 32


class Digests(NamedTuple):
    """128-bit hashes of a conversation: of its text, and without case and blanks."""

    exact: bytes
    normalized: bytes

    @property
    def short(self) -> int:
        """32 bits of the exact hash, with which example ids end."""
        return int.from_bytes(self.exact[:4], "big")

    def short_hex(self) -> str:
        return f"{self.short:08x}"

    def is_held_out(self, fraction: float) -> bool:
        """Whether the text falls into the held-out share; equal texts fall together."""
        head = int.from_bytes(self.normalized[:8], "big")
        return head < int(fraction * 2**64)


def digest(conversation: layouts.Conversation) -> Digests:
    """Hashes of the roles and texts of a conversation."""
    parts = [f"{m['role']}\x1e{m['content']}" for m in conversation.messages]
    text = "\x1f".join(parts)
    normalized = " ".join(text.casefold().split())
    return Digests(
        hashlib.blake2b(text.encode(), digest_size=16).digest(),
        hashlib.blake2b(normalized.encode(), digest_size=16).digest(),
    )


class Duplicates:
    """Finds later copies of earlier examples while rows stream by."""

    def __init__(self, kind: str):
        """`kind`: none, exact or normalized."""
        self._kind = kind
        self._first: dict[bytes, tuple[int, int]] = {}
        self._seen = {name: bytearray() for name in Digests._fields}

    def earlier(self, digests: Digests, place: tuple[int, int]) -> tuple | None:
        """(source, row) of the example that this one copies; None for a new text."""
        for name, seen in self._seen.items():
            seen += getattr(digests, name)[:8]
        if self._kind == "none":
            return None
        key = digests.exact if self._kind == "exact" else digests.normalized
        first = self._first.setdefault(key, place)
        return None if first == place else first

    def counts(self) -> dict[str, int]:
        """Copies beyond the first of each text, whether dropped or not."""
        heads = {k: np.frombuffer(v, np.uint64) for k, v in self._seen.items()}
        return {k: len(v) - len(np.unique(v)) for k, v in heads.items()}


class Rejects:
    """Rows that became no example, in order."""

    def __init__(self, on_error: str):
        """`on_error`: stop or skip."""
        self._on_error = on_error
        self.all: list[datatypes.Reject] = []
        self._faults: list[str] = []

    def add(self, reject: datatypes.Reject, place: str) -> None:
        self.all.append(reject)
        if reject.reason not in RULES:
            self._faults.append(f"{place}: {reject.detail} [{reject.reason}]")

    def stop_if_asked(self) -> None:
        """Raises errors.DataError when a row is faulty and `on_error` is stop."""
        if self._on_error == "skip" or not self._faults:
            return
        shown = self._faults[:SHOWN]
        more = len(self._faults) - len(shown)
        lines = "\n  ".join([*shown, *([f"and {more} more nearby"] if more else [])])
        raise errors.DataError(
            f"rows that can't be used:\n  {lines}\nMend them, or set"
            " data.on_error=skip to leave out and list such rows"
        )

    def sort(self, first: int) -> None:
        """Brings the rejects from the `first` on, all of one source, into row order."""
        self.all[first:] = sorted(self.all[first:], key=lambda reject: reject.row)

    def by_reason(self) -> dict[str, dict[str, Any]]:
        """Reason → count and the first ids."""
        counts = collections.Counter(reject.reason for reject in self.all)
        result: dict[str, dict[str, Any]] = {
            reason: {"count": count, "first": []}
            for reason, count in counts.most_common()
        }
        for reject in self.all:
            first = result[reject.reason]["first"]
            if len(first) < SHOWN_IDS:
                first.append(reject.uid or f"{reject.source}:{reject.row}")
        return result


class Lengths:
    """Length histogram, truncation and label share, gathered block by block."""

    def __init__(self, max_length: int):
        self._counts = np.zeros(max_length + 1, np.int64)
        self.num_labels = 0
        self.truncated: list[str] = []
        self.num_truncated = self.tokens_cut = self.labels_cut = 0
        self.shortest_prompt: int | None = None
        self.num_endless = 0

    def add(self, lengths: Iterable[int], num_labels: int) -> None:
        np.add.at(self._counts, np.fromiter(lengths, np.int64), 1)
        self.num_labels += num_labels

    def add_truncated(self, uid: str, tokens: int, labels: int) -> None:
        self.num_truncated += 1
        self.tokens_cut += tokens
        self.labels_cut += labels
        if len(self.truncated) < SHOWN_IDS:
            self.truncated.append(uid)

    def summary(self) -> dict[str, Any]:
        """Counts, quantiles, a histogram of equal bins, and what packing would give."""
        counts, sizes = self._counts, np.arange(len(self._counts))
        total, tokens = int(counts.sum()), int(counts @ sizes)
        below = np.cumsum(counts)
        quantile = {
            name: int(np.searchsorted(below, share * total))
            for name, share in (("p05", 0.05), ("median", 0.5), ("p95", 0.95))
        }
        used = np.flatnonzero(counts)
        bins = np.linspace(0, len(counts), HISTOGRAM_BINS + 1).astype(int)
        edges = np.unique(bins)
        return {
            "tokens": tokens,
            "label_tokens": self.num_labels,
            "label_share": self.num_labels / max(tokens, 1),
            "min": int(used[0]) if total else 0,
            "max": int(used[-1]) if total else 0,
            "mean": tokens / max(total, 1),
            **quantile,
            "histogram": {
                "edges": edges.tolist(),
                "counts": [
                    int(counts[a:b].sum()) for a, b in itertools.pairwise(edges)
                ],
            },
            "packing": self._packing(),
            "truncated": {
                "count": self.num_truncated,
                "tokens_cut": self.tokens_cut,
                "label_tokens_cut": self.labels_cut,
                "first": self.truncated,
            },
        }

    def _packing(self) -> dict[str, Any]:
        """Rows of max_length that hold everything, and the share of them in use."""
        lengths = np.repeat(np.arange(len(self._counts)), self._counts)
        if not len(lengths):
            return {"rows": 0, "used": 0.0}
        row, _ = packing.pack(lengths, len(self._counts) - 1)
        num_rows = int(row.max()) + 1
        used = float(lengths.sum() / num_rows / (len(self._counts) - 1))
        return {"rows": num_rows, "used": used}
