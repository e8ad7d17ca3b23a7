"""Mesh shapes, placement rules, and errors that name the key."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from clusterjax import config, errors
from clusterjax import mesh as mesh_lib


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ((-1, 1, 1), 8, (8, 1, 1)),
        ((-1, 2, 2), 8, (2, 2, 2)),
        ((2, -1, 1), 8, (2, 4, 1)),
        ((1, 1, 1), 1, (1, 1, 1)),
    ],
)
def test_resolves_what_is_left(sizes, count, expected):
    cfg = config.MeshConfig(*sizes)
    assert mesh_lib.resolve_shape(cfg, count) == expected


@pytest.mark.parametrize(
    "sizes", [(3, 1, 1), (-1, 3, 1), (-1, -1, 1), (0, 1, 1), (4, 4, 1)]
)
def test_impossible_shapes_name_the_key(sizes):
    with pytest.raises(errors.ConfigError, match=r"mesh\.data="):
        mesh_lib.resolve_shape(config.MeshConfig(*sizes), 8)


def test_builds_on_the_simulated_devices_asked_for():
    mesh = mesh_lib.build(config.MeshConfig(num_simulated_devices=4, fsdp=2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 1}
    assert mesh_lib.num_shards(mesh) == 4
    assert mesh_lib.local_shards(mesh) == (0, 1, 2, 3)


def test_simulate_after_the_start_stops():
    jax.devices()
    mesh_lib.simulate(8)  # what runs already is fine
    with pytest.raises(errors.ConfigError, match="num_simulated_devices=9"):
        mesh_lib.simulate(9)


def test_rows_lie_in_shard_order(make_mesh):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    x = jax.device_put(np.arange(8), mesh_lib.rows(mesh))
    for r, devices in enumerate(mesh.devices.reshape(4, 2)):
        for device in devices:
            piece = next(s for s in x.addressable_shards if s.device == device)
            np.testing.assert_array_equal(np.asarray(piece.data), [2 * r, 2 * r + 1])


def test_rules_split_by_dimension_names(make_mesh):
    mesh = make_mesh(fsdp=2, tensor=4)
    dimensions = {
        "q": ("layer", "embed", "heads"),
        "o": ("layer", "heads", "embed"),
        "embedding": ("vocab", "embed"),
        "norm": ("layer", "norm"),
    }
    shapes = {
        "q": (3, 64, 32),
        "o": (3, 32, 64),
        "embedding": (1000, 64),
        "norm": (3, 64),
    }
    found = mesh_lib.parameter_shardings(dimensions, shapes, mesh)
    assert {name: s.spec for name, s in found.items()} == {
        "q": PartitionSpec(None, "fsdp", "tensor"),
        "o": PartitionSpec(None, "tensor", "fsdp"),
        "embedding": PartitionSpec("tensor", "fsdp"),
        "norm": PartitionSpec(None, None),
    }


def test_parameter_that_does_not_divide_stops_or_is_logged(make_mesh, capsys):
    """CASES 29: never replicated in silence."""
    mesh = make_mesh(fsdp=8)
    dimensions = {"wide": ("vocab", "embed"), "small": ("vocab", "embed")}
    shapes = {"wide": (1000, 36), "small": (2, 36)}
    with pytest.raises(errors.ConfigError, match=r"wide \[1000, 36\] over fsdp"):
        mesh_lib.parameter_shardings(dimensions, shapes, mesh)
    found = mesh_lib.parameter_shardings(dimensions, shapes, mesh, True)
    assert found["wide"].spec == PartitionSpec(None, None)
    said = capsys.readouterr().out
    assert "wide [1000, 36] over fsdp" in said
    assert "small" not in said


def test_tensor_axis_never_cuts_a_head(make_mesh):
    mesh = make_mesh(tensor=4)
    mesh_lib.check_heads(8, 4, mesh)
    with pytest.raises(errors.ConfigError, match=r"mesh\.tensor=4.*3 key-value"):
        mesh_lib.check_heads(9, 3, mesh)
