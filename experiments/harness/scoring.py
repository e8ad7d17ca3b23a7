"""Log-likelihoods and answers of a decoder, as evaluation suites ask for them.

Requests of any length share batches: rows are sorted by length, padded on the right and
masked, so that the figures of a request do not depend on its neighbours. Nothing here
needs lm-evaluation-harness.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from clusterjax import loss as loss_lib
from clusterjax import progress
from clusterjax.data import tokenizer as tokenizer_lib
from clusterjax.models import decoder, generation

_LENGTH_STEP = 32
# Answers grow by so many tokens between two looks for a stop text.
_STRIDE = 64


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens of which the last `num_scored` are predicted from those before them."""

    tokens: tuple[int, ...]
    num_scored: int


@dataclasses.dataclass(frozen=True)
class Score:
    """Of a window's scored tokens.

    Attributes:
      log_likelihood: Σ log p, nats.
      is_greedy: whether each of them is the likeliest token at its place.
    """

    log_likelihood: float
    is_greedy: bool


@dataclasses.dataclass(frozen=True)
class Stop:
    """When an answer ends.

    Attributes:
      max_new_tokens: at the latest after so many.
      texts: the answer ends before the first of these.
      temperature: 0 takes the likeliest token.
    """

    max_new_tokens: int
    texts: tuple[str, ...] = ()
    temperature: float = 0.0


class Scorer:
    """A decoder with its tokenizer.

    Attributes:
      max_length: longest row that the decoder was trained for, tokens.
      prefix_id: what stands before a text that begins with nothing: the begin token,
        or the end token where there is none.
    """

    def __init__(
        self,
        tokenizer: tokenizer_lib.Tokenizer,
        model: decoder.Decoder,
        *,
        batch_size: int = 16,
        max_length: int | None = None,
        vocab_chunk: int = 8192,
    ):
        """Args: rows of a batch, a shorter `max_length`, `loss.token_nll`'s chunk.

        Raises:
          ValueError: the tokenizer has neither begin nor end token.
        """
        first = (tokenizer.bos_id, tokenizer.eos_id)
        known = [token for token in first if token is not None]
        if not known:
            raise ValueError("the tokenizer has neither a begin nor an end token")
        self.tokenizer = tokenizer
        self.prefix_id = known[0]
        self.max_length = max_length or model.config.max_positions
        self._model, self._batch_size = model, batch_size
        self._graph, self._params = nnx.split(model)
        self._score = functools.partial(_score, vocab_chunk=vocab_chunk)

    def continuation(self, context: str, continuation: str) -> Window:
        """The window of a text after another one.

        Blanks at the end of the context belong to what follows, as most tokenizers
        join a blank and the word after it. Too long a context loses its beginning.
        """
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        before = self._encode(bare)
        tokens = self._encode(bare + continuation)
        # A token may span the border; it counts as part of the context.
        num_scored = max(len(tokens) - len(before), 0)
        if len(tokens) == num_scored:
            tokens = [self.prefix_id, *tokens]
        num_scored = min(num_scored, self.max_length)
        return Window(tuple(tokens[-(self.max_length + 1) :]), num_scored)

    def rolling(self, text: str) -> list[Window]:
        """Windows that predict every token of a text once.

        The first token is predicted from `prefix_id`. A text of more than `max_length`
        tokens is cut; each later window looks back as far as it can.
        """
        tokens = [self.prefix_id, *self.tokenizer.encode(text)]
        windows = []
        for begin in range(1, len(tokens), self.max_length):
            end = min(begin + self.max_length, len(tokens))
            seen = tokens[max(end - self.max_length - 1, 0) : end]
            windows.append(Window(tuple(seen), end - begin))
        return windows

    def score(self, windows: Sequence[Window]) -> list[Score]:
        """Scores in the order of `windows`; an empty window has likelihood one."""
        scores = [Score(0.0, True)] * len(windows)
        chosen = [i for i, window in enumerate(windows) if window.num_scored]
        chosen.sort(key=lambda i: -len(windows[i].tokens))
        with progress.track("windows", len(chosen), "windows") as advance:
            for ids in _groups(chosen, self._batch_size):
                found = self._batch([windows[i] for i in ids])
                for i, score in zip(ids, found, strict=True):
                    scores[i] = score
                advance(len(ids))
        return scores

    def _batch(self, windows: Sequence[Window]) -> list[Score]:
        longest = max(len(window.tokens) for window in windows) - 1
        shape = (self._batch_size, -(-longest // _LENGTH_STEP) * _LENGTH_STEP)
        inputs, targets, segments = (np.zeros(shape, np.int32) for _ in range(3))
        mask = np.zeros(shape, bool)
        for row, window in enumerate(windows):
            n = len(window.tokens) - 1
            inputs[row, :n], targets[row, :n] = window.tokens[:-1], window.tokens[1:]
            segments[row, :n] = 1
            mask[row, n - window.num_scored : n] = True
        # Powers of two, so that few sizes are compiled.
        size = 1 << int(np.ceil(np.log2(mask.sum())))
        found = self._score(
            self._graph, self._params, inputs, targets, segments, mask, size=size
        )
        nll_P, is_top_P, index_P, valid_P = map(np.asarray, found)
        row_P = index_P[valid_P] // shape[1]
        total = np.bincount(row_P, nll_P[valid_P].astype(np.float64), self._batch_size)
        misses = np.bincount(row_P, ~is_top_P[valid_P], self._batch_size)
        return [Score(-float(total[i]), misses[i] == 0) for i in range(len(windows))]

    def generate(
        self,
        prompts: Sequence[str],
        stops: Sequence[Stop],
        key: jax.Array | None = None,
    ) -> list[str]:
        """Continues each prompt until its stop; prompts of one stop share batches.

        Too long a prompt loses its beginning.

        Args:
          prompts: texts.
          stops: one for each prompt.
          key: for draws at a temperature; None: a fixed one.
        """
        answers = [""] * len(prompts)
        key = jax.random.key(0) if key is None else key
        for number, stop in enumerate(dict.fromkeys(stops)):
            ids = [i for i, other in enumerate(stops) if other == stop]
            tokens = {i: self._prompt(prompts[i], stop) for i in ids}
            ids.sort(key=lambda i: -len(tokens[i]))
            with progress.track("answers", len(ids), "prompts") as advance:
                for count, group in enumerate(_groups(ids, self._batch_size)):
                    draw = jax.random.fold_in(jax.random.fold_in(key, number), count)
                    found = self._continue([tokens[i] for i in group], stop, draw)
                    for i, answer in zip(group, found, strict=True):
                        answers[i] = answer
                    advance(len(group))
        return answers

    def _prompt(self, text: str, stop: Stop) -> list[int]:
        tokens = self._encode(text) or [self.prefix_id]
        room = self.max_length - stop.max_new_tokens
        if room < 1:
            raise ValueError(
                f"{stop.max_new_tokens} new tokens leave no room for a prompt: the"
                f" decoder reads {self.max_length} tokens"
            )
        return tokens[-room:]

    def _continue(
        self, prompts: list[list[int]], stop: Stop, key: jax.Array
    ) -> list[str]:
        """Answers of one batch, looked at every `_STRIDE` tokens."""
        end_id = self.tokenizer.eos_id
        new: list[list[int]] = [[] for _ in prompts]
        open_rows = list(range(len(prompts)))
        for done in range(0, stop.max_new_tokens, _STRIDE):
            if not open_rows:
                break
            rows = [prompts[i] + new[i] for i in open_rows]
            # A full batch always: one program for each padded length.
            rows += [rows[0][-1:]] * (self._batch_size - len(rows))
            found = generation.generate(
                self._model,
                rows,
                min(_STRIDE, stop.max_new_tokens - done),
                end_ids=() if end_id is None else (end_id,),
                temperature=stop.temperature,
                key=jax.random.fold_in(key, done),
            )
            for i, tokens in zip(open_rows, found, strict=False):
                new[i] += tokens.tolist()
            open_rows = [i for i in open_rows if not self._is_done(new[i], stop)]
        return [_until(self._text(tokens), stop.texts) for tokens in new]

    def _is_done(self, tokens: list[int], stop: Stop) -> bool:
        text = self._text(tokens)
        return tokens[-1] == self.tokenizer.eos_id or _until(text, stop.texts) != text

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode([t for t in tokens if t != self.tokenizer.eos_id])

    def _encode(self, text: str) -> list[int]:
        """Ids, with the begin token where the tokenizer itself would put it."""
        tokens, bos = self.tokenizer.encode(text), self.tokenizer.bos_id
        if text and self.tokenizer.adds_bos and bos is not None and tokens[:1] != [bos]:
            return [bos, *tokens]
        return tokens


def _until(text: str, stops: Sequence[str]) -> str:
    ends = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(ends)] if ends else text


def _groups(items: list[int], size: int) -> Iterator[list[int]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


@functools.partial(jax.jit, static_argnames=("graph", "size", "vocab_chunk"))
def _score(
    graph: Any,
    params: Any,
    inputs_BT: jax.Array,
    targets_BT: jax.Array,
    segments_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    size: int,
    vocab_chunk: int,
) -> tuple[jax.Array, ...]:
    """−log p and "is the likeliest" at the masked positions, packed; and where."""
    model = nnx.merge(graph, params)
    hidden_BTH = model.hidden(inputs_BT, segments_BT)
    labels = loss_lib.find_labels(mask_BT, size)
    hidden_PH, targets_P = labels.take(hidden_BTH), labels.take(targets_BT)
    matrix_VH = model.output_matrix()
    nll_P = loss_lib.token_nll(hidden_PH, targets_P, matrix_VH, vocab_chunk)

    def best(carry, logits_PC, chunk: loss_lib.Chunk):
        top_P, token_P = carry
        fresh_PC = jnp.where(chunk.fresh_C[None, :], logits_PC, -jnp.inf)
        here_P = jnp.max(fresh_PC, axis=1)
        found_P = chunk.vocab_C[jnp.argmax(fresh_PC, axis=1)]
        # Of equals the first, as a greedy choice from whole logits takes it.
        better_P = here_P > top_P
        return jnp.maximum(top_P, here_P), jnp.where(better_P, found_P, token_P)

    start = (jnp.full(nll_P.shape, -jnp.inf, nll_P.dtype), jnp.zeros_like(targets_P))
    _, token_P = loss_lib.over_vocabulary(
        best, start, hidden_PH, matrix_VH, vocab_chunk
    )
    return nll_P, token_P == targets_P, labels.index_P, labels.valid_P
