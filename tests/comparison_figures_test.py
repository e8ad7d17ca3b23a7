"""Figures of a comparison: what is drawn is what the rows say."""

import dataclasses

import doc_tables_test
import numpy as np
import pytest

from clusterjax import errors
from experiments import comparison, published

pytest.importorskip("matplotlib", reason="figures need the extra `plot`")

from experiments import figures
from experiments.figures import costs, curves, effects, intervals, mechanism, style


def _rows():
    made = []
    for seed, noise in enumerate((0.0, 0.02, 0.07)):
        for method, loss in (("full", 2.0), ("random", 2.3), ("paper <&>", 2.2)):
            row = doc_tables_test._row(method, seed, loss + noise)
            measured = {
                "noise": 0.8 + noise,
                "mean_error": 0.2,
                "mean_error_random": 0.4,
            }
            later = {**measured, "cosine": 0.9, "renewed": {"noise": 0.7}}
            found = {} if method == "full" else {"0": measured, "8": later}
            made.append(dataclasses.replace(row, mechanism=found))
    return made


@pytest.fixture
def result():
    return comparison.Comparison(_rows())


def test_every_figure_is_written_and_names_its_results(result, tmp_path):
    value = published.value_of(result, "big", "python", tmp_path)
    path = tmp_path / "results.json"
    path.write_text(published.text_of(value))
    written = figures.write_all(path, tmp_path / "out", png=True)
    names = {p.name for p in written if p.suffix == ".svg"}
    assert names == {
        f"{name}.svg"
        for name in ("methods", "time", "tokens", "sources", "mechanism", "training")
    }
    assert {p.stem for p in written if p.suffix == ".png"} == {p[:-4] for p in names}
    before = {p: p.read_bytes() for p in written if p.suffix == ".svg"}
    assert all(published.mark(path).encode() in b for b in before.values())
    figures.write_all(path, tmp_path / "out")
    assert before == {p: p.read_bytes() for p in before}  # the same bytes again
    with pytest.raises(errors.UserError, match="no method 'best' for a line"):
        figures.write_all(path, tmp_path / "out", ["best"])


def test_a_line_ends_at_the_mean_of_its_runs(result):
    """Runs of different length: shares of the way, not steps, are averaged."""
    group = result.groups[0]
    short, *rest = group.rows
    points = [
        {**short.heldout[0], "loss": 4.0},
        {**short.heldout[0], "step": 2, "label_tokens": 100, "loss": 3.0},
        {**short.heldout[1], "step": 4, "label_tokens": 200},
    ]
    rows = (dataclasses.replace(short, heldout=points), *rest)
    x, y = curves.mean_curve(dataclasses.replace(group, rows=rows), costs.LABEL_TOKENS)
    assert x.tolist() == [0, (100 + 400 + 400) / 3, (200 + 800 + 800) / 3]
    halfway = [3.0, (3 + 2.02) / 2, (3 + 2.07) / 2]
    np.testing.assert_allclose(y, [10 / 3, np.mean(halfway), 2.03], rtol=1e-12)


def test_processor_seconds_count_only_where_all_runs_have_them(result):
    rows = list(result.rows)
    assert costs.clock(rows, "auto") is costs.WALL
    counted = [
        dataclasses.replace(
            row,
            processor_stages={"data": 1.0, "features": 2.0, "train": 8.0, "report": 9},
        )
        for row in rows
    ]
    assert costs.clock(counted, "auto") is costs.PROCESSOR
    assert costs.clock(counted, "wall") is costs.WALL
    clock, row = costs.PROCESSOR, counted[0]
    assert (clock.total(row), clock.selection(row)) == (11.0, 2.0)
    assert [clock.at(row, point) for point in row.heldout] == [3.0, 11.0]
    assert clock.at(row, {"step": 2}) == 5.0


def test_differences_are_colored_by_their_interval(result):
    paper = result.groups[2]
    found = intervals.paired(result, paper, lambda row: row.loss)
    assert found is not None and found.mean == pytest.approx(-0.1)
    assert intervals.verdict(found) == style.BETTER
    assert intervals.verdict(dataclasses.replace(found, mean=0.1)) == style.WORSE
    wide = dataclasses.replace(found, half_width=0.2)
    assert intervals.verdict(wide) == style.MUTED
    single = dataclasses.replace(found, half_width=float("nan"))
    assert intervals.verdict(single) == style.MUTED
    random = result.groups[1]
    assert intervals.paired(result, random, lambda row: row.loss) is None


def test_more_methods_than_colors_become_grey():
    rows = [doc_tables_test._row(f"m{i}", 0, 3.0 - 0.1 * i) for i in range(12)]
    rows += [doc_tables_test._row(name, 0, 4.0) for name in ("full", "random")]
    result = comparison.Comparison(rows)
    look = style.Look(result)
    # The references, the first method, and the best of the others.
    assert look.lines == {"full", "random", "m0", "m7", "m8", "m9", "m10", "m11"}
    by_title = {group.title: group for group in result.groups}
    assert look.color(by_title["m3"]) == style.OTHERS
    shown = [look.color(by_title[title]) for title in look.lines]
    assert len(set(shown)) == 8 and style.OTHERS not in shown
    assert style.Look(result, ["m3"]).lines == {"m3"}


def test_what_was_not_measured_is_not_drawn():
    rows = [dataclasses.replace(row, mechanism={}) for row in _rows()]
    for row in rows:
        row.heldout[-1]["sources"] = {"a": 1.0}
    result = comparison.Comparison(rows)
    assert mechanism.start(result) is None
    assert mechanism.during(result, style.Look(result)) is None
    assert effects.sources(result) is None
