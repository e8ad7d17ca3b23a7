"""Several processes: start, agreement of their inputs, and a prompt common end.

JAX finds the coordinator of a TPU pod, Slurm job or GKE cluster by itself; elsewhere
it is given by hand. A process that dies takes the others with it within about
`HEARTBEAT_SECONDS`, instead of leaving them in a collective operation for ever: they
end with `LOST_EXIT_CODE`, or by JAX's own abort.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from clusterjax import errors

HEARTBEAT_SECONDS = 30
START_SECONDS = 120
LOST_EXIT_CODE = 76  # another process is gone; start all of them again

_DIGEST_BYTES = 64


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins the other processes; call it before any other JAX operation.

    Without arguments JAX looks for a cluster, and where there is none this process
    stays alone.

    Args:
      coordinator: `host:port` of process 0; None: JAX's own detection of the cluster.
      num_processes: processes of the run.
      process_id: of this one, from 0.

    Raises:
      errors.ConfigError: some of the three are given and some are not, or the others
        did not come within `START_SECONDS`.
    """
    given = [x is not None for x in (coordinator, num_processes, process_id)]
    if any(given) and not all(given):
        raise errors.ConfigError(
            "--coordinator, --num_processes and --process_id belong together; give all"
            " three, or none on a cluster that JAX detects"
        )
    if jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        if not any(given):
            return  # no cluster was detected: a single process
        raise errors.ConfigError(
            f"process {process_id} of {num_processes} could not join at"
            f" {coordinator}: {error}"
        ) from error
    if threading.current_thread() is threading.main_thread():
        # JAX aborts when it notices first that another process is gone. Its message
        # says so; a traceback of every thread would bury it.
        signal.signal(signal.SIGABRT, signal.SIG_DFL)


def is_primary() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def place(tree: Any, shardings: Any, *, copy: bool = False) -> Any:
    """Puts a pytree on the mesh; every process holds the same values.

    Args:
      tree: arrays that this process has whole, or that lie where they should already.
      shardings: pytree of shardings, or one for all.
      copy: make arrays of its own, which may be donated.
    """
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda x, s: _place(x, s, copy), tree, shardings)


def _place(value: Any, sharding: jax.sharding.Sharding, copy: bool) -> jax.Array:
    if jax.process_count() == 1:
        # `device_put` may keep the old buffer as one of several replicas.
        return jax.device_put(jnp.copy(value) if copy else value, sharding)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return jnp.copy(value) if copy else value
    host = np.array(value, copy=copy or None)
    return jax.make_array_from_callback(host.shape, sharding, lambda i: host[i])


def gather(value: jax.Array) -> np.ndarray:
    """The whole array, in every process."""
    if value.is_fully_addressable:
        return np.asarray(value)
    return np.asarray(multihost_utils.process_allgather(value, tiled=True))


def require_equal(values: Mapping[str, str]) -> None:
    """Stops all processes when one of them has other inputs.

    Args:
      values: name → fingerprint, the same names in every process.

    Raises:
      errors.DataError: names what differs, and in which processes.
    """
    if jax.process_count() == 1:
        return
    mine = np.zeros((len(values), _DIGEST_BYTES), np.uint8)
    for row, text in zip(mine, values.values(), strict=True):
        content = text.encode()[:_DIGEST_BYTES]
        row[: len(content)] = np.frombuffer(content, np.uint8)
    everyone = np.asarray(multihost_utils.process_allgather(mine))
    different = (everyone != everyone[:1]).any(axis=2)  # [process, value]
    if not different.any():
        return
    parts = [
        f"{name} (process {', '.join(map(str, np.flatnonzero(different[:, i])))}"
        " has another than process 0)"
        for i, name in enumerate(values)
        if different[:, i].any()
    ]
    raise errors.DataError(
        f"the processes have different inputs: {'; '.join(parts)}. Give every host the"
        " same files, config and version of the code"
    )


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Ends this process at once when an operation with the others fails.

    Waiting for a clean shutdown would wait for a process that is gone.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        print(
            f"error: process {jax.process_index()} lost another process"
            f" ({str(error).splitlines()[0][:200]}); start all of them again with the"
            " same --workdir to go on from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(LOST_EXIT_CODE)


def preemption_notice(step: int) -> bool:
    """Whether all processes should save and stop at this step (JAX's sync point)."""
    return multihost_utils.reached_preemption_sync_point(step)
