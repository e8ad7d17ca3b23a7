"""Rows of a matrix laid over the data shards of a mesh.

Shard s holds the global rows [s · n, (s + 1) · n); padding of weight 0 stands at the
end. All random choices hang on the global row number, so they are the same on any
number of shards.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

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
    """Rows on the devices, near the origin, padded with weight 0 to whole blocks.

    Attributes:
      values_ND: float32 [N', D], sharded by rows.
      weight_N: float32 [N'], 0 for padding.
      square_N: float32 [N'], squared length of each row as it is here.
      offset_D: float32 [D], was subtracted from every row: the mean row, or nothing
        where the rows lie about the origin anyway.
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
        """float32 [len(index), D], the rows of these numbers, on the host."""
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
      spherical: scale rows to unit length; otherwise the mean row is subtracted where
        it is long, which keeps distances exact far from the origin.
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
        return _pad(values_ND[start : min(stop, num_rows)], stop - start)

    def weights_of(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(padded)
        size = max(0, min(stop, num_rows) - start)
        part = np.ones(size) if weight_N is None else weight_N[start : start + size]
        return _pad(part, stop - start)

    values = jax.make_array_from_callback((padded, dim), sharding, rows_of)
    weight = jax.make_array_from_callback((padded,), sharding, weights_of)
    found = _measure(values, weight, num_rows, spherical=spherical, mesh=mesh)
    finite_N = to_host(found.finite_N, num_rows)
    if not finite_N.all():
        raise _not_finite(np.flatnonzero(~finite_N), num_rows, row_names)
    offset_D = np.zeros(dim, np.float32)
    square_N, variance = found.square_N, found.variance
    # Only where needed: a second copy of all rows takes longer than an iteration.
    if spherical:
        values, square_N, _ = _shift(
            values, weight, num_rows, offset_D, spherical=True, mesh=mesh
        )
    elif _is_far(found):
        offset_D = np.asarray(found.mean_D)
        values, square_N, variance = _shift(
            values, weight, num_rows, offset_D, spherical=False, mesh=mesh
        )
    return Rows(
        values_ND=values,
        weight_N=weight,
        square_N=square_N,
        offset_D=offset_D,
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


class _Measures(NamedTuple):
    """Of rows as they come (or of their directions).

    Attributes:
      mean_D: float32, weighted.
      variance: float32, mean over features of the weighted variance.
      square_N: float32, squared lengths.
      finite_N: bool, whether a row can be used.
    """

    mean_D: jax.Array
    variance: jax.Array
    square_N: jax.Array
    finite_N: jax.Array


def _is_far(found: _Measures) -> bool:
    """Whether the mean row carries more than half of the mean square."""
    mean_D = np.asarray(found.mean_D, np.float64)
    return bool(np.mean(mean_D**2) > float(found.variance))


@functools.partial(jax.jit, static_argnames=("spherical", "mesh"))
def _measure(
    values_ND: jax.Array,
    weight_N: jax.Array,
    num_rows: jax.Array,
    *,
    spherical: bool,
    mesh: Mesh,
) -> _Measures:
    axes = data_axes(mesh)

    def local(x_ND: jax.Array, w_N: jax.Array) -> tuple[jax.Array, ...]:
        dim = x_ND.shape[1]

        def body(sums_2D: jax.Array, part: tuple) -> tuple[jax.Array, jax.Array]:
            x_bD, w_b = part
            square_b = jnp.sum(x_bD * x_bD, axis=1)
            if spherical:
                x_bD = _directions(x_bD)
            return sums_2D + jnp.stack([w_b @ x_bD, w_b @ (x_bD * x_bD)]), square_b

        in_blocks = x_ND.reshape(-1, NOISE_ROWS, dim), w_N.reshape(-1, NOISE_ROWS)
        zero_2D = jax.lax.pcast(jnp.zeros((2, dim)), axes, to="varying")
        sums_2D, square_nb = jax.lax.scan(body, zero_2D, in_blocks)
        square_N = square_nb.reshape(-1)
        finite_N = jnp.isfinite(square_N)
        if spherical:
            # A row without a direction is as bad as one that is not finite.
            finite_N &= (square_N > 0) | ~_is_real(x_ND, num_rows, axes, mesh)
        total = jax.lax.psum(jnp.sum(w_N), axes)
        mean_D, second_D = jax.lax.psum(sums_2D, axes) / total
        return mean_D, jnp.mean(second_D - mean_D**2), square_N, finite_N

    found = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(axes), P(axes)),
        out_specs=(P(), P(), P(axes), P(axes)),
    )(values_ND, weight_N)
    return _Measures(*found)


@functools.partial(jax.jit, static_argnames=("spherical", "mesh"))
def _shift(
    values_ND: jax.Array,
    weight_N: jax.Array,
    num_rows: jax.Array,
    offset_D: jax.Array,
    *,
    spherical: bool,
    mesh: Mesh,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows less `offset_D`, or their directions; squared lengths; their mean square."""
    axes = data_axes(mesh)

    def local(
        x_ND: jax.Array, w_N: jax.Array, offset_D: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        x_ND = _directions(x_ND) if spherical else x_ND - offset_D[None]
        # Padding stays at zero, so that no distance to it can overflow.
        x_ND = jnp.where(_is_real(x_ND, num_rows, axes, mesh)[:, None], x_ND, 0)
        square_N = jnp.sum(x_ND * x_ND, axis=1)
        second = jax.lax.psum(w_N @ square_N, axes) / jax.lax.psum(w_N.sum(), axes)
        return x_ND, square_N, second / x_ND.shape[1]

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(axes), P(axes), P()),
        out_specs=(P(axes), P(axes), P()),
    )(values_ND, weight_N, offset_D)


def _directions(x_ND: jax.Array) -> jax.Array:
    length_N1 = jnp.linalg.norm(x_ND, axis=1, keepdims=True)
    return x_ND / jnp.where(length_N1 > 0, length_N1, 1)


def _is_real(
    x_ND: jax.Array, num_rows: jax.Array, axes: tuple[str, ...], mesh: Mesh
) -> jax.Array:
    """bool [N], which rows of this shard are not padding (inside shard_map)."""
    return _global_row(len(x_ND), axes, mesh) < num_rows


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
    """Float32 [size, …] with zeros at the end, where a device can read it in place."""
    shape = (size, *part.shape[1:])
    padded = _aligned(math.prod(shape)).reshape(shape)
    padded[: len(part)] = part
    padded[len(part) :] = 0
    return padded


def _aligned(size: int) -> np.ndarray:
    """Float32 [size] at a multiple of 64 bytes: JAX takes it on CPUs without a copy."""
    buffer = np.empty(4 * size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + 4 * size].view(np.float32)


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
