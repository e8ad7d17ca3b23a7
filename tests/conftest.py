"""Eight virtual CPU devices for every test; broadcasting by rank is an error."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "PYTEST_XDIST_WORKER" not in os.environ:
    # One folder for what tests and their processes leave, also those that are killed;
    # it goes when the process that made it ends. Only pytest's own folders stay.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="clusterjax-tests-")
    tempfile.tempdir = None
    atexit.register(shutil.rmtree, os.environ["TMPDIR"], ignore_errors=True)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Workers and processes compile the same programs: once is enough.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{os.environ['TMPDIR']}/programs"
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from clusterjax import mesh as mesh_lib

mesh_lib.be_patient()

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Starts the backend: a test that simulates four devices must not leave only four.
assert len(jax.devices()) == 8


@pytest.fixture
def make_mesh():
    """`make_mesh(data=2, fsdp=1, tensor=1)` → a mesh on the first virtual devices."""

    def build(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
        count = data * fsdp * tensor
        devices = np.array(jax.devices()[:count]).reshape(data, fsdp, tensor)
        return Mesh(
            devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3
        )

    return build


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
