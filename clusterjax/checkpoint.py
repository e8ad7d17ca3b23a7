"""Training checkpoints: a thin wrapper over Orbax that tells whole from broken.

Each checkpoint holds the TrainState and a small JSON record: step, fingerprints,
checksums of every array and what the trainer wants back. It may be restored on another
mesh or number of processes. A checkpoint that can't be read, or whose arrays do not
have the sums they were saved with, is named, put aside and passed over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import preservation_policy

from clusterjax import datatypes, errors, files, progress

_DAMAGED = "damaged-"


class Store:
    """The checkpoints of one run, `<directory>/<step>/`."""

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        keep: int = 2,
        keep_best: bool = False,
        in_background: bool = True,
    ):
        """Opens or makes the directory.

        Args:
          directory: of the checkpoints.
          keep: newest checkpoints that are kept.
          keep_best: keep the one of lowest held-out loss as well.
          in_background: return from `save` before everything is written.
        """
        self._directory = files.absolute(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        _name_unfinished(self._directory)
        kept: list[Any] = [preservation_policy.LatestN(max(keep, 1))]
        if keep_best:
            best = preservation_policy.BestN(
                get_metric_fn=lambda metrics: -metrics["loss"],
                n=1,
                keep_checkpoints_without_metrics=False,
            )
            kept.append(best)
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.AnyPreservationPolicy(kept),
            enable_async_checkpointing=in_background,
            cleanup_tmp_directories=True,
        )
        self._manager = self._open()
        self._checksums = jax.jit(_checksums)

    def _open(self) -> ocp.CheckpointManager:
        return ocp.CheckpointManager(
            self._directory, options=self._options, item_names=("state", "record")
        )

    def save(
        self,
        state: datatypes.TrainState,
        record: dict[str, Any],
        loss: float | None = None,
    ) -> None:
        """Saves under the state's step; an earlier save must have ended first.

        Args:
          state: what to save; may be donated as soon as this returns.
          record: JSON values that `restore` gives back.
          loss: held-out loss at this step, for `keep_best`.

        Raises:
          errors.CheckpointError: this save, or the one before that still went on in
            the background, failed.
        """
        step = int(state.step)
        # Sums of bits, taken where the arrays are: cheap, and the same on every mesh.
        sums = [int(s) for s in self._checksums(state)]
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            record=ocp.args.JsonSave({**record, "step": step, "checksums": sums}),
        )
        metrics = None if loss is None else {"loss": float(loss)}
        with self._explained():
            self._manager.save(step, args=arguments, metrics=metrics, force=True)

    def wait(self) -> None:
        """Waits until everything is on disk.

        Raises:
          errors.CheckpointError: the writing failed.
        """
        with self._explained():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax raises many kinds
            whole = ", ".join(map(str, self.steps())) or "none"
            raise errors.CheckpointError(
                f"a checkpoint could not be written to {self._directory}"
                f" ({type(error).__name__}: {str(error)[:300]}); is the disk full, or"
                f" not writable? Whole checkpoints there: {whole}. Start the same"
                " command again to go on from the newest"
            ) from error

    def close(self) -> None:
        """Waits and frees the threads."""
        self._manager.close()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def restore(
        self,
        abstract: datatypes.TrainState,
        expected: dict[str, Any],
        handover: int | None = None,
    ) -> tuple[datatypes.TrainState, dict[str, Any]] | None:
        """Reads the newest whole checkpoint; None when there is none.

        Args:
          abstract: shapes, dtypes and shardings to restore to; the mesh may differ
            from the one that saved.
          expected: entries that the record must have, e.g. fingerprints.
          handover: step at which this plan takes over: a checkpoint of that step may
            be of the plan before.

        Raises:
          errors.CheckpointError: a whole checkpoint belongs to other data, another
            plan or other settings.
        """
        for step in reversed(self.steps()):
            required = dict(expected)
            if step == handover:
                required.pop("plan", None)
            state, record, cause = self._try(step, abstract, required)
            # All processes must take the same checkpoint, or none of them goes on.
            if _everywhere(state is not None) and state is not None:
                return state, record or {}
            self._put_aside(step, cause or "another process could not read it")
        return None

    def _try(self, step, abstract, expected):
        """(state, record, None), or (None, None, cause)."""
        try:
            read = self._manager.restore(
                step, args=ocp.args.Composite(record=ocp.args.JsonRestore())
            )
            record = read["record"]
            _check_record(record, expected, self._directory / str(step))
            read = self._manager.restore(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)),
            )
            state = read["state"]
            sums = [int(s) for s in self._checksums(state)]
        except errors.CheckpointError:
            raise
        except Exception as error:  # Orbax raises many kinds for damaged files
            return None, None, f"{type(error).__name__}: {str(error)[:200]}"
        if sums != record["checksums"]:
            return None, None, "its arrays are not those that were saved"
        return state, record, None

    def _put_aside(self, step: int, cause: str) -> None:
        damaged = self._directory / str(step)
        aside = self._directory / f"{_DAMAGED}{step}"
        progress.say(f"  checkpoint {damaged} is damaged ({cause}); passed over")
        self._manager.close()
        if jax.process_index() == 0:
            if aside.exists():
                aside.rmtree()
            damaged.rename(aside)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"checkpoint {step} put aside")
        self._manager = self._open()


def read_params(directory: epath.PathLike, step: int) -> dict[str, np.ndarray]:
    """Parameters of one checkpoint on the host: dotted path → array.

    Args:
      directory: of the checkpoints.
      step: of the checkpoint.

    Raises:
      errors.CheckpointError: there is none, or it can't be read.
    """
    folder = files.absolute(directory) / str(step) / "state"
    if not folder.exists():
        raise errors.CheckpointError(f"{directory} has no checkpoint of step {step}")
    reader = ocp.PyTreeCheckpointer()
    try:
        saved = reader.metadata(folder).item_metadata
        assert saved is not None, "no description of its arrays"
        host = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved.tree
        )
        return reader.restore(folder, restore_args=host)["params"]
    except Exception as error:  # Orbax raises many kinds for damaged files
        raise errors.CheckpointError(f"{folder} can't be read: {error}") from error


def _name_unfinished(directory: epath.Path) -> None:
    for item in sorted(directory.iterdir()):
        if "orbax-checkpoint-tmp" in item.name:
            progress.say(f"  checkpoint {item} was not finished; passed over")


def _check_record(
    record: dict[str, Any], expected: dict[str, Any], where: epath.Path
) -> None:
    for name, value in expected.items():
        if record.get(name) != value:
            raise errors.CheckpointError(
                f"{where} was saved with {name}={record.get(name)!r}, but this run has"
                f" {value!r}; use another --workdir, or remove the checkpoints"
            )


def _everywhere(value: bool) -> bool:
    """Whether it holds in every process."""
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.process_allgather(np.array([value])).all())


def _checksums(tree: Any) -> list[jax.Array]:
    """uint32 sum of the bits of every array, independent of how it is sharded."""
    return [jnp.sum(_words(x), dtype=jnp.uint32) for x in jax.tree.leaves(tree)]


def _words(x: jax.Array) -> jax.Array:
    size = x.dtype.itemsize
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[size]
    return jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
