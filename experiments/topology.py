"""Devices that are not at hand: TPU slices and GPU hosts, as something to compile for.

    v5e:4x4   v5e:8x8   v5p:2x2x2   v4:2x2x4   v6e:4x4   gpu:8x80GB@400TFLOPs

For TPUs the real compiler runs (`libtpu`, the extra `tpu`), without a TPU. For GPUs
the program is compiled for simulated CPU devices: its FLOPs and collectives are those
of the partitioned program, its memory is that of the CPU's schedule.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import Any

import jax

from clusterjax import errors
from clusterjax import mesh as mesh_lib

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of a device; 0 = not known.

    Attributes:
      flops: bfloat16 peak, FLOP/s.
      memory: bytes.
      bandwidth: of the memory, bytes/s.
      link: one link to a neighbour, bytes/s in one direction.
    """

    flops: float
    memory: float
    bandwidth: float = 0.0
    link: float = 0.0


# Google Cloud's TPU documentation ("System architecture", per chip). The interconnect
# stands there as a sum over 4 (v5e, v6e) or 6 links.
TPUS = {
    "v4": Chip(275e12, 32 * _GIB, 1228e9, 2400e9 / 8 / 6),
    "v5e": Chip(197e12, 16 * _GIB, 819e9, 1600e9 / 8 / 4),
    "v5p": Chip(459e12, 95 * _GIB, 2765e9, 4800e9 / 8 / 6),
    "v6e": Chip(918e12, 32 * _GIB, 1640e9, 3584e9 / 8 / 4),
}
# A dimension of the slice closes to a ring from this size on, in chips.
_RING = {"v4": 4, "v5p": 4, "v5e": 16, "v6e": 16}
_GPU = re.compile(
    r"gpu:(\d+)x([\d.]+)GB@([\d.]+)TFLOPs(?:@([\d.]+)GB/s)?(?:@([\d.]+)GB/s)?"
)
_FORMS = (
    "v4:XxYxZ, v5p:XxYxZ, v5e:XxY, v6e:XxY or"
    " gpu:COUNTxMEMORYGB@PEAKTFLOPs[@MEMORYGB/s[@NETWORKGB/s]], for example"
    " v5e:4x4 or gpu:8x80GB@400TFLOPs"
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices to compile for.

    Attributes:
      name: as it was asked for.
      chip: figures of one device.
      num_devices: of the whole slice.
      network: bytes/s that a device can receive at once; 0 = not known.
      devices: for a mesh.
      is_simulated: compiled for CPU devices instead.
    """

    name: str
    chip: Chip
    num_devices: int
    network: float
    devices: Any
    is_simulated: bool


def get(name: str) -> Topology:
    """The devices that a name means.

    For `gpu:` it starts simulated CPU devices; call it before any other JAX work.

    Raises:
      errors.ConfigError: not a topology, or the TPU compiler is missing or refuses it.
    """
    found = _GPU.fullmatch(name)
    if found:
        return _gpus(name, *found.groups())
    kind, _, shape = name.partition(":")
    if kind not in TPUS or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        raise errors.ConfigError(f"--topology={name!r}; expected {_FORMS}")
    sizes = [int(size) for size in shape.split("x")]
    return Topology(
        name,
        TPUS[kind],
        math.prod(sizes),
        _links(sizes, _RING[kind]) * TPUS[kind].link,
        _tpu_devices(name, kind, sizes),
        is_simulated=False,
    )


def _links(sizes: list[int], ring: int) -> int:
    """Links of a device in use: two along a ring, one where a line ends."""
    return sum(2 if size >= ring else 1 for size in sizes if size > 1)


def _gpus(
    name: str, count: str, memory: str, flops: str, bandwidth: str, link: str
) -> Topology:
    chip = Chip(float(flops) * 1e12, float(memory) * 1e9, float(bandwidth or 0) * 1e9)
    mesh_lib.simulate(int(count))
    devices = jax.devices("cpu")[: int(count)]
    network = float(link or 0) * 1e9
    return Topology(name, chip, int(count), network, devices, is_simulated=True)


def _tpu_devices(name: str, kind: str, sizes: list[int]) -> Any:
    # libtpu asks the machine's metadata server who it is, unless it is told.
    cores = math.prod(sizes) * (1 if kind in ("v5e", "v6e") else 2)
    accelerator = {"v5e": "v5litepod"}.get(kind, kind)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{accelerator}-{cores}")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # Nothing runs on a TPU here, so that several estimates may be made at once.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except Exception as error:  # several kinds, by version of JAX
        raise errors.ConfigError(
            f"--topology={name}: the TPU compiler can't describe it ({error}). It comes"
            " with the extra `tpu` (pip install 'clusterjax[tpu]') and needs no TPU"
        ) from None
    return found.devices
