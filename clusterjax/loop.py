"""The training loop: steps, logs, evaluations, checkpoints.

Lines of `metrics.jsonl` are written one step late, while the next step runs, and before
the checkpoint of their step.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from clusterjax import (
    checkpoint,
    collection,
    config,
    datatypes,
    diagnostics,
    distributed,
    errors,
    evaluate,
    faults,
    optimizer,
    progress,
)
from clusterjax import input as input_lib
from clusterjax import metrics as metrics_lib
from clusterjax import step as step_lib

PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: start again later


class Preempted(SystemExit):
    """The run was asked to stop, has saved its state, and ends with code 75."""

    def __init__(self, step: int):
        super().__init__(PREEMPTED_EXIT_CODE)
        self.step = step


@dataclasses.dataclass(frozen=True)
class Part:
    """The steps of a run that one schedule covers.

    Attributes:
      start: step of the run that is the schedule's step 0.
      stop: step to stop before, with a checkpoint.
      total: steps of the whole run.
    """

    start: int
    stop: int
    total: int


class Loop:
    """One start of a run: `start`, `evaluate_on` (optional), `run`.

    Attributes:
      template: the decoder without parameters.
      state: parameters and optimiser; donated to every step.
      frozen: parameters that are not trained.
      log: `metrics.jsonl`.
      seconds: wall time by part, over all starts.
      stop_requested: set it to save and stop at the next step.
    """

    def __init__(
        self,
        tmpl: step_lib.Template,
        corpus: datatypes.Corpus,
        schedule: input_lib.Schedule,
        cfg: config.TrainConfig,
        mesh: jax.sharding.Mesh,
        folder: epath.Path,
        store: checkpoint.Store,
        expected: dict[str, str],
        perf: config.PerfConfig,
        report: config.ReportConfig,
        part: Part,
    ):
        self.template, self.mesh = tmpl, mesh
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.stop_requested = threading.Event()
        self.frozen: step_lib.Params = {}
        self._corpus, self._schedule, self._cfg = corpus, schedule, cfg
        self._folder, self._store, self._expected = folder, store, expected
        self._perf, self._report = perf, report
        self._part, self._num_steps = part, part.total
        self._rate = optimizer.learning_rate(cfg.optimizer, part.total)
        self._layout = input_lib.Layout(schedule, corpus, mesh, part.start)
        self._totals = metrics_lib.Totals()
        self._evaluator: evaluate.Evaluator | None = None
        self._collection: collection.Collection | None = None
        self._groups = diagnostics.GroupLosses(_groups(corpus, schedule), mesh)
        self._statistics: dict[int, Any] = {}
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._pending: collections.deque = collections.deque()
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self._in_flight = perf.steps_in_flight or (1 if on_cpu else 2)

    def start(
        self, params: step_lib.Params, frozen: step_lib.Params, allow_replication: bool
    ) -> None:
        """Puts the state before the first step on the devices, in arrays of its own."""
        low = sorted({str(x.dtype) for x in params.values()} - {"float32", "float64"})
        if low:
            progress.say(
                f"  warning: master weights are {', '.join(low)}: updates below their"
                " rounding are lost; model.param_dtype=float32 keeps them"
            )
        dimensions = {name: self.template.dimensions[name] for name in params}
        self._tx = optimizer.build(self._cfg.optimizer, self._num_steps, dimensions)
        self._places = places = step_lib.shardings(
            self.template, self._tx, params, frozen, self.mesh, allow_replication
        )
        # The state is donated to the first step, and the caller keeps its model.
        params = distributed.place(params, places.state.params, copy=True)
        self.frozen = distributed.place(frozen, places.frozen)
        init = jax.jit(self._tx.init, out_shardings=places.state.opt_state)
        zero = distributed.place(jnp.zeros((), jnp.int32), places.state.step)
        self.state = datatypes.TrainState(zero, params, init(params))

    def evaluate_on(self, corpus: datatypes.Corpus, cfg: config.EvalConfig) -> None:
        """Sets the held-out examples."""
        self._evaluator = evaluate.Evaluator(
            self.template, corpus, self.mesh, cfg, self._perf
        )

    def collect_into(self, features: collection.Collection) -> None:
        """Lets every step collect the features of its examples."""
        self._collection = features

    def run(self) -> int:
        """Restores, trains to the end, evaluates; returns the step it went on from."""
        first = self._restore()
        events = self._folder / "tensorboard" if self._report.tensorboard else ""
        self.log = metrics_lib.Log(
            self._folder / "metrics.jsonl", first or -1, str(events)
        )
        try:
            if not first:
                self._evaluate(0)
            if first < self._part.stop:
                self._train(first)
            with self._timed("checkpoint"):
                self._store.wait()
        finally:
            self._store.close()
            self.log.close()
        return first

    def _restore(self) -> int:
        """Goes on from the newest whole checkpoint; returns its step, or 0."""
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            self.state,
        )
        begin = time.monotonic()
        found = self._store.restore(abstract, self._expected, self._part.start or None)
        if found is None:
            if self._part.start:
                raise errors.CheckpointError(
                    f"{self._folder / 'checkpoints'} has no whole checkpoint to go on"
                    f" from at step {self._part.start}"
                )
            return 0
        self.state, record = found
        self.seconds.update(record["seconds"])
        self._totals = metrics_lib.Totals(**record["totals"])
        step = int(self.state.step)
        if self._collection is not None:
            self._collection.resume(step)
        self.seconds["checkpoint"] += time.monotonic() - begin
        progress.say(f"  resumed at step {step:,} of {self._num_steps:,}")
        return step

    def _train(self, first: int) -> None:
        numbers = range(first, self._part.stop)
        feed = input_lib.Feed(self._layout, self.mesh, numbers, self._perf.prefetch)
        profile = metrics_lib.Profile(self._report.profile_steps, self._folder)
        inputs = iter(feed)
        try:
            with progress.track("train", len(numbers), "steps") as advance:
                for _ in numbers:
                    with self._timed("input"):
                        item = next(inputs)
                    profile.before(item.step + 1)
                    self._step(item)
                    profile.after(item.step + 1, self.state)
                    advance(1)
        finally:
            profile.close()
            feed.close()

    def _step(self, item: input_lib.StepInput) -> None:
        """Dispatches one step and does what is due after it."""
        done = item.step + 1
        program = self._program(item)
        figures = self._worker_figures(item)
        with self._timed("steps"):
            # On CPU, many collective steps in flight may wait for one another for ever.
            finished = self._drain(self._in_flight - 1)
            self.state, out = program(self.state, self.frozen, item.batch)
            self._pending.append((item, out, figures))
            # Fetching values of a step that still runs would wait for it; so the host
            # looks at the steps before, while this one runs.
            for earlier in finished:
                self._record(*earlier)
        faults.point("train.step")
        at_end = done == self._num_steps
        eval_due = at_end or _is_due(done, self._cfg.eval_every)
        at_stop = done == self._part.stop
        save_due = at_stop or _is_due(done, self._cfg.checkpoint_every)
        stopping = self._stopping(done)
        if eval_due or save_due or stopping:
            with self._timed("steps"):
                for earlier in self._drain():
                    self._record(*earlier)
        loss = self._evaluate(done) if eval_due else None
        if save_due or stopping:
            self._save(loss)
        if stopping and not at_end:
            self._store.wait()
            progress.say(f"  asked to stop: saved at step {done:,}")
            raise Preempted(done)

    def _stopping(self, done: int) -> bool:
        if jax.distributed.is_initialized():
            return distributed.preemption_notice(done)
        return self.stop_requested.is_set()

    def _program(self, item: input_lib.StepInput) -> Any:
        """The step compiled for this batch's shape; a long run may have several."""
        key = item.batch.inputs.shape, item.label_slots
        if key not in self._programs:
            if self._programs:
                progress.say(f"  step {item.step + 1:,} is larger: compiling for it")
            self._programs[key] = self._compile(item)
        return self._programs[key]

    def _compile(self, item: input_lib.StepInput) -> Any:
        faults.point("train.compile")
        sizes = self._sizes(item)
        if self._collection is not None:
            sizes = dataclasses.replace(sizes, collected=self._collection.slots)
        step = step_lib.make_step(self.template, self._tx, self.mesh, sizes)
        collects = self._collection is not None
        jitted = step_lib.jit(step, self._places, self.mesh, collects)
        with self._timed("compile"):
            return jitted.lower(self.state, self.frozen, item.batch).compile()

    def _sizes(self, item: input_lib.StepInput) -> step_lib.Sizes:
        return step_lib.Sizes(item.label_slots, self._perf.vocab_chunk)

    def _worker_figures(self, item: input_lib.StepInput) -> dict[str, Any]:
        if not _is_due(item.step + 1, self._cfg.statistics_every):
            return {}
        slots = item.label_slots
        if slots not in self._statistics:
            self._statistics[slots] = diagnostics.make_worker_statistics(
                self.template, self.mesh, self._sizes(item)
            )
        with self._timed("statistics"):
            figures = self._statistics[slots](
                self.state.params, self.frozen, item.batch, self.state.step
            )
            return {name: float(value) for name, value in figures.items()}

    def _drain(self, most: int = 0) -> list[tuple[Any, ...]]:
        """Waits until at most so many steps are unfinished; returns the others."""
        finished = []
        while len(self._pending) > most:
            finished.append(self._pending.popleft())
            jax.block_until_ready(finished[-1][1].loss)
        return finished

    def _record(
        self, item: input_lib.StepInput, out: step_lib.Metrics, figures: dict[str, Any]
    ) -> None:
        """Adds one finished step to the totals; writes a line when one is due."""
        done = item.step + 1
        if not bool(out.is_finite):
            self._not_finite(done, out)
        self._totals.add(item.tokens, item.labels, float(out.loss), float(out.nll_sum))
        if self._collection is not None:
            self._collection.add(item.step, out.collected)
        is_due = done in (1, self._num_steps) or _is_due(done, self._cfg.log_every)
        if not is_due and not figures:
            return
        line = {
            **self._totals.window(),
            "lr": float(np.asarray(self._rate(item.step))),
            "grad_norm": float(out.grad_norm),
            "epoch": item.epoch,
            **self._totals.so_far(),
            **figures,
            **self._groups(out),
            "time": self._time(),
        }
        self.log.write(done, "train", line)
        faults.point("train.log")

    def _not_finite(self, done: int, out: step_lib.Metrics) -> None:
        ids = _nonfinite_examples(out)
        named = ", ".join(f"{i} ({self._corpus.uid[i]})" for i in ids[:8])
        what = (
            f"the loss of example(s) {named}"
            if len(ids)
            else f"the gradient (norm {float(out.grad_norm)}; every example's loss is)"
        )
        text = f"step {done}: {what} is not finite; the update was left out"
        if self._cfg.nonfinite == "stop":
            raise errors.UserError(
                f"{text}. Look at these examples, lower"
                " train.optimizer.learning_rate, or pass over such steps with"
                " train.nonfinite=skip"
            )
        self._totals.skipped += 1
        progress.say(f"  {text}")

    def _evaluate(self, done: int) -> float | None:
        if self._evaluator is None:
            return None
        faults.point("eval")
        with self._timed("eval"):
            found = self._evaluator(self.state.params, self.frozen)
        self.log.write(done, "eval", {**found.summary(), "time": self._time()})
        progress.say(f"  step {done:,}: held-out loss {found.loss:.4f} nats/token")
        return found.loss

    def _save(self, loss: float | None) -> None:
        with self._timed("checkpoint"):
            # The lines first: a checkpoint promises that those of its steps are there.
            self.log.sync()
            if self._collection is not None:
                self._collection.flush(int(self.state.step))
            record = {
                **self._expected,
                "seconds": dict(self.seconds),
                "totals": dataclasses.asdict(self._totals),
            }
            faults.point("checkpoint.before")
            self._store.save(self.state, record, loss)
            faults.point("checkpoint.writing")

    def _time(self) -> float:
        """Seconds of training so far, over all starts; never goes back."""
        return round(sum(self.seconds.values()), 3)

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] += time.monotonic() - begin


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _groups(
    corpus: datatypes.Corpus, schedule: Any
) -> dict[str, tuple[np.ndarray, list[str]]]:
    """Groupings whose losses are logged: sources, and the plan's clusters."""
    result = {"sources": (corpus.source_id, list(corpus.source_names))}
    plan = getattr(schedule, "plan", None)
    if plan is not None and plan.num_clusters > 1:
        cluster = np.full(corpus.num_examples, -1, np.int32)
        cluster[plan.example_id] = plan.cluster_id
        result["clusters"] = (cluster, [str(c) for c in range(plan.num_clusters)])
    return result


def _nonfinite_examples(out: step_lib.Metrics) -> np.ndarray:
    """Ids of the examples, among this process's rows, whose loss is not finite."""
    found = []
    for nll, ids in zip(
        out.nll.addressable_shards, out.example_id.addressable_shards, strict=True
    ):
        bad = ~np.isfinite(np.asarray(nll.data))
        found.append(np.asarray(ids.data)[bad])
    ids = np.unique(np.concatenate(found))
    return ids[ids >= 0]
