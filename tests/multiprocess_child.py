"""One of several processes of a little training run; started by multiprocess_test."""

import json
import pathlib
import sys

import jax


def main(
    port: int, count: int, process: int, folder: str, seed: int, epochs: int
) -> None:
    """Trains on two devices of its own and writes what it saw."""
    jax.config.update("jax_num_cpu_devices", 2)
    from clusterjax import distributed

    distributed.initialize(f"127.0.0.1:{port}", count, process)
    import numpy as np
    import training_cases

    from clusterjax import config, train
    from clusterjax import input as input_lib
    from clusterjax import mesh as mesh_lib

    shapes = []
    put = input_lib.put

    def recording_put(batch, mesh, shards):
        shapes.append([shards, batch.inputs.shape])
        return put(batch, mesh, shards)

    input_lib.put = recording_put
    corpus = training_cases.corpus(seed=seed)
    mesh = mesh_lib.build(config.MeshConfig(fsdp=2))
    with distributed.ending_together():
        result = train.fit(
            training_cases.model(),
            corpus,
            training_cases.schedule(corpus, num_epochs=epochs),
            config.TrainConfig(
                optimizer=config.OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
                log_every=1,
                checkpoint_every=2 if epochs < 10 else 0,
                statistics_every=3 if epochs < 10 else 0,
            ),
            mesh,
            folder,
            eval_corpus=training_cases.corpus(6, seed=5),
            perf=config.PerfConfig(vocab_chunk=25),
        )
    total = sum(
        float(np.abs(distributed.gather(x)).sum()) for x in result.state.params.values()
    )
    seen = {"rows": shapes, "sum": total, "resumed_from": result.resumed_from}
    pathlib.Path(folder, f"seen-{process}.json").write_text(json.dumps(seen))
    print(f"process {process} done", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4], *map(int, sys.argv[5:7]))
