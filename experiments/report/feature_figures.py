"""What the gradient features look like, and what they are worth."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from bokeh import models, plotting

from clusterjax import features
from experiments.report import coloring, plots, style
from experiments.report import record as record_lib

_QUANTILES = ("smallest", "5 %", "25 %", "median", "75 %", "95 %", "largest")
_FIT, _EXPECTED = "#D55E00", "#4D4D4D"


def diagnostics(record: record_lib.RunRecord) -> Mapping[str, Any]:
    """The figures that the run has kept, or else made now (`features.diagnose`)."""
    assert record.feats is not None
    kept = record.feature_figures.get("diagnostics")
    return kept or dataclasses.asdict(features.diagnose(record.feats))


def figure(record: record_lib.RunRecord, found: Mapping[str, Any]) -> models.LayoutDOM:
    """Raw norm of each example against its label count, both logarithmic."""
    feats = record.feats
    assert feats is not None
    plot = plotting.figure(
        height=340,
        sizing_mode="stretch_width",
        tools="pan,box_zoom,wheel_zoom,reset,save",
        active_scroll=None,
        x_axis_type="log",
        y_axis_type="log",
        x_axis_label="Label tokens of the example",
        y_axis_label="Norm of its raw gradient feature",
    )
    plots.dress(plot)
    rng = np.random.default_rng(0)
    count = len(feats.norm)
    drawn = rng.permutation(count)[: record.config.report.max_points]
    sources = coloring.sources(record)
    place_n = sources.place_N[feats.example_id[drawn]]
    for i, shade in enumerate(sources.shades):
        inside = drawn[place_n == i]
        plot.scatter(
            feats.num_labels[inside],
            feats.norm[inside],
            size=4,
            color=shade,
            alpha=0.55,
        )
    _lines(plot, feats.num_labels, feats.norm, float(found["label_exponent"]))
    plots.dress_legend(plot)
    return plot


def _lines(
    plot: plotting.figure, labels: np.ndarray, norm: np.ndarray, slope: float
) -> None:
    """The fitted power law, and labels^−½ through the same middle."""
    low, high = float(labels.min()), float(labels.max())
    if low == high or not np.isfinite(slope):
        return
    middle = float(np.mean(np.log(labels))), float(np.mean(np.log(norm)))
    x = np.geomspace(low, high, 50)
    for power, shade, dash, name in (
        (slope, _FIT, "solid", f"fit, labels^{_number(slope, 2)}"),
        (-0.5, _EXPECTED, "dashed", "independent tokens, labels^−0.5"),
    ):
        y = np.exp(middle[1] + power * (np.log(x) - middle[0]))
        plot.line(x, y, line_width=2, color=shade, line_dash=dash, legend_label=name)


def panel(record: record_lib.RunRecord, found: Mapping[str, Any]) -> str:
    """All figures but the plot."""
    sources = coloring.sources(record)
    return (
        style.swatches(sources.names, sources.shades)
        + _summary(found)
        + _norms(found)
        + _outliers(record, found)
        + _dropped(record, found)
        + _sources(found)
        + _agreement(record)
        + _worth(record)
    )


def _summary(found: Mapping[str, Any]) -> str:
    most = min(int(found["count"]), int(found["width"]))
    cosine = _number(found["mean_cosine"])
    correlation = _number(found["label_correlation"], 2)
    power = _number(found["label_exponent"], 2)
    text = (
        f"Effective rank {found['effective_rank']:,.1f} of at most {most:,}"
        " (exp of the entropy of the spectrum): about so many directions carry the"
        f" features. Mean cosine of two different examples {cosine}."
        f" Log norm and log label count correlate at {correlation};"
        f" the norm goes as labels^{power}, and would go as"
        " labels^−0.5 if the gradients of an example's tokens were independent."
    )
    return f"<p>{style.escape(text)}</p>"


def _norms(found: Mapping[str, Any]) -> str:
    cells = [[f"{value:.4g}" for value in found["norm_quantiles"]]]
    table = style.table(_QUANTILES, cells, numeric=range(len(_QUANTILES)))
    return "<h3>Raw norms</h3>" + table


def _outliers(record: record_lib.RunRecord, found: Mapping[str, Any]) -> str:
    feats = record.feats
    assert feats is not None
    if not found["outliers"]:
        return "<h3>Outliers</h3>" + style.note(
            "None: no log norm is more than 5 robust deviations from the median."
        )
    place = {uid: n for n, uid in enumerate(feats.uid.tolist())}
    limit = record.config.report.max_text
    rows = []
    for uid in found["outliers"]:
        n = place.get(uid)
        if n is None:
            continue
        example = int(feats.example_id[n])
        _, answer = record.texts(example)
        rows.append(
            (
                uid,
                f"{feats.norm[n]:.3g}",
                f"{feats.num_labels[n]:,}",
                f"{feats.loss[n]:.2f}",
                "kept" if record.kept_N[example] else "pruned",
                style.shorten(answer, min(limit, 90)),
            )
        )
    heads = ("example", "norm", "labels", "loss (nats)", "", "answer")
    return (
        "<h3>Outliers</h3>"
        + style.folded_table(heads, rows, 8, numeric=(1, 2, 3))
        + style.note(
            "Log norms more than 5 robust deviations from the median, the farthest"
            " first, 20 at most."
        )
    )


def _dropped(record: record_lib.RunRecord, found: Mapping[str, Any]) -> str:
    assert record.feats is not None
    if not found["rejects"]:
        return "<h3>Examples dropped</h3>" + style.note(
            "None: every example has a usable feature."
        )
    first = {reject.reason: reject.detail for reject in record.feats.rejects[::-1]}
    rows = [
        (reason, f"{count:,}", first.get(reason, ""))
        for reason, count in sorted(found["rejects"].items(), key=lambda x: -x[1])
    ]
    heads = ("reason", "examples", "the first")
    return "<h3>Examples dropped</h3>" + style.table(heads, rows, numeric=(1,))


def _sources(found: Mapping[str, Any]) -> str:
    rows = [
        (
            name,
            f"{item['count']:,}",
            _number(item["inside"]),
            _number(item["outside"]),
            _number(item["inside"] - item["outside"]),
        )
        for name, item in sorted(
            found["sources"].items(), key=lambda pair: -pair[1]["count"]
        )
    ]
    heads = (
        "source",
        "examples",
        "mean cosine inside",
        "with other sources",
        "difference",
    )
    return "<h3>Sources</h3>" + style.folded_table(
        heads, rows, 12, numeric=range(1, len(heads))
    )


def _agreement(record: record_lib.RunRecord) -> str:
    found = record.feature_figures.get("agreement")
    if not found:
        return ""
    rows = [
        ("cosine of an example's two features", _number(found["cosine"])),
        ("correlation of pairwise cosines", _number(found["pair_correlation"])),
        ("adjusted Rand index of the clusters", _number(found["rand_index"])),
        ("overlap of the kept examples", _number(found["kept_overlap"])),
    ]
    return (
        "<h3>Agreement with the full feature</h3>"
        + style.table(("figure", "value"), rows, numeric=(1,))
        + style.note(
            f"On {found['sample']:,} examples: this pass against one with all tokens,"
            " all layers and the trained model in float32."
        )
    )


def _worth(record: record_lib.RunRecord) -> str:
    found = record.feature_figures.get("worth")
    if not found:
        return ""
    rows = [
        (
            "correlation of pairwise cosines with those of whole-model gradients",
            _number(found["cosine_correlation"]),
        ),
        (
            "noise of a step that holds every cluster in proportion, random steps = 1",
            _number(found["noise_ratio"]),
        ),
    ]
    return (
        "<h3>What the features are worth</h3>"
        + style.table(("figure", "value"), rows, numeric=(1,))
        + style.note(
            f"On {found['sample']:,} examples, judged by gradient sketches of every"
            f" matrix with another seed ({found['sketch_seed']}) than the features'."
        )
    )


def _number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash for what was not measured or can't be."""
    if value is None or not np.isfinite(value):
        return "–"
    return f"{value:.{digits}f}".replace("-", "−")
