"""The training loop: steps, logs, evaluations, checkpoints.

Resuming is a look-up: the schedule says what every step holds, so that a checkpoint
needs the state and the number of the step only. Lines of `metrics.jsonl` are written
one step late, while the next step runs, and before the checkpoint of their step.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import signal
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
    config,
    datatypes,
    errors,
    evaluate,
    models,
    optimizer,
    progress,
)
from clusterjax import input as input_lib
from clusterjax import metrics as metrics_lib
from clusterjax import step as step_lib
from clusterjax.models import checkpoints

make_step = step_lib.make_step

PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later


class Preempted(SystemExit):
    """The run was asked to stop, has saved its state, and ends with code 75."""

    def __init__(self, step: int):
        super().__init__(PREEMPTED_EXIT_CODE)
        self.step = step


@dataclasses.dataclass
class Result:
    """What training leaves.

    Attributes:
      model: the trained decoder.
      state: the last TrainState, sharded.
      history: lines of metrics.jsonl, those of earlier starts included.
      seconds: wall time by part (compile, steps, input, eval, checkpoint), all starts.
      initial_eval, final_eval: `Evaluation.summary()`, {} without held-out data.
      resumed_from: step of the checkpoint that this start went on from, or 0.
    """

    model: Any
    state: datatypes.TrainState
    history: list[dict[str, Any]]
    seconds: dict[str, float]
    initial_eval: dict[str, Any]
    final_eval: dict[str, Any]
    resumed_from: int


def fit(
    model: Any,
    corpus: datatypes.Corpus,
    schedule: input_lib.Schedule,
    cfg: config.TrainConfig,
    mesh: jax.sharding.Mesh,
    workdir: epath.PathLike,
    *,
    tokenizer: Any = None,
    eval_corpus: datatypes.Corpus | None = None,
    model_cfg: config.ModelConfig = config.ModelConfig(),
    eval_cfg: config.EvalConfig = config.EvalConfig(),
    mesh_cfg: config.MeshConfig = config.MeshConfig(),
    perf: config.PerfConfig = config.PerfConfig(),
    report: config.ReportConfig = config.ReportConfig(),
) -> Result:
    """Trains `model` on the schedule; goes on from the newest checkpoint, if any.

    Args:
      model: the decoder to start from; it is not changed.
      corpus: the examples that the schedule's ids mean.
      schedule: `allocation.Schedule`.
      cfg: optimiser and loop.
      mesh: the device mesh.
      workdir: gets `checkpoints/`, `metrics.jsonl` and `model/`.
      tokenizer: saved beside the final model; None: the weights alone.
      eval_corpus: held-out examples; None: no evaluation.
      model_cfg: adapters.
      eval_cfg: evaluation.
      mesh_cfg: whether parameters that do not divide may be replicated.
      perf: speed and memory.
      report: whether TensorBoard events are written.

    Raises:
      errors.UserError: the config or the checkpoints do not fit.
      errors.NonFiniteError: a step was not finite and `cfg.nonfinite` is `stop`.
      Preempted: SIGTERM came; the state is saved.
    """
    del model_cfg
    trainer = _Trainer(
        model, corpus, schedule, cfg, mesh, workdir, eval_corpus, eval_cfg, mesh_cfg,
        perf, report,
    )  # fmt: skip
    with _signals(trainer):
        result = trainer.run()
    if cfg.save_model:
        save_model(result.model, tokenizer, epath.Path(workdir) / "model")
    return result


def save_model(model: Any, tokenizer: Any, folder: epath.Path) -> None:
    """Writes the model in Hugging Face form; the folder appears when it is whole."""
    if jax.process_index() != 0:
        return
    if tokenizer is None:
        checkpoints.save_decoder(model, folder)
    else:
        models.save(model, tokenizer, folder)
    progress.say(f"  model written to {folder}")


class _Trainer:
    """One start of a run."""

    def __init__(
        self,
        model: Any,
        corpus: datatypes.Corpus,
        schedule: input_lib.Schedule,
        cfg: config.TrainConfig,
        mesh: jax.sharding.Mesh,
        workdir: epath.PathLike,
        eval_corpus: datatypes.Corpus | None,
        eval_cfg: config.EvalConfig,
        mesh_cfg: config.MeshConfig,
        perf: config.PerfConfig,
        report: config.ReportConfig,
    ):
        self.cfg, self.mesh, self.perf = cfg, mesh, perf
        self.schedule, self.corpus = schedule, corpus
        self.workdir = epath.Path(workdir)
        self.report = report
        self.stop_requested = threading.Event()
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.totals = _Totals()
        self.template, params = step_lib.split(model, perf.remat)
        self.frozen: step_lib.Params = {}
        dimensions = self.template.dimensions
        self.tx = optimizer.build(cfg.optimizer, schedule.num_steps, dimensions)
        self.learning_rate = optimizer.learning_rate(cfg.optimizer, schedule.num_steps)
        self.places = step_lib.shardings(
            self.template, self.tx, params, self.frozen, mesh,
            mesh_cfg.allow_replication,
        )  # fmt: skip
        self.state = self._start(params)
        self.layout = input_lib.Layout(schedule, corpus, mesh)
        self.expected = {
            "plan": schedule.fingerprint,
            "corpus": corpus.fingerprint,
            "optimizer": config.fingerprint(cfg.optimizer),
        }
        self.evaluator = (
            evaluate.Evaluator(self.template, eval_corpus, mesh, eval_cfg, perf)
            if eval_corpus is not None and eval_corpus.num_examples
            else None
        )
        self.in_flight = perf.steps_in_flight or (
            1 if mesh.devices.flat[0].platform == "cpu" else 2
        )
        self.pending: collections.deque = collections.deque()
        self.compiled: Any = None

    def _start(self, params: step_lib.Params) -> datatypes.TrainState:
        """The state before the first step, in arrays of its own (they are donated)."""
        low = sorted({str(x.dtype) for x in params.values()} - {"float32", "float64"})
        if low:
            progress.say(
                f"  warning: master weights are {', '.join(low)}: updates below their"
                " rounding are lost; model.param_dtype=float32 keeps them"
            )
        placed = {
            name: jax.device_put(x, self.places.state.params[name], may_alias=False)
            for name, x in params.items()
        }
        init = jax.jit(self.tx.init, out_shardings=self.places.state.opt_state)
        zero = jax.device_put(jnp.zeros((), jnp.int32), self.places.state.step)
        return datatypes.TrainState(zero, placed, init(placed))

    def run(self) -> Result:
        """Restores, trains to the end, evaluates."""
        store = checkpoint.Store(
            self.workdir / "checkpoints",
            keep=self.cfg.keep_checkpoints,
            keep_best=self.cfg.keep_best,
            in_background=self.perf.async_checkpoints,
        )
        self.store = store
        first = self._restore()
        self.log = metrics_lib.Log(
            self.workdir / "metrics.jsonl",
            first if first else -1,
            str(self.workdir / "tensorboard") if self.report.tensorboard else "",
        )
        try:
            if not first:
                self._evaluate(0)
            if first < self.schedule.num_steps:
                self._steps(first)
            with self._timed("checkpoint"):
                store.wait()
        finally:
            store.close()
            self.log.close()
        evals = [line for line in self.log.history if line["kind"] == "eval"]
        return Result(
            self.template.merge(self.state.params, self.frozen)[0],
            self.state,
            self.log.history,
            dict(self.seconds),
            evals[0] if evals else {},
            evals[-1] if evals else {},
            first,
        )

    def _restore(self) -> int:
        """Goes on from the newest whole checkpoint; returns its step, or 0."""
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            self.state,
        )
        begin = time.monotonic()
        found = self.store.restore(abstract, self.expected)
        if found is None:
            return 0
        self.state, record = found
        self.seconds.update(record["seconds"])
        self.totals = _Totals(**record["totals"])
        step = int(self.state.step)
        self.seconds["checkpoint"] += time.monotonic() - begin
        progress.say(f"  resumed at step {step:,} of {self.schedule.num_steps:,}")
        return step

    def _steps(self, first: int) -> None:
        last = self.schedule.num_steps
        feed = input_lib.Feed(
            self.layout, self.mesh, range(first, last), self.perf.prefetch
        )
        inputs = iter(feed)
        try:
            with progress.track("train", last - first, "steps") as advance:
                for _ in range(first, last):
                    with self._timed("input"):
                        item = next(inputs)
                    self._step(item)
                    advance(1)
        finally:
            feed.close()

    def _step(self, item: input_lib.StepInput) -> None:
        """Dispatches one step and does what is due after it."""
        if self.compiled is None:
            self.compiled = self._compile(item.batch)
        with self._timed("steps"):
            finished = self._drain(self.in_flight - 1)
            self.state, out = self.compiled(self.state, self.frozen, item.batch)
            self.pending.append((item, out))
            # While this step runs: the host looks at the ones before.
            for earlier in finished:
                self._record(*earlier)
        done = item.step + 1
        at_end = done == self.schedule.num_steps
        eval_due = at_end or _is_due(done, self.cfg.eval_every)
        save_due = at_end or _is_due(done, self.cfg.checkpoint_every)
        stopping = self._stopping(done)
        if eval_due or save_due or stopping:
            with self._timed("steps"):
                for earlier in self._drain():
                    self._record(*earlier)
        loss = self._evaluate(done) if eval_due else None
        if save_due or stopping:
            self._save(loss)
        if stopping and not at_end:
            self.store.wait()
            progress.say(f"  stopped by a signal at step {done:,}; the state is saved")
            raise Preempted(done)

    def _stopping(self, done: int) -> bool:
        return self.stop_requested.is_set()

    def _compile(self, batch: datatypes.Batch) -> Any:
        sizes = step_lib.Sizes(self.layout.label_slots, self.perf.vocab_chunk)
        step = make_step(self.template, self.tx, self.mesh, sizes)
        jitted = step_lib.jit(step, self.places, self.mesh)
        with self._timed("compile"):
            return jitted.lower(self.state, self.frozen, batch).compile()

    def _drain(self, most: int = 0) -> list[tuple[Any, Any]]:
        """Waits until at most so many steps are unfinished; returns the others."""
        finished = []
        while len(self.pending) > most:
            finished.append(self.pending.popleft())
            jax.block_until_ready(finished[-1][1].loss)
        return finished

    def _record(self, item: input_lib.StepInput, out: step_lib.Metrics) -> None:
        """Adds one finished step to the totals; writes a line when one is due."""
        done = item.step + 1
        if not bool(out.is_finite):
            self._not_finite(done, out)
        self.totals.add(item, float(out.loss), float(out.nll_sum))
        if (
            done == 1
            or _is_due(done, self.cfg.log_every)
            or (done == self.schedule.num_steps)
        ):
            line = {
                **self.totals.window(),
                "lr": float(np.asarray(self.learning_rate(item.step))),
                "grad_norm": float(out.grad_norm),
                "epoch": item.epoch,
                "tokens": self.totals.tokens,
                "labels": self.totals.labels,
                "skipped": self.totals.skipped,
                "time": round(sum(self.seconds.values()), 3),
            }
            self.log.write(done, "train", line)

    def _not_finite(self, done: int, out: step_lib.Metrics) -> None:
        ids = _nonfinite_examples(out)
        where = (
            f"the loss of example(s) {', '.join(map(str, ids[:8]))}"
            f" ({', '.join(str(self.corpus.uid[i]) for i in ids[:8])})"
            if len(ids)
            else f"the gradient (norm {float(out.grad_norm)}), but no example's loss,"
        )
        text = f"step {done}: {where} is not finite; the update was left out"
        if self.cfg.nonfinite == "stop":
            raise errors.UserError(
                f"{text}. Look at these examples, lower"
                " train.optimizer.learning_rate, or go on past such steps with"
                " train.nonfinite=skip"
            )
        self.totals.skipped += 1
        progress.say(f"  {text}")

    def _evaluate(self, done: int) -> float | None:
        if self.evaluator is None:
            return None
        with self._timed("eval"):
            found = self.evaluator(self.state.params, self.frozen)
        time_now = round(sum(self.seconds.values()), 3)
        self.log.write(done, "eval", {**found.summary(), "time": time_now})
        progress.say(f"  step {done:,}: held-out loss {found.loss:.4f} nats/token")
        return found.loss

    def _save(self, loss: float | None) -> None:
        with self._timed("checkpoint"):
            self.log.sync()
            record = {
                **self.expected,
                "seconds": dict(self.seconds),
                "totals": dataclasses.asdict(self.totals),
            }
            self.store.save(self.state, record, loss)

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] += time.monotonic() - begin


@dataclasses.dataclass
class _Totals:
    """Sums on the host; saved with the checkpoint, so that windows survive a kill."""

    tokens: int = 0
    labels: int = 0
    skipped: int = 0
    window_steps: int = 0
    window_loss: float = 0.0
    window_nll: float = 0.0
    window_labels: int = 0

    def add(self, item: input_lib.StepInput, loss: float, nll_sum: float) -> None:
        self.tokens += item.tokens
        self.labels += item.labels
        self.window_steps += 1
        self.window_loss += loss
        self.window_nll += nll_sum
        self.window_labels += item.labels

    def window(self) -> dict[str, float]:
        """Means since the last line, and starts a new window."""
        result = {
            "loss": self.window_loss / self.window_steps,
            "token_loss": self.window_nll / max(self.window_labels, 1),
        }
        self.window_steps, self.window_labels = 0, 0
        self.window_loss, self.window_nll = 0.0, 0.0
        return result


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


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


@contextlib.contextmanager
def _signals(trainer: _Trainer) -> Iterator[None]:
    """SIGTERM asks the loop to save and stop, while this block runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: trainer.stop_requested.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
