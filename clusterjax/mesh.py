"""The device mesh and where every array lies on it.

Axes: `data` (examples), `fsdp` (examples, and a slice of every parameter) and `tensor`
(heads, MLP columns and vocabulary). The mesh is made once and passed by hand. Rows of
a batch are split over `data` × `fsdp`: those are the R data shards. Parameters are
placed by rules on the names of their dimensions (`models.parameters`).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from clusterjax import config, errors, progress

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# Dimension name → mesh axis. The names are those of `models.parameters`, and `rank`
# of LoRA factors; `layer`, `norm` and `rank` are never split.
RULES = {
    "embed": "fsdp",
    "heads": "tensor",
    "kv": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}
# Arrays below this many entries are replicated without a word: splitting norms and
# biases would cost more in messages than it saves in memory.
SMALL = 2**14


def simulate(num_devices: int) -> None:
    """Makes the CPU backend show `num_devices` devices; call it before any JAX work.

    Raises:
      errors.ConfigError: the backend has already started with another number.
    """
    if num_devices < 1:
        raise errors.ConfigError(
            f"mesh.num_simulated_devices={num_devices}; expected at least 1"
        )
    jax.config.update("jax_platforms", "cpu")
    # A backend that runs already may refuse, or (newer JAX) not listen: then it is
    # fine if it has as many devices as asked for.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", num_devices)
    if jax.local_device_count() < num_devices:
        raise errors.ConfigError(
            f"mesh.num_simulated_devices={num_devices}, but JAX has already started"
            f" with {jax.local_device_count()} devices; call mesh.simulate before"
            " the first JAX operation, or leave the key out"
        )


def be_patient() -> None:
    """Lets simulated devices wait for one another on a busy machine.

    By default XLA ends the process when a device is 40 s late for a collective
    operation, which simulated devices that share few cores can be. Call it before any
    JAX work; an own setting in `XLA_FLAGS` stays.
    """
    name = "--xla_cpu_collective_call_terminate_timeout_seconds"
    flags = os.environ.get("XLA_FLAGS", "")
    if name not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {name}=600".strip()


def build(
    cfg: config.MeshConfig, devices: Sequence[Any] | None = None
) -> jax.sharding.Mesh:
    """Builds the mesh ('data', 'fsdp', 'tensor') over all devices.

    With `num_simulated_devices` set, only so many devices are used.

    Args:
      cfg: sizes of the axes; one may be −1 (what is left).
      devices: devices to use; None: all of them, of every process.

    Raises:
      errors.ConfigError: the sizes do not multiply to the number of devices.
    """
    if devices is None:
        devices = jax.devices()
        if cfg.num_simulated_devices is not None and jax.process_count() == 1:
            devices = devices[: cfg.num_simulated_devices]
    shape = resolve_shape(cfg, len(devices))
    if jax.process_count() > 1 or devices[0].platform != "cpu":
        # Follows the interconnect of real accelerators.
        return jax.make_mesh(
            shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices
        )
    grid = np.array(devices).reshape(shape)
    return jax.sharding.Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def resolve_shape(cfg: config.MeshConfig, num_devices: int) -> tuple[int, int, int]:
    """Replaces a −1 and checks the product; see `build`."""
    sizes = [cfg.data, cfg.fsdp, cfg.tensor]
    written = ", ".join(f"mesh.{a}={s}" for a, s in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
        raise errors.ConfigError(
            f"{written}: expected sizes of at least 1, and at most one −1"
        )
    known = math.prod(s for s in sizes if s != -1)
    if num_devices % known or (known != num_devices and -1 not in sizes):
        raise errors.ConfigError(
            f"{written} does not fit {num_devices} devices; change an axis, or set one"
            " to −1 (what is left)"
        )
    if -1 in sizes:
        sizes[sizes.index(-1)] = num_devices // known
    return sizes[0], sizes[1], sizes[2]


def num_shards(mesh: jax.sharding.Mesh) -> int:
    """R, the data shards: data × fsdp."""
    return math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: jax.sharding.Mesh, axis: int = 0) -> NamedSharding:
    """Array axis `axis` is split over the data shards, in shard order."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * axis, BATCH_AXES))


def local_shards(mesh: jax.sharding.Mesh) -> tuple[int, ...]:
    """The data shards that have a device in this process, ascending."""
    grid = mesh.devices.reshape(num_shards(mesh), -1)
    process = jax.process_index()
    return tuple(
        r
        for r, devices in enumerate(grid)
        if any(device.process_index == process for device in devices)
    )


def parameter_spec(
    dimensions: tuple[str, ...], shape: tuple[int, ...], mesh: jax.sharding.Mesh
) -> tuple[PartitionSpec, tuple[str, ...]]:
    """Places one parameter by its dimension names.

    Returns:
      The spec, and the mesh axes (of size above 1) that a rule asks for but whose size
      does not divide the dimension: along those the parameter stays whole.
    """
    entries: list[str | None] = []
    failed = []
    for name, size in zip(dimensions, shape, strict=True):
        axis = RULES.get(name)
        if axis is None or mesh.shape.get(axis, 1) == 1 or axis in entries:
            entries.append(None)
        elif size % mesh.shape[axis]:
            failed.append(axis)
            entries.append(None)
        else:
            entries.append(axis)
    return PartitionSpec(*entries), tuple(failed)


def parameter_shardings(
    dimensions: Mapping[str, tuple[str, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    mesh: jax.sharding.Mesh,
    allow_replication: bool = False,
) -> dict[str, NamedSharding]:
    """Sharding of every parameter, by path.

    Args:
      dimensions: path → one dimension name per axis.
      shapes: path → shape.
      mesh: the mesh.
      allow_replication: a parameter that does not divide is kept whole and named in
        the log, instead of an error.

    Raises:
      errors.ConfigError: a parameter of at least `SMALL` entries does not divide by
        its mesh axis, and `allow_replication` is off. All such are named.
    """
    result, left = {}, []
    for path, shape in shapes.items():
        spec, failed = parameter_spec(dimensions[path], shape, mesh)
        result[path] = NamedSharding(mesh, spec)
        if failed and math.prod(shape) >= SMALL:
            left.append(f"{path} {list(shape)} over {' and '.join(failed)}")
    if left:
        sizes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in AXES)
        text = f"not divisible by the mesh ({sizes}): {'; '.join(left)}"
        if not allow_replication:
            raise errors.ConfigError(
                f"parameters {text}. Choose other sizes of mesh.fsdp or mesh.tensor,"
                " or keep them whole on every device: mesh.allow_replication=True"
            )
        progress.say(f"  kept whole on every device, since {text}")
    return result


def check_heads(num_heads: int, num_kv_heads: int, mesh: jax.sharding.Mesh) -> None:
    """Stops when tensor parallelism would cut through an attention head.

    Raises:
      errors.ConfigError: mesh.tensor does not divide the query or key-value heads.
    """
    tensor = mesh.shape.get("tensor", 1)
    if num_heads % tensor or num_kv_heads % tensor:
        raise errors.ConfigError(
            f"mesh.tensor={tensor} does not divide the model's {num_heads} query heads"
            f" and {num_kv_heads} key-value heads; use a common divisor of both"
        )
