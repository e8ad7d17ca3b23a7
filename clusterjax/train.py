"""Training: from a decoder and a schedule to a trained decoder.

Resuming is a look-up: the schedule says what every step holds, so that a checkpoint
needs the state and the number of the step only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from etils import epath

from clusterjax import (
    checkpoint,
    collection,
    config,
    datatypes,
    distributed,
    faults,
    files,
    metrics,
    models,
    progress,
)
from clusterjax import input as input_lib
from clusterjax import loop as loop_lib
from clusterjax import step as step_lib
from clusterjax.models import checkpoints, decoder
from clusterjax.models import lora as lora_lib

make_step = step_lib.make_step
Preempted = loop_lib.Preempted
PREEMPTED_EXIT_CODE = loop_lib.PREEMPTED_EXIT_CODE


@dataclasses.dataclass
class Result:
    """What training leaves.

    Attributes:
      model: the trained decoder (adapters merged in).
      state: the last TrainState, sharded.
      history: lines of metrics.jsonl, those of earlier starts included.
      seconds: wall time by part (compile, steps, input, eval, checkpoint), all starts.
      initial_eval, final_eval: lines of kind `eval`, {} without held-out data.
      resumed_from: step of the checkpoint that this start went on from, or 0.
    """

    model: decoder.Decoder
    state: datatypes.TrainState
    history: list[dict[str, Any]]
    seconds: dict[str, float]
    initial_eval: dict[str, Any]
    final_eval: dict[str, Any]
    resumed_from: int


def fit(
    model: decoder.Decoder,
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
    start_at: int = 0,
    stop_at: int | None = None,
    total_steps: int | None = None,
    collect: collection.Collection | None = None,
) -> Result:
    """Trains `model` on the schedule; goes on from the newest checkpoint, if any.

    Args:
      model: the decoder to start from; it is not changed.
      corpus: the examples that the schedule's ids mean.
      schedule: `allocation.Schedule`.
      cfg: optimiser and loop.
      mesh: the device mesh.
      workdir: gets `checkpoints/`, `metrics.jsonl`, `model/` (and `adapters/`).
      tokenizer: saved beside the final model; None: the weights alone.
      eval_corpus: held-out examples; None: no evaluation.
      model_cfg: adapters.
      eval_cfg: evaluation.
      mesh_cfg: whether parameters that do not divide may be replicated.
      perf: speed and memory.
      report: whether TensorBoard events and a profile are written.
      start_at: step of the run that is the schedule's step 0, when a renewed plan takes
        over; the state comes from the checkpoint of that step or a later one.
      stop_at: step to stop before, with a checkpoint; None: the schedule's end.
      total_steps: of the whole run, for the learning rate; None: the schedule's.
      collect: gets the feature of every example that is trained on.

    Raises:
      errors.UserError: config, checkpoints or hosts do not fit together; or a step was
        not finite and `cfg.nonfinite` is `stop`.
      Preempted: SIGTERM or a preemption notice came; the state is saved.
    """
    end = start_at + schedule.num_steps
    part = loop_lib.Part(start_at, stop_at or end, total_steps or end)
    expected = {
        "plan": schedule.fingerprint,
        "corpus": corpus.fingerprint,
        "optimizer": config.fingerprint(cfg.optimizer),
        "lora": config.fingerprint(model_cfg.lora),
    }
    # Before anything that all processes do together, and would hang in.
    distributed.require_equal(expected)
    folder = epath.Path(workdir)
    tmpl, params, frozen = _parts(model, model_cfg.lora, perf.remat, mesh)
    store = checkpoint.Store(
        folder / "checkpoints",
        keep=cfg.keep_checkpoints,
        keep_best=cfg.keep_best,
        in_background=perf.async_checkpoints,
    )
    loop = loop_lib.Loop(
        tmpl, corpus, schedule, cfg, mesh, folder, store, expected, perf, report, part
    )
    loop.start(params, frozen, mesh_cfg.allow_replication)
    if eval_corpus is not None and eval_corpus.num_examples:
        loop.evaluate_on(eval_corpus, eval_cfg)
    if collect is not None:
        loop.collect_into(collect)
    with _stopping_on_sigterm(loop.stop_requested), distributed.ending_together():
        first = loop.run()
        trained = _trained(loop, model_cfg.lora)
        if cfg.save_model and part.stop == part.total:
            _save(loop, trained, tokenizer, folder, model_cfg)
    return _result(loop, trained, first, folder)


def _parts(
    model: decoder.Decoder,
    lora: config.LoraConfig,
    remat: str,
    mesh: jax.sharding.Mesh,
) -> tuple[step_lib.Template, step_lib.Params, step_lib.Params]:
    """The template, what is trained and what is not."""
    tmpl, params = step_lib.split(model, remat, mesh)
    if not lora.rank:
        return tmpl, params, {}
    tmpl, factors = step_lib.with_lora(tmpl, lora)
    return tmpl, factors, params


def _result(
    loop: loop_lib.Loop, trained: decoder.Decoder, first: int, folder: epath.Path
) -> Result:
    history = metrics.read(folder / "metrics.jsonl")
    evals = [line for line in history if line["kind"] == "eval"]
    return Result(
        trained,
        loop.state,
        history,
        dict(loop.seconds),
        evals[0] if evals else {},
        evals[-1] if evals else {},
        first,
    )


def _trained(loop: loop_lib.Loop, lora: config.LoraConfig) -> decoder.Decoder:
    model, _ = loop.template.merge(loop.state.params, loop.frozen)
    if not lora.rank:
        return model
    return lora_lib.merge(model, step_lib.lora_factors(loop.state.params), lora)


def _save(
    loop: loop_lib.Loop,
    model: decoder.Decoder,
    tokenizer: Any,
    folder: epath.Path,
    model_cfg: config.ModelConfig,
) -> None:
    """Writes the model in Hugging Face form, and the adapters in that of PEFT."""
    faults.point("model.save")
    # All processes take part in gathering, and the first one writes.
    model = _on_host(model)
    factors = (
        jax.tree.map(np.asarray, step_lib.lora_factors(_gathered(loop.state.params)))
        if model_cfg.lora.rank
        else None
    )
    if not distributed.is_primary():
        return
    with files.local_folder(folder / "model") as local:
        if tokenizer is None:
            checkpoints.save_decoder(model, local)
        else:
            models.save(model, tokenizer, local)
    if factors is not None:
        with files.local_folder(folder / "adapters") as local:
            lora_lib.save(factors, model_cfg.lora, model.config, local, model_cfg.path)
    progress.say(f"  model written to {folder / 'model'}")


def _gathered(params: step_lib.Params) -> step_lib.Params:
    """Parameters that every process has whole; one at a time is copied."""
    return {name: distributed.gather(value) for name, value in params.items()}


def _on_host(model: decoder.Decoder) -> decoder.Decoder:
    if jax.process_count() == 1:
        return model
    tmpl, params = step_lib.split(model)
    return tmpl.merge(_gathered(params), {})[0]


@contextlib.contextmanager
def _stopping_on_sigterm(stop: threading.Event) -> Iterator[None]:
    """SIGTERM asks the loop to save and stop, while this block runs.

    With `jax.distributed` JAX itself takes the signal, so that all processes stop at
    the same step; a handler of ours would hide it.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or jax.distributed.is_initialized():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
