"""Seeded random projections whose entries are functions of (seed, stream, row, column).

Nothing is stored: an entry is a hash of (seed, stream, row, column), made by the
integer mixer `triple32` (C. Wellons, "Prospecting for hash functions", 2018), a
dozen vectorised operations. So any block of any projection can be made anywhere, and
a result does not depend on how the rows were cut into blocks.

All projections keep lengths on average, E‖x R‖² = ‖x‖², and inner products with a
variance of about 2/D (Johnson–Lindenstrauss):

`rademacher`  ±1/√D.
`normal`      N(0, 1/D).
`sparse`      each row has `SPARSE_ENTRIES` entries ±1/√s, one in each of s groups of
              columns (Kane & Nelson, "Sparser Johnson–Lindenstrauss transforms", JACM
              2014). Inside a run of consecutive rows as long as a group, the columns
              are one random rotation, so that applying it is signs and additions.
`identity`    the entries themselves.

I rows, D columns; x [B, I] is projected to [B, D].
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

Kind = Literal["identity", "rademacher", "normal", "sparse"]

SPARSE_ENTRIES = 4


@dataclasses.dataclass(frozen=True)
class Projection:
    """A random matrix [any number of rows, width].

    Attributes:
      kind: which entries.
      width: D, columns.
      seed: of the run.
      name: tells projections of one seed apart.
    """

    kind: Kind
    width: int
    seed: int
    name: str

    @property
    def key(self) -> tuple[int, int]:
        """The generator's two key words."""
        return self.seed % 2**32, stream(self.name)


def stream(name: str) -> int:
    """uint32 that stands for a name."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def matrix(projection: Projection, num_rows: int) -> jax.Array:
    """The first rows of a projection, [num_rows, D] float32, for small ones."""
    if projection.kind == "identity":
        return jnp.eye(num_rows, projection.width, dtype=jnp.float32)
    if projection.kind == "sparse":
        eye = jnp.eye(num_rows, dtype=jnp.float32)
        return project(eye, projection, block_size=num_rows)
    return block(projection.kind, projection.key, 0, num_rows, projection.width)


def block(
    kind: Kind,
    key: tuple[jax.typing.ArrayLike, jax.typing.ArrayLike],
    first_row: jax.typing.ArrayLike,
    num_rows: int,
    width: int,
) -> jax.Array:
    """Rows first_row … of a dense projection, [num_rows, width] float32.

    Args:
      kind: `rademacher` or `normal`.
      key: the two key words, which may be traced.
      first_row: uint32, may be traced.
      num_rows, width: static shape.
    """
    return rows(kind, key, _rows_from(first_row, num_rows), width)


def rows(
    kind: Kind,
    key: tuple[jax.typing.ArrayLike, jax.typing.ArrayLike],
    row_I: jax.Array,
    width: int,
) -> jax.Array:
    """Any rows of a dense projection, [I, width] float32."""
    return (
        signs(key, row_I, width) / math.sqrt(width)
        if kind == "rademacher"
        else (normals(key, row_I, width) / math.sqrt(width))
    )


def signs(
    key: tuple[jax.typing.ArrayLike, jax.typing.ArrayLike],
    row_I: jax.Array,
    width: int,
) -> jax.Array:
    """±1, [I, width] float32; one generated word serves 32 columns."""
    word_IW = _words(key, row_I, -(-width // 32))
    shift = jnp.arange(32, dtype=jnp.uint32)
    bits = (word_IW[:, :, None] >> shift[None, None, :]) & jnp.uint32(1)
    bits = bits.reshape(len(row_I), -1)[:, :width]
    return 1.0 - 2.0 * bits.astype(jnp.float32)


def normals(
    key: tuple[jax.typing.ArrayLike, jax.typing.ArrayLike],
    row_I: jax.Array,
    width: int,
) -> jax.Array:
    """Standard normals, [I, width] float32 (Box & Muller 1958)."""
    pairs = -(-width // 2)
    word_IW = _words(key, row_I, 2 * pairs)
    first, second = word_IW[:, :pairs], word_IW[:, pairs:]
    # 24 bits each; the first in (0, 1], so that its logarithm is finite.
    uniform = ((first >> 8).astype(jnp.float32) + 1.0) * 2.0**-24
    angle = (second >> 8).astype(jnp.float32) * (2.0**-24 * 2.0 * math.pi)
    radius = jnp.sqrt(-2.0 * jnp.log(uniform))
    both = jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], axis=2)
    return both.reshape(len(row_I), -1)[:, :width]


def project(
    values_BI: jax.Array,
    projection: Projection,
    block_size: int,
    first_row: int = 0,
) -> jax.Array:
    """Returns values @ R, [B, D] float32, making R block by block.

    Args:
      values_BI: entries first_row … first_row + I of the vectors to project.
      projection: R.
      block_size: rows of R that exist at one time, about; never changes the result
        beyond the rounding of sums.
      first_row: row of R that belongs to the first entry.
    """
    if projection.kind == "identity":
        return values_BI.astype(jnp.float32)
    if projection.kind == "sparse":
        return _project_sparse(values_BI, projection, block_size, first_row)

    def add(part_BI: jax.Array, row: jax.typing.ArrayLike) -> jax.Array:
        entries_ID = block(
            projection.kind, projection.key, row, part_BI.shape[1], projection.width
        )
        return jnp.matmul(
            part_BI.astype(jnp.float32),
            entries_ID,
            precision=jax.lax.Precision.HIGHEST,
        )

    return _sum_over_blocks(values_BI, add, projection.width, block_size, first_row)


def _project_sparse(
    values_BI: jax.Array, projection: Projection, block_size: int, first_row: int
) -> jax.Array:
    """Signs, one rotation of every run of consecutive entries, and a sum of runs."""
    groups = min(SPARSE_ENTRIES, projection.width)
    group_width = projection.width // groups
    parts = []
    for group in range(groups):
        first = group * group_width
        run = group_width if group < groups - 1 else projection.width - first
        key = (projection.key[0], stream(f"{projection.name}/{group}"))
        parts.append(_fold_runs(values_BI, key, run, block_size, first_row))
    return jnp.concatenate(parts, axis=1) / math.sqrt(groups)


def _fold_runs(
    values_BI: jax.Array,
    key: tuple[int, int],
    run: int,
    block_size: int,
    first_row: int,
) -> jax.Array:
    """Σ over runs of `run` consecutive rows of rotated(sign ∘ run), [B, run]."""

    def add(part_BI: jax.Array, row: jax.typing.ArrayLike) -> jax.Array:
        batch, count = part_BI.shape
        num_runs = -(-count // run)
        sign_I = _run_signs(key, row, num_runs * run, run)
        padded = jnp.pad(
            part_BI.astype(jnp.float32), ((0, 0), (0, num_runs * run - count))
        )
        signed = (padded * sign_I[None, :]).reshape(batch, num_runs, run)
        number = jnp.asarray(row, jnp.uint32) // jnp.uint32(run)
        number = number + jnp.arange(num_runs, dtype=jnp.uint32)
        turn = _words((key[0], key[1] ^ 0xFFFFFFFF), number, 1)[:, 0]
        place = jnp.arange(run, dtype=jnp.uint32)[None, :] + (turn % run)[:, None]
        place = (place % jnp.uint32(run)).astype(jnp.int32)
        rotated = jnp.take_along_axis(signed, place[None], axis=2)
        return jnp.sum(rotated, axis=1)

    # Blocks hold whole runs, counted from row 0 of the projection.
    whole = max(block_size // run, 1) * run
    lead = min(-first_row % run, values_BI.shape[1])
    result = _sum_over_blocks(values_BI[:, lead:], add, run, whole, first_row + lead)
    if lead:
        shift = first_row % run
        head = jnp.pad(values_BI[:, :lead], ((0, 0), (shift, 0)))
        result = result + add(head, first_row - shift)
    return result


def _run_signs(
    key: tuple[int, int], row: jax.typing.ArrayLike, count: int, run: int
) -> jax.Array:
    """±1 float32 [count] for consecutive rows; row is a multiple of `run`."""
    number = jnp.asarray(row, jnp.uint32) // jnp.uint32(run)
    number = number + jnp.arange(count // run, dtype=jnp.uint32)
    return signs(key, number, run).reshape(-1)


def _sum_over_blocks(
    values_BI: jax.Array,
    add: Callable[[jax.Array, jax.typing.ArrayLike], jax.Array],
    width: int,
    block_size: int,
    first_row: int,
) -> jax.Array:
    """Σ over blocks of `add(block of entries, its first row)`; the last is shorter."""
    batch, count = values_BI.shape
    size = max(min(block_size, count), 1)
    full = count // size
    total_BD = jnp.zeros((batch, width), jnp.float32)

    def body(total_BD, i):
        part_BI = jax.lax.dynamic_slice_in_dim(values_BI, i * size, size, axis=1)
        row = jnp.uint32(first_row) + i.astype(jnp.uint32) * jnp.uint32(size)
        return total_BD + add(part_BI, row), None

    total_BD, _ = jax.lax.scan(body, total_BD, jnp.arange(full, dtype=jnp.int32))
    if count % size:
        rest_BI = values_BI[:, full * size :]
        total_BD = total_BD + add(rest_BI, first_row + full * size)
    return total_BD


def _rows_from(first_row: jax.typing.ArrayLike, num_rows: int) -> jax.Array:
    return jnp.asarray(first_row, jnp.uint32) + jnp.arange(num_rows, dtype=jnp.uint32)


def _words(
    key: tuple[jax.typing.ArrayLike, jax.typing.ArrayLike],
    row_I: jax.Array,
    num_words: int,
) -> jax.Array:
    """Hashes of (key, row, word), uint32 [I, num_words]."""
    seed, name = (_mix(jnp.asarray(word, jnp.uint32)) for word in key)
    row_hash_I1 = _mix(_mix(row_I.astype(jnp.uint32)[:, None] ^ seed) + name)
    word_1W = jnp.arange(num_words, dtype=jnp.uint32)[None, :] * jnp.uint32(0x9E3779B9)
    return _mix(row_hash_I1 + word_1W)


def _mix(x: jax.Array) -> jax.Array:
    """`triple32`: a bijection of uint32; each input bit flips half of the output."""
    x = (x ^ (x >> 17)) * jnp.uint32(0xED5AD4BB)
    x = (x ^ (x >> 11)) * jnp.uint32(0xAC4C1B51)
    x = (x ^ (x >> 15)) * jnp.uint32(0x31848BAB)
    return x ^ (x >> 14)
