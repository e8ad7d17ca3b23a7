"""The feature pass over two processes with two devices each, against one with four."""

import os
import pathlib
import socket
import subprocess
import sys

import feature_cases as cases
import numpy as np
import pytest

from clusterjax import config, features

CHILD = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
from clusterjax import distributed
distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
import numpy as np
import feature_cases as cases
from clusterjax import config, features
from clusterjax import mesh as meshes
corpus = cases.random_corpus(np.random.default_rng(3), 30, 96, longest=40)
mesh = meshes.build(config.MeshConfig(fsdp=2))
perf = config.PerfConfig(feature_buckets=1, feature_block=12)
folder = None if sys.argv[3] == "none" else sys.argv[3] + "/store"
feats = features.compute(cases.tiny_model(num_layers=1), corpus,
                         config.FeaturesConfig(), mesh, perf=perf, directory=folder)
np.savez(f"{sys.argv[4]}/seen-{sys.argv[2]}.npz", values=feats.values,
         norm=feats.norm, ids=feats.example_id)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
def test_every_process_gets_the_features_of_one(tmp_path, stored):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = pathlib.Path(__file__).parent
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(here.parent), str(here)]),
    }
    folder = str(tmp_path) if stored else "none"
    arguments = [sys.executable, "-c", CHILD, str(port)]
    processes = [
        subprocess.Popen([*arguments, str(i), folder, str(tmp_path)], env=environment)
        for i in (0, 1)
    ]
    try:
        assert [process.wait(300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    corpus = cases.random_corpus(np.random.default_rng(3), 30, 96, longest=40)
    expected = features.compute(
        cases.tiny_model(num_layers=1), corpus, config.FeaturesConfig()
    )
    for i in (0, 1):
        seen = np.load(tmp_path / f"seen-{i}.npz")
        assert seen["ids"].tolist() == list(range(30))
        raw = seen["values"] * seen["norm"][:, None]
        cases.assert_same_features(raw, features.raw(expected))
    if stored:
        # Each process wrote the rows of its own devices: two files for each block.
        assert len(list(tmp_path.rglob("*.features"))) == 6
