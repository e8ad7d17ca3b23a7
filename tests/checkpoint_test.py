"""Whole checkpoints are used, broken ones are named; any mesh may read them."""

import json
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from clusterjax import checkpoint, datatypes, errors


def _state(mesh, step, *axes):
    place = NamedSharding(mesh, PartitionSpec(*axes))
    whole = NamedSharding(mesh, PartitionSpec())
    value = np.arange(64, dtype=np.float32).reshape(16, 4) * (step + 1)
    return datatypes.TrainState(
        jax.device_put(jnp.int32(step), whole),
        {"w": jax.device_put(value, place)},
        (jax.device_put(value.astype(jnp.bfloat16), place),),
    )


def _abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def _saved(folder, mesh, steps, **settings):
    store = checkpoint.Store(folder, **settings)
    for step in steps:
        store.save(_state(mesh, step), {"plan": "p", "value": step / 3})
        store.wait()
    return store


def test_restores_on_another_mesh(make_mesh, tmp_path):
    store = checkpoint.Store(tmp_path)
    store.save(_state(make_mesh(8), 3, "data"), {"plan": "p"})
    store.wait()
    wanted = _state(make_mesh(1, 2, 2), 0, "fsdp", "tensor")
    state, record = store.restore(_abstract(wanted), {"plan": "p"})
    expected = _state(make_mesh(1), 3)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert state.params["w"].sharding == wanted.params["w"].sharding
    assert record["step"] == 3
    store.close()


def test_parameters_alone_without_knowing_the_mesh(make_mesh, tmp_path):
    _saved(tmp_path, make_mesh(2, 2), (3,)).close()
    found = checkpoint.read_params(tmp_path, 3)
    np.testing.assert_array_equal(found["w"], _state(make_mesh(1), 3).params["w"])
    with pytest.raises(errors.CheckpointError, match="no checkpoint of step 2"):
        checkpoint.read_params(tmp_path, 2)


def test_keeps_the_newest_and_the_best(make_mesh, tmp_path):
    mesh = make_mesh(1)
    store = checkpoint.Store(tmp_path, keep=2, keep_best=True)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 2.5), (6, None)):
        store.save(_state(mesh, step), {}, loss)
        store.wait()
    assert store.steps() == [2, 5, 6]
    store.close()


def test_nothing_saved_gives_none(make_mesh, tmp_path):
    store = checkpoint.Store(tmp_path)
    assert store.restore(_abstract(_state(make_mesh(1), 0)), {}) is None
    store.close()


@pytest.mark.parametrize("fault", ["emptied", "flipped", "removed", "no record"])
def test_damaged_checkpoint_is_named_and_passed_over(
    make_mesh, tmp_path, capsys, fault
):
    """CASES 30."""
    mesh = make_mesh(2)
    _saved(tmp_path, mesh, (1, 2)).close()
    for path in [p for p in (tmp_path / "2" / "state").rglob("*") if p.is_file()]:
        content = path.read_bytes()
        if fault == "emptied":
            path.write_bytes(b"")
        elif fault == "removed":
            path.unlink()
        elif fault == "flipped" and "/d/" in str(path):
            middle = len(content) // 2
            flipped = bytes([content[middle] ^ 0xFF])
            path.write_bytes(content[:middle] + flipped + content[middle + 1 :])
    if fault == "no record":
        for path in (tmp_path / "2" / "record").rglob("*"):
            path.unlink()
    store = checkpoint.Store(tmp_path)
    state, record = store.restore(_abstract(_state(mesh, 0)), {"plan": "p"})
    assert int(state.step) == 1 and record["value"] == 1 / 3
    said = capsys.readouterr().out
    assert f"{tmp_path / '2'} is damaged" in said and "passed over" in said
    assert store.steps() == [1]
    # The same step can be saved again.
    store.save(_state(mesh, 2), {"plan": "p"})
    store.wait()
    assert store.steps() == [1, 2]
    store.close()


def test_wrong_numbers_are_found_by_their_sums(make_mesh, tmp_path, capsys):
    """A file that reads well but holds other numbers than were saved."""
    mesh = make_mesh(1)
    _saved(tmp_path, mesh, (4,)).close()
    files = [p for p in (tmp_path / "4" / "record").iterdir() if p.is_file()]
    (written,) = [p for p in files if b"checksums" in p.read_bytes()]
    record = json.loads(written.read_text())
    record["checksums"][1] += 1
    written.write_text(json.dumps(record))
    store = checkpoint.Store(tmp_path)
    assert store.restore(_abstract(_state(mesh, 0)), {}) is None
    assert "not those that were saved" in capsys.readouterr().out
    store.close()


def test_unfinished_checkpoint_is_named(make_mesh, tmp_path, capsys):
    _saved(tmp_path, make_mesh(1), (1,)).close()
    broken = tmp_path / "2.orbax-checkpoint-tmp-77"
    broken.mkdir()
    (broken / "state").write_bytes(b"half")
    store = checkpoint.Store(tmp_path)
    assert f"{broken} was not finished; passed over" in capsys.readouterr().out
    assert store.steps() == [1]
    store.close()


def test_another_plan_is_refused(make_mesh, tmp_path):
    store = _saved(tmp_path, make_mesh(1), (1,))
    with pytest.raises(errors.CheckpointError, match="plan='p', but this run has 'q'"):
        store.restore(_abstract(_state(make_mesh(1), 0)), {"plan": "q"})
    store.close()


def test_full_disk_is_explained_and_leaves_the_last_whole_one(make_mesh, tmp_path):
    """The kernel refuses to make files longer than 2 kB, as a full disk would."""
    mesh = make_mesh(1)
    store = _saved(tmp_path, mesh, (1,))
    large = _state(mesh, 2)._replace(
        params={"w": jax.random.normal(jax.random.key(0), (64, 64))}
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        with pytest.raises(errors.CheckpointError, match="could not be written"):
            store.save(large, {"plan": "p"})
            store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store = checkpoint.Store(tmp_path)
    state, _ = store.restore(_abstract(_state(mesh, 0)), {"plan": "p"})
    assert int(state.step) == 1
    store.close()
