"""When a run is as good as training on everything, by hand."""

import pytest

from experiments import comparison, reaching


def row(method, losses, *, every=10, seed=0, stages=None):
    points = [
        {"step": every * i, "seconds": 0.0, "label_tokens": 1, "loss": loss}
        for i, loss in enumerate(losses)
    ]
    return comparison.Row(
        method=method,
        seed=seed,
        budget=None,
        command="",
        folder="",
        kept=1,
        examples=2,
        kept_labels=1,
        steps=points[-1]["step"],
        stages=stages or {"train": 100.0},
        fingerprints={},
        heldout=points,
    )


@pytest.mark.parametrize(
    "losses, target, step",
    [
        # Half of the way from 3 to 2 between the steps 10 and 20.
        ([4.0, 3.0, 2.0], 2.5, 15.0),
        ([4.0, 3.0, 2.0], 3.0, 10.0),
        ([4.0, 3.0, 2.0], 5.0, 0.0),
        # It counts when it was there first, also if it rises again.
        ([4.0, 2.0, 3.0], 2.0, 10.0),
        ([4.0, 3.0, 2.0], 1.9, None),
    ],
)
def test_crossing(losses, target, step):
    assert reaching.crossing(row("any", losses).heldout, target) == step


def test_time_counts_selection_and_the_part_of_training():
    full = row("full", [4.0, 3.0, 2.5, 2.2, 2.0], stages={"train": 200.0})
    # The target 2.02 lies 0.98 of the way from 3 to 2, at step 19.8 of 20.
    stages = {"data": 7.0, "features": 25.0, "cluster": 3.0, "select": 2.0}
    quick = row("quick", [4.0, 3.0, 2.0], stages={**stages, "train": 80.0})
    found = reaching.reached(quick, full)
    assert found.step == pytest.approx(19.8)
    assert found.steps == pytest.approx(19.8 / 40)
    assert found.time == pytest.approx((80 * 19.8 / 20 + 30) / 200)
    assert found.reused == pytest.approx((80 * 19.8 / 20 + 10) / 200)


def test_the_table_tells_how_many_seeds_reach_it():
    rows = [row("full", [4.0, 2.0], seed=seed) for seed in (0, 1)]
    rows += [row("half", [4.0, 2.0 + 0.1 * seed], seed=seed) for seed in (0, 1)]
    rows += [row("unpaired", [4.0, 2.0], seed=5)]
    texts = {r[0]: r[1:] for r in reaching.table(comparison.Comparison(rows))}
    assert list(texts) == ["full", "half"]
    assert texts["half"][0] == "1 of 2"
    assert texts["half"][1].startswith("1.025 ± ")
    # One seed: 0.99 of the way.
    assert texts["half"][2:] == ("10", "0.99", "0.99", "0.99")
    assert texts["full"][0] == "2 of 2"
