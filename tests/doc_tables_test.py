"""Tables in the documentation equal saved results; published results travel."""

import dataclasses
import json

import pytest

from clusterjax import errors
from experiments import comparison, doc_tables, published, result_tables
from experiments.bench import record


def _row(method, seed, loss, **changes):
    points = [
        {"step": 0, "seconds": 4.0, "label_tokens": 0, "loss": 3.0},
        {"step": 8, "seconds": 44.0, "label_tokens": 800, "loss": loss},
    ]
    sources = {"a": loss - 0.5, "b": loss + 1.123456789}
    row = comparison.Row(
        method=method,
        seed=seed,
        budget=None,
        command=(
            "-m experiments.run --config=/home/me/tree/configs/quickstart.py"
            f" --workdir=/home/me/runs/big/{method}-s{seed} --config.seed={seed}"
            " --config.data.cache_dir=/home/me/runs/big/shared/corpora"
        ),
        folder=f"/home/me/runs/big/{method}-s{seed}",
        kept=100,
        examples=300,
        kept_labels=1000,
        steps=8,
        stages={"data": 4.0, "train": 40.0},
        fingerprints={"data": "d"},
        heldout=[{**p, "sources": sources, "groups": {"g": 1.0}} for p in points],
    )
    return dataclasses.replace(row, **changes)


@pytest.fixture
def result():
    rows = [_row("full", 0, 2.0), _row("random", 0, 2.25), _row("full", 1, 2.1)]
    return comparison.Comparison([*rows, _row("random", 1, 2.375)])


@pytest.fixture
def folder(result, tmp_path):
    """A page that shows saved results as they are."""
    value = published.value_of(result, "big", "python -m experiments.compare", tmp_path)
    out = tmp_path / "docs" / "results" / "big"
    out.mkdir(parents=True)
    (out / "results.json").write_text(published.text_of(value))
    page = (
        "# Page\n\n"
        "<!-- table: results/big/results.json main -->\n<!-- end -->\n\n"
        "Random reaches <!-- value: results/big/results.json main random"
        ' "held-out loss (nats)" --><!-- end --> nats.\n\n'
        "```\n<!-- table: nowhere.json main -->\n<!-- end -->\n```\n"
    )
    (tmp_path / "docs" / "page.md").write_text(page)
    (tmp_path / "README.md").write_text("no tables\n")
    assert doc_tables.write(tmp_path / "docs" / "page.md") == []
    return tmp_path


def test_the_documentation_equals_the_saved_results():
    problems = [p for path in doc_tables.documents() for p in doc_tables.check(path)]
    problems += doc_tables.stale_figures()
    assert not problems, "\n".join(map(str, problems))


def test_saved_results_hold_no_path_of_a_machine():
    paths = (doc_tables.ROOT / "docs" / "results").rglob("*.json")
    for path in paths:
        published.check_portable(json.loads(path.read_text(encoding="utf-8")))


def test_written_pages_pass_and_changed_numbers_do_not(folder):
    page = folder / "docs" / "page.md"
    text = page.read_text()
    assert doc_tables.check(page) == []
    assert "| random | 100 (33.3 %) | 1,000 | 8 | 2.3125 ± 0.7941 | +0.2625 ±" in text
    assert "Random reaches <!--" in text and "-->2.3125 ± 0.7941<!-- end -->" in text
    assert "<!-- table: nowhere.json main -->\n<!-- end -->" in text  # an example
    page.write_text(text.replace("2.3125", "2.2125"))
    table, value = doc_tables.check(page)
    assert (table.line, value.line) == (3, 10)
    assert "-| random | 100 (33.3 %) | 1,000 | 8 | 2.2125" in str(table)
    assert "+| random | 100 (33.3 %) | 1,000 | 8 | 2.3125" in str(table)
    assert doc_tables.main([str(page)]) == 1
    assert doc_tables.main(["--write", str(page)]) == 0
    assert page.read_text() == text


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("table: results/none/results.json main", "no saved result"),
        ("table: results/big/results.json best", "no part 'best'"),
        ("table: results/big/results.json main methods=paper", "no row 'paper'"),
        ("table: results/big/results.json main columns=speed", "no column 'speed'"),
        ("table: results/big/results.json mechanism", "did not measure"),
        ("table: results/big/results.json main sort=loss", "expected methods="),
        ("value: results/big/results.json main random", "expected PATH PART METHOD"),
    ],
)
def test_impossible_orders_are_told_with_their_line(folder, order, said):
    page = folder / "docs" / "page.md"
    page.write_text(f"\n\n<!-- {order} -->\nold\n<!-- end -->\n")
    [problem] = doc_tables.check(page)
    assert problem.line == 3 and said in problem.text
    [problem] = doc_tables.write(page)
    assert said in problem.text and "old" in page.read_text()


def test_a_block_without_end_is_told(folder):
    page = folder / "docs" / "page.md"
    page.write_text("<!-- table: results/big/results.json main -->\ntext\n")
    [problem] = doc_tables.check(page)
    assert "no <!-- end -->" in problem.text and page.read_text().endswith("text\n")


def test_rows_and_columns_can_be_chosen(folder):
    path = folder / "docs" / "results" / "big" / "results.json"
    text = result_tables.render(
        path, "main", methods=["random"], columns=["total (s)", "kept"]
    )
    assert text.splitlines() == [
        "| method | total (s) | kept |",
        "|---|---:|---:|",
        "| random | 44 ± 0 | 100 (33.3 %) |",
    ]
    assert "experiments.compare` on " in result_tables.render(path, "made")


def test_differences_to_other_methods_carry_their_names(folder):
    path = folder / "docs" / "results" / "big" / "results.json"
    text = result_tables.render(
        path, "main", columns=["− random", "− full"], against=["random", "full"]
    )
    # Names and references change places together.
    plain = result_tables.render(path, "main", columns=["− random", "− full"])
    assert text == plain
    reach = result_tables.render(path, "reach", against=["random"])
    assert "| last loss / random |" in reach.splitlines()[0]
    with pytest.raises(errors.UserError, match="no method 'best'; there are full,"):
        result_tables.render(path, "main", against=["best"])


def test_published_results_are_small_and_portable(folder, result):
    path = folder / "docs" / "results" / "big" / "results.json"
    text = path.read_text()
    assert "/home" not in text and "groups" not in text
    read = published.read_comparison(path)
    assert [row.loss for row in read.rows] == [row.loss for row in result.rows]
    assert read.rows[0].folder == "runs/big/full-s0"
    assert read.rows[0].heldout[-1]["sources"]["b"] == 3.12346  # six digits
    assert comparison.markdown(read) == comparison.markdown(result)
    command = read.rows[0].command
    assert "--config=configs/quickstart.py --workdir=runs/big/full-s0" in command
    odd = dataclasses.replace(result.rows[0], command="run --config=/etc/my/base.py")
    with pytest.raises(errors.UserError, match="'/etc/my/base.py', a path of this"):
        published.value_of(comparison.Comparison([odd]), "x", "python", folder)


def test_a_fraction_is_no_path():
    published.check_portable({"a": ["loss/tokens", "https://host/a/b", "a/b/c", "/"]})


def test_figures_of_other_results_are_told(folder):
    results = folder / "docs" / "results" / "big" / "results.json"
    figure = results.with_name("time.svg")
    figure.write_text(f"<svg>{published.mark(results)}</svg>")
    assert doc_tables.stale_figures(folder) == []
    results.write_text(results.read_text() + "\n")
    [problem] = doc_tables.stale_figures(folder)
    assert problem.path == figure
    assert "--results docs/results/big/results.json" in problem.text


def test_records_of_benchmarks(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench", "--rows", "5", "--out=/a/b/c.json"])
    table = record.Table(
        "speed",
        ("method", "seconds", "inertia", "count"),
        [("ours", 1.23456789, 0.98765432, 75_000), ("peer", 12.0, -0.5, None)],
        digits=(None, 2),
    )
    record.write(
        tmp_path / "x.json", "clustering", [table], details={"seconds": [1.0, 2.0]}
    )
    assert result_tables.render(tmp_path / "x.json", "speed").splitlines() == [
        "| method | seconds | inertia | count |",
        "|---|---:|---:|---:|",
        "| ours | 1.23 | 0.988 | 75,000 |",
        "| peer | 12.00 | −0.500 | – |",
    ]
    made = result_tables.render(tmp_path / "x.json", "made")
    assert "experiments.bench clustering --rows 5 --out=c.json` on " in made
    with pytest.raises(errors.UserError, match="there are speed, made"):
        result_tables.render(tmp_path / "x.json", "sped")
    read = json.loads((tmp_path / "x.json").read_text())
    assert read["details"] == {"seconds": [1.0, 2.0]} and read["versions"]["jax"]
