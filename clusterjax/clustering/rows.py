"""Rows of a matrix laid over the data shards of a mesh.

Shard s holds the global rows [s · n, (s + 1) · n); padding of weight 0 stands at the
end. All random choices hang on the global row number, so they are the same on any
number of shards.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from clusterjax import errors

DATA_AXES = ("data", "fsdp")
# Rows that share one key of noise; shards hold whole groups of this size.
NOISE_ROWS = 256
# Rows whose distances are in memory at once, by default.
BLOCK_ROWS = 2048
# Up to this size, padding to a compiled shape costs less than another compilation.
SHARED_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows on the devices, centred, padded with weight 0 to whole blocks.

    Attributes:
      values_ND: float32 [N', D], sharded by rows.
      weight_N: float32 [N'], 0 for padding.
      square_N: float32 [N'], squared length of each (centred) row.
      offset_D: float32 [D], was subtracted from every row.
      variance: mean over features of the (weighted) variance.
      num_rows: N, without padding.
      spherical: rows are scaled to unit length, and centres are to be.
      mesh: the mesh whose data axes hold the rows.
      block: rows whose distances are in memory at once; divides a shard.
    """

    values_ND: jax.Array
    weight_N: jax.Array
    square_N: jax.Array
    offset_D: np.ndarray
    variance: float
    num_rows: int
    spherical: bool
    mesh: Mesh
    block: int

    def fetch(self, index: np.ndarray) -> np.ndarray:
        """float32 [len(index), D], the (centred) rows of these numbers, on the host."""
        return np.asarray(_take(self.values_ND, jnp.asarray(index), mesh=self.mesh))


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of `mesh` that rows are split over."""
    return tuple(axis for axis in DATA_AXES if axis in mesh.axis_names)


def num_shards(mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in data_axes(mesh))


def single_device_mesh() -> Mesh:
    device = jax.local_devices()[0]
    return Mesh(np.array([device]), ("data",), axis_types=(AxisType.Auto,))


def _block_rows(most: int, num_rows: int, shards: int) -> int:
    """Rows of one block: whole noise groups, no larger than a shard needs."""
    per_shard = math.ceil(num_rows / shards / NOISE_ROWS) * NOISE_ROWS
    return min(max(1, most // NOISE_ROWS) * NOISE_ROWS, per_shard)


def place(
    values_ND: Any,
    weight_N: np.ndarray | None,
    mesh: Mesh | None,
    *,
    spherical: bool = False,
    row_names: Any = None,
    block_rows: int = BLOCK_ROWS,
    like: Rows | None = None,
) -> Rows:
    """Lays rows over the data shards of `mesh` (one device when it is None).

    Args:
      values_ND: float [N, D], a NumPy array, a memory map or a jax array. Each process
        reads only the rows of its own shards.
      weight_N: float [N] row weights, all 1 when None.
      mesh: mesh with an axis `data` and/or `fsdp`.
      spherical: scale rows to unit length; otherwise the mean row is subtracted, which
        keeps distances exact far from the origin.
      row_names: ids of the rows for error messages, row numbers when None.
      block_rows: most rows whose distances are in memory at once.
      like: rows of a shape that is already compiled for, taken over if it is small.

    Raises:
      UserError: a row is not finite, there is no row, or shapes do not fit.
    """
    _check(values_ND, weight_N)
    mesh = mesh or single_device_mesh()
    num_rows, dim = values_ND.shape
    shards = num_shards(mesh)
    block = _block_rows(block_rows, num_rows, shards)
    padded = math.ceil(num_rows / shards / block) * block * shards
    if like is not None and padded <= len(like.values_ND) <= SHARED_ROWS:
        block, padded = like.block, len(like.values_ND)
    sharding = NamedSharding(mesh, P(data_axes(mesh)))

    def rows_of(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(padded)
        part = np.asarray(values_ND[start : min(stop, num_rows)], np.float32)
        return _pad(part, stop - start)

    def weights_of(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(padded)
        size = max(0, min(stop, num_rows) - start)
        part = (
            np.ones(size, np.float32)
            if weight_N is None
            else np.asarray(weight_N[start : start + size], np.float32)
        )
        return _pad(part, stop - start)

    values = jax.make_array_from_callback((padded, dim), sharding, rows_of)
    weight = jax.make_array_from_callback((padded,), sharding, weights_of)
    values, square, offset, variance, finite = _prepare(
        values, weight, num_rows, spherical=spherical, mesh=mesh
    )
    finite_N = to_host(finite, num_rows)
    if not finite_N.all():
        raise _not_finite(np.flatnonzero(~finite_N), num_rows, row_names)
    return Rows(
        values_ND=values,
        weight_N=weight,
        square_N=square,
        offset_D=np.asarray(offset),
        variance=float(variance),
        num_rows=num_rows,
        spherical=spherical,
        mesh=mesh,
        block=block,
    )


def to_host(array: jax.Array, num_rows: int) -> np.ndarray:
    """The first `num_rows` of a row-sharded array, on every process."""
    if not array.is_fully_addressable:
        from jax.experimental import multihost_utils

        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)[:num_rows]


@functools.partial(jax.jit, static_argnames=("spherical", "mesh"))
def _prepare(
    values_ND: jax.Array,
    weight_N: jax.Array,
    num_rows: jax.Array,
    *,
    spherical: bool,
    mesh: Mesh,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Centred (or unit) rows, squares, offset, mean variance, which are finite."""
    axes = data_axes(mesh)

    def local(x_ND: jax.Array, w_N: jax.Array) -> Any:
        total = jax.lax.psum(jnp.sum(w_N), axes)
        real_N = _global_row(x_ND.shape[0], axes, mesh) < num_rows
        length_N = jnp.sqrt(jnp.sum(x_ND * x_ND, axis=1))
        finite_N = jnp.isfinite(length_N)
        if spherical:
            # A row without a direction is as bad as one that is not finite.
            finite_N &= (length_N > 0) | ~real_N
            x_ND = x_ND / jnp.where(length_N > 0, length_N, 1)[:, None]
        mean_D = jax.lax.psum(w_N @ x_ND, axes) / total
        second = jax.lax.psum(w_N @ ((x_ND - mean_D[None]) ** 2), axes) / total
        offset_D = jnp.zeros_like(mean_D) if spherical else mean_D
        # Padding stays at zero, so that no distance to it can overflow.
        x_ND = jnp.where(real_N[:, None], x_ND - offset_D[None], 0)
        square_N = jnp.sum(x_ND * x_ND, axis=1)
        return x_ND, square_N, offset_D, jnp.mean(second), finite_N

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(axes), P(axes)),
        out_specs=(P(axes), P(axes), P(), P(), P(axes)),
    )(values_ND, weight_N)


@functools.partial(jax.jit, static_argnames=("mesh",))
def _take(values_ND: jax.Array, index: jax.Array, *, mesh: Mesh) -> jax.Array:
    taken = jnp.take(values_ND, index, axis=0)
    return jax.lax.with_sharding_constraint(taken, NamedSharding(mesh, P()))


def _global_row(size: int, axes: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """int32 [size], global numbers of this shard's rows (inside shard_map)."""
    return shard_index(axes, mesh) * size + jnp.arange(size)


def shard_index(axes: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """Number of this shard in row order (inside shard_map)."""
    index = jnp.int32(0)
    for axis in axes:
        index = index * mesh.shape[axis] + jax.lax.axis_index(axis)
    return index


def _pad(part: np.ndarray, size: int) -> np.ndarray:
    if len(part) == size:
        return part
    padded = np.zeros((size, *part.shape[1:]), np.float32)
    padded[: len(part)] = part
    return padded


def _check(values_ND: Any, weight_N: np.ndarray | None) -> None:
    if getattr(values_ND, "ndim", None) != 2 or 0 in values_ND.shape:
        raise errors.UserError(
            "k-means needs a matrix [rows, features] with at least one row and one"
            f" feature, found shape {getattr(values_ND, 'shape', None)}."
        )
    if weight_N is None:
        return
    if weight_N.shape != (len(values_ND),):
        raise errors.UserError(
            f"row weights must have shape ({len(values_ND)},), found {weight_N.shape}."
        )
    if not (np.isfinite(weight_N).all() and (weight_N >= 0).all() and weight_N.any()):
        raise errors.UserError(
            "row weights must be finite and ≥ 0, and one at least above 0."
        )


def _not_finite(bad: np.ndarray, num_rows: int, row_names: Any) -> errors.UserError:
    named = bad if row_names is None else np.asarray(row_names)[bad]
    shown = ", ".join(str(name) for name in named[:5])
    more = f" and {len(bad) - 5:,} more" if len(bad) > 5 else ""
    return errors.UserError(
        f"{len(bad):,} of {num_rows:,} rows hold NaN, infinite or overflowing values"
        f" (or, for spherical clustering, only zeros): {shown}{more}. Reject these"
        " rows, or look at the compute type they were made with."
    )
