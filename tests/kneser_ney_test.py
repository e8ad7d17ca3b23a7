"""The byte baseline against a plain reading of its definition."""

import collections
import math

import numpy as np
import pytest

from experiments import kneser_ney


class Plain:
    """Modified Kneser–Ney, written from the definition with dictionaries."""

    def __init__(self, documents, order):
        self.order = order
        counts = collections.Counter()
        for document in documents:
            symbols = ["^"] * (order - 1) + list(document)
            for end in range(order - 1, len(symbols)):
                counts[tuple(symbols[end - order + 1 : end + 1])] += 1
        self.counts = {order: counts}
        for n in range(order - 1, 0, -1):
            lower = collections.Counter()
            for gram, count in self.counts[n + 1].items():
                # Nothing stands before a document's start: such a gram keeps its count.
                starts = n > 1 and gram[1] == "^"
                lower[gram[1:]] += count if starts else 1
            self.counts[n] = lower
        self.discounts = {}
        for n, table in self.counts.items():
            n1, n2, n3, n4 = (sum(c == k for c in table.values()) for k in (1, 2, 3, 4))
            y = n1 / (n1 + 2 * n2) if n1 + n2 else 0.5
            estimates = [
                1 - 2 * y * n2 / n1 if n1 else math.nan,
                2 - 3 * y * n3 / n2 if n2 else math.nan,
                3 - 4 * y * n4 / n3 if n3 else math.nan,
            ]
            self.discounts[n] = [
                e if 0 < e < k else k / 2 for k, e in enumerate(estimates, 1)
            ]

    def probability(self, context, symbol, n=None):
        n = self.order if n is None else n
        if n == 0:
            return 1 / 256
        context = tuple(context)[len(context) - n + 1 :] if n > 1 else ()
        followers = {g[-1]: c for g, c in self.counts[n].items() if g[:-1] == context}
        lower = self.probability(context, symbol, n - 1)
        if not followers:
            return lower
        total = sum(followers.values())
        taken = sum(self.discounts[n][min(c, 3) - 1] for c in followers.values())
        own = followers.get(symbol, 0)
        own -= self.discounts[n][min(own, 3) - 1] if own else 0
        return own / total + taken / total * lower


@pytest.fixture
def documents(rng):
    words = [b"alpha", b"beta ", b"gamma(", b"x = ", b"\n", b"\xc3\xa9\x00"]
    return [
        b"".join(words[i] for i in rng.integers(0, len(words), rng.integers(1, 30)))
        for _ in range(25)
    ]


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_equals_the_definition(documents, order):
    model = kneser_ney.KneserNey(documents[:20], order)
    plain = Plain(documents[:20], order)
    for document in [*documents[20:], b"\xff unseen \xff", b"a"]:
        symbols = ["^"] * (order - 1) + list(document)
        expected = [
            -math.log2(
                plain.probability(symbols[i : i + order - 1], symbols[i + order - 1])
            )
            for i in range(len(document))
        ]
        np.testing.assert_allclose(model.bits(document), expected, rtol=1e-12)


@pytest.mark.parametrize("context", [b"", b"a", b"gam", b"x = x = ", b"\xff\xfe"])
def test_probabilities_sum_to_one(documents, context):
    model = kneser_ney.KneserNey(documents, 5)
    total = sum(2.0 ** -model.bits(context + bytes([b]))[-1] for b in range(256))
    assert total == pytest.approx(1.0, abs=1e-12)


def test_worked_by_hand():
    """Bigrams of "aab" and "ab": a two-line example of the continuation counts."""
    model = kneser_ney.KneserNey([b"aab", b"ab"], 2)
    # Bigrams: ^a 2, aa 1, ab 2. Continuation counts: a follows {^, a}, b follows {a}.
    # Order 2: n1 = 1, n2 = 2, so Y = 1/5, D1 = 1 − 2·(1/5)·2 = 0.2 and
    # D2 = 2 − 0 = 2, which leaves nothing and is replaced by 1.
    # Order 1: n1 = 1, n2 = 1, Y = 1/3, D1 = 1 − 2/3 = 1/3, D2 → 1.
    unigram_b = (1 - 1 / 3) / 3 + (1 / 3 + 1) / 3 / 256
    bigram_ab = (2 - 1) / 3 + (1 + 0.2) / 3 * unigram_b
    assert model.bits(b"ab")[1] == pytest.approx(-math.log2(bigram_ab), rel=1e-12)


def test_more_context_and_more_text_help(documents):
    train, heldout = documents[:20], documents[20:]
    by_order = [
        kneser_ney.KneserNey(train, n).bits_per_byte(heldout) for n in (1, 2, 4)
    ]
    assert by_order[0] > by_order[1] > by_order[2]
    little = kneser_ney.KneserNey(train[:1], 4).bits_per_byte(heldout)
    assert little > by_order[2]


def test_long_documents_do_not_leak_into_each_other():
    model = kneser_ney.KneserNey([b"ab", b"cd"], 3)
    joined = kneser_ney.KneserNey([b"abcd"], 3)
    assert model.bits(b"bc")[1] > joined.bits(b"bc")[1]


def test_impossible_input_is_refused():
    with pytest.raises(ValueError, match="order=8"):
        kneser_ney.KneserNey([b"a"], 8)
    with pytest.raises(ValueError, match="no byte"):
        kneser_ney.KneserNey([b""], 3)
