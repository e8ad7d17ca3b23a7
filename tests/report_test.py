"""The report: self-contained, escaped, complete, small; its figures by hand."""

import dataclasses
import html.parser
import re

import numpy as np
import pytest
import synthetic_run

from clusterjax import datatypes, features
from experiments import history, report
from experiments.report import checks, curves, feature_map, projections, schedule, style


@pytest.fixture(scope="module")
def record():
    return synthetic_run.record(synthetic_run.saved())


@pytest.fixture(scope="module")
def page(record, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.write(record, path)
    return path.read_text(encoding="utf-8")


class _Parser(html.parser.HTMLParser):
    """Collects text, external references, section ids and unclosed elements."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.text, self.references, self.sections, self.open = [], [], [], []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.references += [values[k] for k in ("src", "href") if k in values]
        if tag == "section":
            self.sections.append(values["id"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open[-5:])
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def _parse(text):
    parser = _Parser()
    parser.feed(text)
    parser.close()
    assert not parser.open
    return parser


def test_every_panel_is_there_and_nothing_comes_from_outside(page):
    parser = _parse(page)
    assert parser.sections == [
        "loss", "map", "features", "clusters", "contents", "schedule", "time", "data",
        "config",
    ]  # fmt: skip
    assert all(reference.startswith("#") for reference in parser.references)
    assert "url(http" not in page and "@import" not in page
    assert "$$" not in "".join(parser.text)  # would make Bokeh fetch MathJax


def test_example_text_is_never_markup(page):
    assert synthetic_run.INJECTION in "".join(_parse(page).text)
    outside_scripts = re.sub(r"(?s)<script.*?</script>", "", page)
    assert "<script>alert" not in outside_scripts
    assert "<tricks>" not in outside_scripts
    # Inside Bokeh's JSON the end of a script element would end the script.
    assert "</script>alert" not in page and "<b>text</b>" not in outside_scripts


def test_without_features_their_panels_are_left_out(record, tmp_path):
    run = synthetic_run.saved(selection_keys={"method": "random"})
    plain = dataclasses.replace(
        synthetic_run.record(run), feats=None, clusters=None, metrics=(), ledger=()
    )
    report.write(plain, tmp_path / "report.html")
    parser = _parse((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert parser.sections == ["schedule", "data", "config"]


def test_three_thousand_points_stay_below_six_megabytes(tmp_path):
    big = synthetic_run.record(synthetic_run.saved(num_examples=3500))
    report.write(big, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 6e6


def test_feature_figures_are_shown(record, tmp_path):
    feats = record.feats
    odd = int(np.argmax(feats.norm))
    norm = feats.norm.copy()
    norm[odd] = 1e9
    dropped = datatypes.Reject("json", 7, "zero_feature", "norm below 1e-12", "r7")
    feats = dataclasses.replace(feats, norm=norm, rejects=(dropped,))
    figures = {
        "agreement": {
            "sample": 40, "cosine": 0.912, "pair_correlation": 0.834,
            "rand_index": 0.715, "kept_overlap": 0.623,
        },
        "worth": {
            "sample": 50, "cosine_correlation": -0.187, "noise_ratio": 0.764,
            "sketch_seed": 1,
        },
    }  # fmt: skip
    changed = dataclasses.replace(record, feats=feats, feature_figures=figures)
    report.write(changed, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    part = text.split('<section id="features">')[1].split("</section>")[0]
    shown = " ".join("".join(_parse(part).text).split())
    for number in ("0.912", "0.834", "0.715", "0.623", "−0.187", "0.764"):
        assert number in shown
    assert feats.uid[odd] in shown and "1e+09" in shown
    assert "zero_feature" in shown and "norm below 1e-12" in shown
    found = features.diagnose(feats)
    assert f"Effective rank {found.effective_rank:,.1f} of at most 24" in shown
    for name, item in found.sources.items():
        assert name in shown and f"{item.inside:.3f}".replace("-", "−") in shown
    # What the run has kept is shown, not measured again.
    kept = dataclasses.asdict(found) | {"effective_rank": 7.25}
    report.write(
        dataclasses.replace(changed, feature_figures={"diagnostics": kept}),
        tmp_path / "kept.html",
    )
    assert "Effective rank 7.2 of" in (tmp_path / "kept.html").read_text("utf-8")


def test_summary_numbers(record, page):
    text = " ".join("".join(_parse(page).text).split())
    kept = len(np.unique(record.plan.example_id))
    assert f"{kept} of 300" in text
    assert "Training loss by cluster" in text
    assert "4.000 → 2.000" in text and "−50.0 %" in text
    assert "1 min 40 s" in text and "selection 8.0 s (8 %)" in text


def test_principal_components_equal_the_full_svd(rng):
    values = rng.standard_normal((200, 40)) @ np.diag(np.linspace(5, 0.1, 40))
    centered = values - values.mean(0)
    left, scale, _ = np.linalg.svd(centered, full_matrices=False)
    scores, share = projections.principal_components(values, 4, rng)
    assert share == pytest.approx(scale[:4] ** 2 / np.sum(scale**2), rel=1e-3)
    for i in range(4):
        cosine = abs(scores[:, i] @ left[:, i]) / np.linalg.norm(scores[:, i])
        assert cosine == pytest.approx(1, abs=2e-3)


def test_between_cluster_axis_finds_what_principal_components_miss(rng):
    """Two clusters apart along a direction that holds a twentieth of the variance."""
    label = np.arange(400) % 2
    values = rng.standard_normal((400, 10)) * np.array([2.0] * 5 + [0.1] * 5)
    values[:, 9] += 2.0 * label
    scores, share = projections.between_cluster_axes(values, label, 3)
    components, _ = projections.principal_components(values, 2, rng)
    assert scores.shape == (400, 1) and share == pytest.approx([1.0])

    def separation(score):
        gap = score[label == 0].mean() - score[label == 1].mean()
        return abs(gap) / score[label == 0].std()

    assert separation(scores[:, 0]) > 1.5
    assert max(separation(components[:, i]) for i in range(2)) < 0.5


def test_balance_counts_every_example_of_the_first_epoch(record):
    balance = schedule.measure(record)
    plan = record.plan
    by_cluster = np.bincount(plan.cluster_id, minlength=plan.num_clusters)
    assert balance.count_SRK.sum((0, 1)).tolist() == by_cluster.tolist()
    assert balance.tokens_SR.sum() == record.corpus.lengths[plan.example_id].sum()
    full = balance.count_SRK[: plan.num_kept // 16]
    assert (full.sum((1, 2)) == 16).all()
    assert (np.ptp(full.sum(2), axis=1) <= 1).all()
    assert balance.coverage_K.tolist() == [1.0] * 4


def test_history_puts_training_on_the_clock_of_the_run():
    lines = [
        {"step": 0, "kind": "eval", "loss": 3.0, "time": 1.0, "sources": {}},
        {"step": 2, "kind": "train", "loss": 2.5, "labels": 40, "time": 2.0},
        {"step": 4, "kind": "train", "loss": 2.0, "labels": 80, "time": 4.0},
        {"step": 3, "kind": "eval", "loss": 2.2, "time": 3.5,
         "sources": {"a": {"loss": 1.0}, "b": {"loss": 4.0}}},
    ]  # fmt: skip
    ledger = [
        {"stage": "features", "seconds": 10.0},
        {"stage": "train", "seconds": 5.0},
        {"stage": "report", "seconds": 100.0},
    ]
    built = history.build(lines, ledger)
    assert [point.seconds for point in built.training] == [12.0, 14.0]
    assert [point.seconds for point in built.heldout] == [11.0, 13.5]
    assert [point.label_tokens for point in built.heldout] == [0, 60]
    assert built.heldout[1].mean_over_sources == 2.5


def test_smoothing_keeps_a_constant_and_has_no_start_up_bias():
    assert curves.smoothed([2.0] * 9) == pytest.approx(2.0)
    assert curves.smoothed([4.0, 0.0], half_life=1) == pytest.approx([4.0, 4 / 3])


def test_settings_show_only_what_differs(record):
    changed = checks.flat(record.config)
    assert changed["allocation.batch_size"] == 16
    shown = checks.settings(record)
    head = shown.split("<details>")[0]
    assert "allocation.batch_size" in head
    assert "allocation.num_epochs" not in head


def test_texts_share_their_room():
    fitted = feature_map._fitted
    assert fitted("p" * 9, "a" * 9, 20) == ("p" * 9, "a" * 9)
    assert fitted("p" * 99, "a" * 4, 20) == ("p" * 15 + "…", "a" * 4)
    assert fitted("p" * 4, "a" * 99, 20) == ("p" * 4, "a" * 15 + "…")
    assert fitted("p" * 99, "a" * 99, 20) == ("p" * 9 + "…", "a" * 9 + "…")


def test_numbers_for_people():
    assert style.seconds(3.21) == "3.2 s"
    assert style.seconds(75.2) == "1 min 15 s"
    assert style.seconds(7260) == "2 h 1 min"
    assert style.change(-0.034) == "−3.4 %"
    assert style.plural(1, "worker") == "1 worker"
    assert style.shorten("abcdef", 4) == "abc…"
