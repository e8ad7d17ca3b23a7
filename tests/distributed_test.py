"""Putting arrays on a mesh: what may be donated afterwards, and what may not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from clusterjax import distributed


@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 1, 1), (4, 2, 1)])
@pytest.mark.parametrize("split", [(), ("fsdp",)])
def test_donating_a_copy_leaves_the_callers_arrays(make_mesh, shape, split):
    """`device_put` alone keeps the caller's buffer as one replica, and it would go."""
    mesh = make_mesh(*shape)
    own = {"w": jnp.arange(32.0).reshape(2, 16)}
    placed = distributed.place(
        own, NamedSharding(mesh, PartitionSpec(*split)), copy=True
    )
    pointer = own["w"].unsafe_buffer_pointer()
    for shard in placed["w"].addressable_shards:
        assert shard.data.unsafe_buffer_pointer() != pointer
    after = jax.jit(lambda w: w + 1, donate_argnums=0)(placed["w"])
    want = np.arange(32.0).reshape(2, 16)
    np.testing.assert_array_equal(after, want + 1)
    assert not own["w"].is_deleted()
    np.testing.assert_array_equal(own["w"], want)
