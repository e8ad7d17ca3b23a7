"""One compiled step for every kind of feature: rows in, raw features out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from clusterjax import config as config_lib
from clusterjax import errors
from clusterjax import mesh as meshes
from clusterjax.features import (
    batches,
    last_layer,
    model_state,
    per_example,
    probe,
    projection,
)

Outputs = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Memory:
    """What the compiler says that a step needs, bytes per device."""

    arguments: int
    temporaries: int
    outputs: int

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries + self.outputs


class Compiled:
    """A jitted function that is compiled once per shape and remembers its memory.

    Arguments before `*` are arrays; keyword arguments are static.
    """

    def __init__(self, function: Callable[..., Any], out_shardings: Any = None) -> None:
        self._function = function
        self._out_shardings = out_shardings
        self._programs: dict[Any, Any] = {}
        self.memory = Memory(0, 0, 0)

    @property
    def num_programs(self) -> int:
        """Shapes compiled so far."""
        return len(self._programs)

    def __call__(self, params: Any, *arrays: Any, **static: int) -> Any:
        return self.program(params, *arrays, **static)(params, *arrays)

    def program(self, params: Any, *arrays: Any, **static: int) -> Any:
        """The compiled program for arguments of these shapes, which may be abstract."""
        shapes = tuple(
            (leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(arrays)
        )
        key = (shapes, tuple(sorted(static.items())))
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._compile(params, arrays, static)
        return program

    def _compile(self, params: Any, arrays: Any, static: dict[str, int]) -> Any:
        bound = functools.partial(self._function, **static)
        options = (
            {}
            if self._out_shardings is None
            else {"out_shardings": self._out_shardings}
        )
        program = jax.jit(bound, **options).lower(params, *arrays).compile()
        found = program.memory_analysis()
        if found is not None:
            memory = Memory(
                found.argument_size_in_bytes,
                found.temp_size_in_bytes,
                found.output_size_in_bytes,
            )
            self.memory = max(self.memory, memory, key=lambda m: m.peak)
        return program


class Extractor:
    """The step of one kind.

    Attributes:
      width: D, numbers of a feature.
      raw_width: before the last projection (`features.dim`).
      shards: R.
      covered: paths of the parameters whose gradient the feature stands for.
    """

    def __init__(
        self,
        state: model_state.ModelState,
        cfg: config_lib.FeaturesConfig,
        perf: config_lib.PerfConfig,
        mesh: Mesh | None,
        gather: bool = False,
    ) -> None:
        """Checks the config and prepares the step; compiles nothing yet.

        Args:
          state: the model.
          cfg: which feature.
          perf: sizes that change speed only.
          mesh: None: one device.
          gather: every process gets all outputs, not only those of its own rows.

        Raises:
          errors.ConfigError: settings that can't work together.
        """
        self._state, self._cfg, self._perf = state, cfg, perf
        self.shards = meshes.num_shards(mesh) if mesh is not None else 1
        tensor = mesh.shape.get("tensor", 1) if mesh is not None else 1
        self._vocab = {
            "vocab_chunk": perf.vocab_chunk,
            "vocab_shards": tensor if state.config.vocab_size % tensor == 0 else 1,
        }
        outputs = None
        if mesh is not None:
            outputs = meshes.replicated(mesh) if gather else meshes.rows(mesh)
        self._probe: probe.Probe | None = None
        self._per_example: per_example.PerExample | None = None
        self.covered = [
            "head" if state.merge(state.params).head is not None else "embedding"
        ]
        if cfg.kind == "proxy":
            self.raw_width = state.config.hidden_size
        elif cfg.kind == "head":
            self.raw_width = self._head_widths()[0] * self._head_widths()[1]
        elif cfg.kind == "probe":
            self._probe = probe.build(state, cfg)
            self.raw_width, self.covered = self._probe.width, self._probe.covered()
        else:
            self._per_example = per_example.build(state, cfg)
            self.raw_width = self._per_example.width
            self.covered = self._per_example.covered()
        self.width = self._final_width()
        self._body = Compiled(self._hidden, meshes.rows(mesh) if mesh else None)
        steps = {
            "proxy": self._last_layer,
            "head": self._last_layer,
            "probe": self._in_turns,
            "per_example": self._each_example,
        }
        self._step = Compiled(steps[cfg.kind], outputs)

    def __call__(
        self, params: Any, rows: batches.Rows, sizes: batches.Sizes
    ) -> Outputs:
        """Raw features [B, D] and mean losses [B], float32, of every slot.

        Args:
          params: of the model.
          rows: a batch on the devices.
          sizes: of its step.
        """
        if self._cfg.kind in ("per_example", "probe"):
            return self._step(params, rows, **self._static(sizes))
        hidden_BTH = self._body(params, rows)
        return self._step(params, hidden_BTH, rows, **self._static(sizes))

    def programs(
        self, params: Any, rows: batches.Rows, sizes: batches.Sizes
    ) -> list[Any]:
        """The compiled programs that a batch runs, in order.

        Args as for a call, but shapes with shardings (`jax.ShapeDtypeStruct`) are
        enough, so that a pass can be examined for devices that are not at hand.
        """
        if self._cfg.kind in ("per_example", "probe"):
            return [self._step.program(params, rows, **self._static(sizes))]
        body = self._body.program(params, rows)
        hidden = jax.eval_shape(self._hidden, params, rows)
        hidden_BTH = jax.ShapeDtypeStruct(
            hidden.shape, hidden.dtype, sharding=rows.tokens.sharding
        )
        static = self._static(sizes)
        return [body, self._step.program(params, hidden_BTH, rows, **static)]

    def _static(self, sizes: batches.Sizes) -> dict[str, int]:
        """The sizes that this kind's step depends on."""
        if self._cfg.kind == "per_example":
            return {"row_size": sizes.row}
        if self._cfg.kind == "probe":
            return {"size": sizes.turn, "turns": sizes.turns}
        return {"size": sizes.shard}

    @property
    def memory(self) -> Memory:
        """Of the largest program compiled so far."""
        return max(self._body.memory, self._step.memory, key=lambda m: m.peak)

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return self._body.num_programs + self._step.num_programs

    def reduce(self, raw_BD: jax.Array) -> jax.Array:
        """The last projection, [B, raw_width] → [B, width]."""
        if self.width == self.raw_width:
            return raw_BD
        last = last_projection(self._cfg, self.width)
        return projection.project(raw_BD, last, self._cfg.block_size)

    def _hidden(self, params: Any, rows: batches.Rows) -> jax.Array:
        return self._state.merge(params).hidden(
            rows.tokens,
            rows.segment_ids,
            rows.positions,
            adapters=self._state.adapters(params),
            num_layers=self._state.num_layers,
        )

    def _last_layer(
        self, params: Any, hidden_BTH: jax.Array, rows: batches.Rows, *, size: int
    ) -> Outputs:
        labels = last_layer.label_positions(
            hidden_BTH, rows, self._slots(rows), size, self.shards
        )
        matrix_VH = self._state.merge(params).output_matrix()
        if self._cfg.kind == "proxy":
            raw_BD, loss_B = last_layer.proxy(labels, matrix_VH, **self._vocab)
        else:
            k_out, k_in = self._head_widths()
            kind, seed = self._cfg.projection, self._cfg.seed
            raw_BD, loss_B = last_layer.head(
                labels,
                matrix_VH,
                projection.Projection(kind, k_out, seed, "head/out"),
                projection.Projection(kind, k_in, seed, "head/in"),
                **self._vocab,
            )
        return self.reduce(raw_BD), loss_B

    def _in_turns(
        self, params: Any, rows: batches.Rows, *, size: int, turns: int
    ) -> Outputs:
        """`probe`: the activations of one turn at a time are kept for its backward."""
        assert self._probe is not None
        step = functools.partial(
            self._probe, params, size=size, shards=self.shards, per_row=1, **self._vocab
        )

        def turn(rows: batches.Rows) -> Outputs:
            raw_BD, loss_B = step(rows)
            return self.reduce(raw_BD), loss_B

        if turns == 1:
            return turn(rows)
        # Row r of a shard is row r // turns of its turn.
        rows = rows._replace(slot=rows.slot // turns)
        split = functools.partial(batches.by_turn, shards=self.shards, turns=turns)
        found = jax.lax.map(turn, jax.tree.map(split, rows))
        join = functools.partial(batches.from_turns, shards=self.shards)
        return jax.tree.map(join, found)

    def _each_example(
        self, params: Any, rows: batches.Rows, *, row_size: int
    ) -> Outputs:
        assert self._per_example is not None
        return self._per_example(
            params,
            rows,
            row_size=row_size,
            shards=self.shards,
            micro_batch=self._perf.feature_micro_batch,
            **self._vocab,
        )

    def _slots(self, rows: batches.Rows) -> int:
        return rows.tokens.shape[0] // self.shards

    def _head_widths(self) -> tuple[int, int]:
        """(k_V, k_H) of kind=head."""
        cfg = self._cfg
        if cfg.projection not in ("rademacher", "normal"):
            raise errors.ConfigError(
                f"features.projection={cfg.projection!r} can't be used by kind=head;"
                " choose rademacher or normal"
            )
        return cfg.k_out, cfg.k_in

    def _final_width(self) -> int:
        dim, kind = self._cfg.dim, self._cfg.kind
        if dim is None or kind == "per_example":
            return self.raw_width
        if not 1 <= dim <= self.raw_width:
            raise errors.ConfigError(
                f"features.dim={dim}: kind={kind} is {self.raw_width:,} wide; choose"
                " 1 to that, or leave it out"
            )
        if self._cfg.projection == "identity" and dim != self.raw_width:
            raise errors.ConfigError(
                f"features.dim={dim} needs a random features.projection, not identity"
            )
        return dim


def remat(cfg: config_lib.FeaturesConfig, perf: config_lib.PerfConfig) -> str:
    """What the pass of this kind computes again (`DecoderConfig.remat`).

    `probe` keeps no more than the products of the linear layers: to keep softmaxes and
    activations too costs more time, for their memory, than to compute them again.
    """
    if cfg.kind == "probe" and perf.remat == "none":
        return "dots"
    return perf.remat


def last_projection(
    cfg: config_lib.FeaturesConfig, width: int
) -> projection.Projection:
    """The projection to `features.dim`."""
    return projection.Projection(cfg.projection, width, cfg.seed, "features.dim")


def largest(plan: batches.Plan) -> int:
    """Index of the batch whose step needs the most memory, about."""
    cost = [
        (bucket.rows * bucket.length, sizes.shard)
        for bucket, sizes in zip(plan.bucket, plan.sizes)
    ]
    return max(range(len(cost)), key=cost.__getitem__)


def empty_rows(bucket: batches.Bucket, shards: int) -> batches.Rows:
    """Rows of padding, to compile with."""
    shape = (bucket.rows * shards, bucket.length)
    return batches.Rows(
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape, jnp.int32),
        jnp.full(shape, -1, jnp.int32),
    )
