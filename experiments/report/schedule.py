"""How the schedule spreads clusters and tokens over workers."""

from __future__ import annotations

import dataclasses

import numpy as np
from bokeh import models, plotting

from experiments.report import plots, style
from experiments.report import record as record_lib

MAX_STEPS = 400


@dataclasses.dataclass(frozen=True)
class Balance:
    """What every worker gets in the steps of the first epoch.

    Attributes:
      count_SRK: examples of each cluster on each worker in each step.
      tokens_SR: tokens of each worker in each step.
      steps_per_epoch: of one epoch.
      capacity: token slots of one worker in one step (rows × row length), or 0.
      placement: `spread` or `dedicated`.
    """

    count_SRK: np.ndarray
    tokens_SR: np.ndarray
    steps_per_epoch: int
    capacity: int
    placement: str

    @property
    def coverage_K(self) -> np.ndarray:
        """float [K], share of the steps that hold each cluster."""
        return (self.count_SRK.sum(1) > 0).mean(0)

    @property
    def load_SR(self) -> np.ndarray:
        """float [S, R], tokens of a worker against the mean worker of its step."""
        mean_S = self.tokens_SR.mean(1, keepdims=True)
        return self.tokens_SR / np.maximum(mean_S, 1e-9)


def measure(record: record_lib.RunRecord) -> Balance:
    """Counts examples and tokens of the first epoch's steps on every worker."""
    schedule, layout = record.schedule, record.layout
    assert schedule is not None
    shown = min(schedule.steps_per_epoch, schedule.num_steps, MAX_STEPS)
    clusters = schedule.plan.num_clusters
    count_SRK = np.zeros((shown, layout.num_shards, clusters), np.int64)
    tokens_SR = np.zeros((shown, layout.num_shards), np.int64)
    slots = 0
    for step in range(shown):
        placed = schedule.place(step, layout.num_shards, layout.accumulation_steps)
        np.add.at(count_SRK[step], (placed.shard, placed.step.cluster_id), 1)
        np.add.at(tokens_SR[step], placed.shard, placed.length)
        slots = placed.num_micro_steps * placed.num_rows * placed.row_length
    return Balance(
        count_SRK,
        tokens_SR,
        schedule.steps_per_epoch,
        slots,
        schedule.config.placement,
    )


def intro(balance: Balance) -> str:
    """One sentence on coverage, one on token balance."""
    covered = int((balance.coverage_K == 1).sum())
    count = len(balance.coverage_K)
    what = (
        f"Every step holds every one of the {count} clusters."
        if covered == count
        else f"{covered} of {count} clusters are in every step; the rarer ones count"
        " more in the steps that hold them."
    )
    if balance.tokens_SR.shape[1] == 1:
        return what
    heaviest = balance.load_SR.max(1)
    mean, most = style.percent(heaviest.mean() - 1), style.percent(heaviest.max() - 1)
    return (
        f"{what} The heaviest worker of a step holds {mean} more tokens than the mean"
        f" worker ({most} at most)."
    )


def table(balance: Balance) -> str:
    """Examples per step of each cluster on each worker: mean, least and most."""
    _, workers, clusters = balance.count_SRK.shape
    mean_RK = balance.count_SRK.mean(0)
    low_RK, high_RK = balance.count_SRK.min(0), balance.count_SRK.max(0)
    top = max(float(mean_RK.max()), 1e-9)
    rows = []
    for k in range(clusters):
        cells = [
            _cell(mean_RK[r, k], low_RK[r, k], high_RK[r, k], top)
            for r in range(workers)
        ]
        rows.append((f"cluster {k}", *cells, style.percent(balance.coverage_K[k], 0)))
    heads = ("", *(f"worker {r}" for r in range(workers)), "steps that hold it")
    title = "<h3>Examples of each cluster on each worker, per step</h3>"
    body = style.table(
        heads, rows, numeric=(workers + 1,), raw=tuple(range(1, workers + 1))
    )
    return title + body + style.note("Mean over an epoch's steps, and least to most.")


def _cell(mean: float, low: int, high: int, top: float) -> str:
    spread = f"{low}" if low == high else f"{low}–{high}"
    width = 100 * mean / top
    return (
        f'<div style="background:linear-gradient(90deg,#CFE0EC {width:.1f}%,'
        f'transparent {width:.1f}%);padding:1px 7px;border-radius:2px">{mean:.2f}'
        f' <span style="color:#5b6670">({spread})</span></div>'
    )


def figure(balance: Balance) -> models.LayoutDOM:
    """Heat map: worker × step, tokens against the mean of the step."""
    shown = min(len(balance.tokens_SR), MAX_STEPS)
    load_RS = balance.load_SR[:shown].T
    workers = load_RS.shape[0]
    limit = max(float(np.abs(load_RS - 1).max()), 0.01)
    step_RS, worker_RS = np.meshgrid(np.arange(shown), np.arange(workers))
    source = models.ColumnDataSource(
        {
            "step": step_RS.ravel(),
            "worker": worker_RS.ravel(),
            "excess": (100 * (load_RS - 1)).ravel(),
            "tokens": balance.tokens_SR[:shown].T.ravel(),
        }
    )
    # Blue – white – orange stays readable with every kind of colour vision.
    mapper = models.LinearColorMapper(
        palette=_diverging(), low=-100 * limit, high=100 * limit
    )
    plot = plotting.figure(
        height=120 + 34 * min(workers, 16),
        sizing_mode="stretch_width",
        tools="reset,save",
        x_axis_label="Optimiser step of the first epoch",
        y_axis_label="Worker (data shard)",
        x_range=models.Range1d(start=-0.5, end=shown - 0.5),
        y_range=models.Range1d(start=workers - 0.5, end=-0.5),
    )
    plot.rect(
        "step",
        "worker",
        width=1,
        height=0.92,
        source=source,
        line_color=None,
        fill_color={"field": "excess", "transform": mapper},
    )
    plot.add_tools(
        models.HoverTool(
            tooltips=[
                ("step", "@step"),
                ("worker", "@worker"),
                ("tokens", "@tokens{0,0}"),
                ("against the mean", "@excess{+0.0} %"),
            ]
        )
    )
    plot.add_layout(
        models.ColorBar(
            color_mapper=mapper,
            width=12,
            title="% of mean",
            title_text_font_style="normal",
            label_standoff=6,
        ),
        "right",
    )
    plots.dress(plot)
    plot.grid.grid_line_color = None
    plot.yaxis.ticker = models.FixedTicker(ticks=list(range(workers)))
    return plot


def caption(balance: Balance) -> str:
    """What the heat map shows, and how full the rows are."""
    text = f"Placement {balance.placement}."
    if balance.tokens_SR.shape[1] > 1:
        text = (
            "Token load: tokens of a worker in a step, against the mean worker of the"
            f" step (placement {balance.placement})."
        )
    if balance.capacity:
        used = balance.tokens_SR.sum() / (balance.tokens_SR.size * balance.capacity)
        text += f" {style.percent(used)} of the token slots of a step hold tokens."
    if balance.steps_per_epoch > MAX_STEPS:
        text += f" The first {MAX_STEPS} of {balance.steps_per_epoch:,} steps."
    return style.note(text)


def _diverging(steps: int = 101) -> list[str]:
    ends = np.array([(0, 0x72, 0xB2), (250, 250, 250), (0xD5, 0x5E, 0)], float)
    place = np.linspace(0, 2, steps)
    colors = np.stack([np.interp(place, [0, 1, 2], ends[:, i]) for i in range(3)], 1)
    return ["#{:02x}{:02x}{:02x}".format(*map(round, rgb)) for rgb in colors]
