"""The page: sticky summary, one column of sections, all code and styles inline."""

from __future__ import annotations

import dataclasses
import datetime

from bokeh import embed, models, resources
from etils import epath

from clusterjax import files
from experiments.report import (
    checks,
    clusters,
    curves,
    feature_figures,
    feature_map,
    ledger,
    schedule,
    style,
)
from experiments.report import record as record_lib


@dataclasses.dataclass
class Page:
    """Sections with their titles, and the figures that stand in them."""

    sections: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    figures: dict[str, models.Model] = dataclasses.field(default_factory=dict)

    def add(self, identifier: str, title: str, intro: str, body: str) -> None:
        text = style.section(identifier, title, intro, body)
        self.sections.append((identifier, title, text))

    def figure(self, name: str, figure: models.LayoutDOM) -> str:
        """Keeps a figure and returns the mark that it replaces later."""
        self.figures[name] = figure
        return f"<!--figure:{name}-->"

    def render(self, header: str, title: str, footer: str) -> str:
        """The whole document, with styles, scripts and figures inline."""
        body = "".join(text for _, _, text in self.sections)
        code, script = "", ""
        if self.figures:
            inline = resources.Resources(
                mode="inline", minified=True, components=["bokeh", "bokeh-widgets"]
            )
            code = inline.render()
            script, parts = embed.components(self.figures)  # pyright: ignore
            for name, part in parts.items():
                body = body.replace(f"<!--figure:{name}-->", part)
        time = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{style.escape(title)}</title><style>{style.CSS}</style>{code}"
            f"</head><body>{header}<main>{body}<footer>clusterjax · written {time}"
            f"{style.escape(footer)}</footer></main>{script}</body></html>\n"
        )


def write(record: record_lib.RunRecord, path: epath.PathLike) -> None:
    """Writes the report of a run as one HTML file that needs no network.

    Args:
      record: the run; panels whose values are missing are left out.
      path: the file, written atomically.
    """
    page = Page()
    _add_result(page, record)
    if record.feats is not None:
        _add_map(page, record)
        _add_features(page, record)
    if record.clusters is not None and record.feats is not None:
        _add_clusters(page, record)
    if record.schedule is not None:
        _add_schedule(page, record)
    if record.ledger:
        _add_ledger(page, record)
    _add_data(page, record)
    page.add(
        "config",
        "Settings",
        "Keys that differ from their defaults; everything else is folded below.",
        checks.settings(record),
    )
    kept = f"{record.num_kept:,} of {record.corpus.num_examples:,} examples"
    version = record.environment.get("versions", {}).get("clusterjax") or ""
    text = page.render(
        _header(page, record),
        f"clusterjax: {record.config.selection.method}, {kept}",
        f" · version {version} · corpus {record.corpus.fingerprint}",
    )
    files.write_text(path, text)


def _add_result(page: Page, record: record_lib.RunRecord) -> None:
    if not record.metrics:
        return
    legend = curves.stage_legend(record)
    body = page.figure("curves", curves.figure(record)) + legend
    by_cluster = curves.by_cluster(record)
    if by_cluster is not None:
        body += (
            "<h3>Training loss by cluster, smoothed</h3>"
            + page.figure("by-cluster", by_cluster)
            + style.note("Click a name in the legend to hide its line.")
        )
    page.add(
        "loss",
        "Loss",
        "Held-out loss is never weighted. On the time axis the shaded stages before"
        " training count too: that is the price of the selection.",
        body + curves.per_source(record),
    )


def _add_map(page: Page, record: record_lib.RunRecord) -> None:
    feats = record.feats
    assert feats is not None
    figure, legend = feature_map.figure(record)
    drawn = min(len(feats.example_id), record.config.report.max_points)
    everything = drawn == len(feats.example_id)
    width = feats.values.shape[1]
    page.add(
        "map",
        "Map of gradient features",
        f"Each point is one example's {style.escape(feats.kind)} gradient feature"
        f" ({width:,} numbers, unit length)."
        + (
            f" All {drawn:,} are drawn. "
            if everything
            else f" {drawn:,} of"
            f" {len(feats.example_id):,} are drawn, chosen at random. "
        )
        + "Point at one to read it, click to keep it below the map.",
        f'<p class="legend" id="map-legend">{legend}</p>'
        + page.figure("map", figure)
        + '<div id="picked" aria-live="polite"><p>Click a point to read the example'
        " here.</p></div>",
    )


def _add_features(page: Page, record: record_lib.RunRecord) -> None:
    found = feature_figures.diagnostics(record)
    plot = feature_figures.figure(record, found)
    page.add(
        "features",
        "Gradient features in figures",
        "Lengths before scaling to unit length, what was dropped, how alike the"
        " features are, and how well they stand for the whole model's gradient where"
        " that was measured.",
        page.figure("norms", plot) + feature_figures.panel(record, found),
    )


def _add_clusters(page: Page, record: record_lib.RunRecord) -> None:
    page.add(
        "clusters",
        "Clusters, quotas, weights",
        "Sizes before and after the floor (small clusters are dissolved) and the"
        " capacity (large ones pass examples on), what is kept of each, and the weight"
        " that makes up for it.",
        clusters.sizes(record),
    )
    page.add(
        "contents",
        "What each cluster contains",
        "Sources, and the examples nearest to and farthest from the centre.",
        clusters.contents(record),
    )


def _add_schedule(page: Page, record: record_lib.RunRecord) -> None:
    balance = schedule.measure(record)
    body = schedule.table(balance)
    if balance.tokens_SR.shape[1] > 1:
        body += page.figure("schedule", schedule.figure(balance))
    page.add(
        "schedule",
        "Schedule and balance of workers",
        schedule.intro(balance),
        body + schedule.caption(balance),
    )


def _add_ledger(page: Page, record: record_lib.RunRecord) -> None:
    page.add(
        "time",
        "Time",
        "Seconds of every stage, over all starts of this run.",
        ledger.panel(record),
    )


def _add_data(page: Page, record: record_lib.RunRecord) -> None:
    page.add(
        "data",
        "Data",
        "What was read, what was left out, and how long examples are.",
        checks.data(record),
    )


def _facts(record: record_lib.RunRecord) -> list[tuple[str, str]]:
    """The summary: (value, what it is), most important first."""
    total, kept = record.corpus.num_examples, record.num_kept
    facts = [
        (f"{kept:,} of {total:,}", f"examples kept ({style.percent(kept / total)})")
    ]
    points = record.history.heldout
    if points:
        first, last = points[0].loss, points[-1].loss
        move = f" ({style.change(last / first - 1)})" if len(points) > 1 else ""
        values = f"{first:.3f} → {last:.3f}" if len(points) > 1 else f"{first:.3f}"
        facts.append((values, f"nats per token, held out{move}"))
    if record.clusters is not None:
        sizes = record.clusters.sizes
        facts.append(
            (
                str(record.clusters.num_clusters),
                f"clusters of {sizes.min():,} to {sizes.max():,}",
            )
        )
    if record.ledger:
        seconds = ledger.total_seconds(record)
        selection = ledger.selection_seconds(record)
        share = style.percent(selection / (seconds or 1.0), 0)
        facts.append(
            (
                style.seconds(seconds),
                f"in all, selection {style.seconds(selection)} ({share})",
            )
        )
    if record.history.training:
        steps = record.history.training[-1].step
        workers = style.plural(record.layout.num_shards, "worker")
        batch = record.config.allocation.batch_size
        facts.append((f"{steps:,}", f"steps of {batch:,} examples on {workers}"))
    return facts


def _header(page: Page, record: record_lib.RunRecord) -> str:
    settings = record.config.selection
    kind = settings.method
    if kind == "cluster":
        kind += f", keep {settings.keep}, quota {settings.quota}"
        kind += f" · {settings.ratio:g}" if settings.quota == "min" else ""
    links = "".join(
        f'<a href="#{identifier}">{title.split(",")[0].split(" of ")[0]}</a>'
        for identifier, title in _short_titles(page)
    )
    facts = "".join(
        f'<div class="fact"><b>{style.escape(value)}</b>'
        f"<span>{style.escape(text).replace(' %', '&nbsp;%')}</span></div>"
        for value, text in _facts(record)
    )
    return (
        '<header><div><div class="top"><h1>clusterjax run<small>'
        f"{style.escape(kind)}</small></h1><nav>{links}</nav></div>"
        f'<div class="facts">{facts}</div></div></header>'
    )


def _short_titles(page: Page) -> list[tuple[str, str]]:
    short = {"contents": "Contents", "schedule": "Schedule", "map": "Map"}
    short["features"] = "Features"
    return [(name, short.get(name, title)) for name, title, _ in page.sections]
