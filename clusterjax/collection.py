"""Gradient features collected from the passes that train (METHOD §1, `proxy`).

A training step has the final hidden states of all label positions and their losses:
all that the `proxy` feature needs,

    g_i = (1/|𝒯_i|) Σ_t (p_t[y_t] − 1) h_t,    1 − p_t[y_t] = 1 − exp(−nll_t),

so that collecting it costs one small product and no pass. The feature of an example is
that of the parameters before the step that trained on it. P = packed label positions
(`loss.find_labels`), E = R · slots, one slot per example of a shard.
"""

from __future__ import annotations

import collections
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from clusterjax import distributed, errors, files, steps

_FILE = re.compile(r"steps-(\d+)-(\d+)\.npz")


class Collected(NamedTuple):
    """What a step collects; leading axis A after a whole step.

    Attributes:
      raw: float32 [E, H], raw features.
      loss: float32 [E], mean loss over the example's label tokens, nats.
      example_id: int32 [E], corpus row, −1 = unused slot.
    """

    raw: Any
    loss: Any
    example_id: Any


def collect(
    hidden_PH: jax.Array,
    nll_P: jax.Array,
    example_P: jax.Array,
    slots: int,
    num_shards: int,
) -> Collected:
    """Raw `proxy` features and mean losses of the examples of one micro-step.

    Args:
      hidden_PH: hidden states of the packed label positions.
      nll_P: −log p of their labels, nats.
      example_P: int32, whose label it is, −1 = unused slot; the labels of an example
        lie side by side.
      slots: most examples of a shard.
      num_shards: R.

    Returns:
      Values without gradients; NaN for an example with a value that is not finite.
    """
    hidden_PH, nll_P = jax.lax.stop_gradient((hidden_PH, nll_P))
    example_RQ = example_P.reshape(num_shards, -1)
    before_RQ = jnp.pad(example_RQ[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    is_first_RQ = (example_RQ != before_RQ) & (example_RQ >= 0)
    slot_RQ = jnp.where(example_RQ >= 0, jnp.cumsum(is_first_RQ, axis=1) - 1, -1)
    member_RSQ = slot_RQ[:, None, :] == jnp.arange(slots)[None, :, None]
    miss_P = -jnp.expm1(-nll_P)
    values_PX = jnp.concatenate(
        [-miss_P[:, None] * hidden_PH.astype(jnp.float32), nll_P[:, None]], axis=1
    )
    mean_EX = means(member_RSQ, values_PX)
    example_RS = jnp.max(
        jnp.where(member_RSQ, example_RQ[:, None, :], -1), axis=2, initial=-1
    )
    return Collected(mean_EX[:, :-1], mean_EX[:, -1], example_RS.reshape(-1))


def means(member_RSQ: jax.Array, values_PX: jax.Array) -> jax.Array:
    """Means over the positions of each example, [R · slots, X] float32.

    Args:
      member_RSQ: bool, position Q of shard R is a label of the example in slot S.
      values_PX: P = R · Q.

    Returns:
      NaN for an example with a value that is not finite; 0 in an empty slot.
    """
    shards, slots, size = member_RSQ.shape
    is_finite_P = jnp.all(jnp.isfinite(values_PX), axis=1)
    is_broken_RS = jnp.any(
        member_RSQ & ~is_finite_P.reshape(shards, 1, size), axis=2, keepdims=True
    )
    count_RS1 = jnp.sum(member_RSQ, axis=2, keepdims=True, dtype=jnp.float32)
    # One example that overflows must not reach its neighbours through 0 · inf.
    values_PX = jnp.where(is_finite_P[:, None], values_PX, 0)
    mean_RSX = jnp.einsum(
        "rsq,rqx->rsx",
        member_RSQ / jnp.maximum(count_RS1, 1),
        values_PX.astype(jnp.float32).reshape(shards, size, -1),
        precision=jax.lax.Precision.HIGHEST,
    )
    return jnp.where(is_broken_RS, jnp.nan, mean_RSX).reshape(shards * slots, -1)


def slots_needed(placements: Any) -> int:
    """Most examples of one shard in one micro-step.

    Args:
      placements: iterable of `steps.Placement`.
    """
    return max(map(_fullest, placements))


def _fullest(placed: steps.Placement) -> int:
    cell = placed.micro_step * placed.num_shards + placed.shard
    return int(np.bincount(cell).max(initial=0))


class Collection:
    """The features collected so far, on disk up to the newest checkpoint.

    Attributes:
      slots: most examples of a shard in a micro-step.
    """

    def __init__(self, folder: epath.PathLike, num_steps: int, slots: int):
        """Args:
        folder: where the features lie; all processes must see it.
        num_steps: steps that collect.
        slots: as in `slots_needed`.
        """
        self.slots = slots
        self._folder, self._num_steps = epath.Path(folder), num_steps
        self._parts: collections.OrderedDict[int, Collected] = collections.OrderedDict()
        self._flushed = 0

    def add(self, step: int, found: Collected) -> None:
        """Takes what step number `step` (from 0) collected."""
        raw, loss, example_id = (
            np.asarray(leaf).reshape(-1, *leaf.shape[2:]) for leaf in found
        )
        used = example_id >= 0
        self._parts[step] = Collected(raw[used], loss[used], example_id[used])

    def flush(self, done: int) -> None:
        """Writes the steps before `done` to disk; before the checkpoint of that step.

        A start that goes on from a checkpoint then finds all features up to it.
        """
        if done <= self._flushed or self._flushed >= self._num_steps:
            return
        parts = [p for step, p in self._parts.items() if self._flushed <= step < done]
        joined = Collected(*map(np.concatenate, zip(*parts, strict=True)))
        if distributed.is_primary():
            path = self._folder / f"steps-{self._flushed}-{done}.npz"
            files.write_with(path, lambda temporary: _save(temporary, joined))
        self._flushed = done

    def resume(self, done: int) -> None:
        """Reads what was collected before step `done`, and forgets all after it.

        Raises:
          errors.WorkdirError: files are missing.
        """
        self._parts.clear()
        self._flushed = 0
        # Where a start lost its newest checkpoint, spans overlap: the longest counts.
        spans = sorted(_files(self._folder), key=lambda span: (span[0], -span[1]))
        for first, last, path in spans:
            if first != self._flushed or last > done:
                continue
            with path.open("rb") as file, np.load(file) as stored:
                self._parts[first] = Collected(*(stored[n] for n in Collected._fields))
            self._flushed = last
        if self._flushed < min(done, self._num_steps):
            raise errors.WorkdirError(
                f"{self._folder} has the features of {self._flushed:,} of the"
                f" {min(done, self._num_steps):,} steps that are trained already; start"
                " again in another --workdir"
            )

    def gather(self, num_examples: int) -> tuple[np.ndarray, np.ndarray]:
        """Raw features float32 [N, H] and mean losses float32 [N], by corpus row.

        An example that was not trained on has NaN.
        """
        width = next(iter(self._parts.values())).raw.shape[1]
        raw_NH = np.full((num_examples, width), np.nan, np.float32)
        loss_N = np.full(num_examples, np.nan, np.float32)
        for part in self._parts.values():
            raw_NH[part.example_id] = part.raw
            loss_N[part.example_id] = part.loss
        return raw_NH, loss_N


def _save(path: epath.Path, found: Collected) -> None:
    with path.open("wb") as file:
        np.savez(file, raw=found.raw, loss=found.loss, example_id=found.example_id)


def _files(folder: epath.Path) -> list[tuple[int, int, epath.Path]]:
    if not folder.exists():
        return []
    found = ((_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return [(int(m[1]), int(m[2]), path) for m, path in found if m]
