"""The peers of `bench attribution`: projected per-example gradients by TRAK and dattri.

Reads JSON lines: first the examples and settings, then what to run, and null to end;
answers each with a JSON line. Needs torch, transformers, traker and dattri, and nothing
of clusterjax.

All peers see the same gradients: those of the mean loss over the label tokens of a
transformers model, by `torch.func`, with respect to every parameter. `gradients` stops
there, which is the floor for whoever projects them afterwards.
"""

import importlib.metadata
import json
import pathlib
import sys
import tempfile
import time

import numpy as np
import torch
import transformers


def main() -> None:
    """Serves passes until told to end."""
    first = json.loads(sys.stdin.readline())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.float32
    ).eval()
    batches = _batches(first["examples"], first["batch"])
    count, width = len(first["examples"]), first["dim"]
    folder = tempfile.TemporaryDirectory()
    peers = {
        "gradients": Gradients(model, batches),
        "trak": Trak(model, batches, count, width, folder.name),
        "dattri": Dattri(model, batches, width),
    }
    names = ("torch", "transformers", "traker", "dattri")
    versions = {name: importlib.metadata.version(name) for name in names}
    _answer({"versions": versions, "threads": torch.get_num_threads()})
    for line in sys.stdin:
        order = json.loads(line)
        if order is None:
            return
        wall, cpu = time.perf_counter(), time.process_time()
        found = peers[order["run"]].run()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if order.get("save"):
            np.save(order["save"], found)
        _answer({"wall": wall, "processor": cpu})


def _batches(examples, size):
    """Token ids and labels [B, T] of examples in file order, padded on the right.

    Attention is causal, so padding after an example changes nothing in it.
    """
    made = []
    for begin in range(0, len(examples), size):
        part = examples[begin : begin + size]
        made.append(
            tuple(
                torch.nn.utils.rnn.pad_sequence(
                    [torch.tensor(example[i]) for example in part],
                    batch_first=True,
                    padding_value=fill,
                )
                for i, fill in ((0, 0), (1, -100))
            )
        )
    return made


def mean_loss(model, weights, ids, labels):
    """Mean −log p over the labels of one example."""
    logits = torch.func.functional_call(
        model, weights, (ids[None],), {"use_cache": False}
    ).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100)


class Gradients:
    """`torch.func.vmap(grad)` over every parameter, nothing after."""

    def __init__(self, model, batches):
        self._batches = batches
        self._weights = {n: p.detach() for n, p in model.named_parameters()}
        self._gradient = torch.func.vmap(
            torch.func.grad(
                lambda weights, ids, labels: mean_loss(model, weights, ids, labels)
            ),
            in_dims=(None, 0, 0),
        )

    def run(self):
        rows = []
        for batch in self._batches:
            found = self._gradient(self._weights, *batch)
            # Norms, so that the gradients of one batch at a time are held.
            rows.append(sum(g.flatten(1).square().sum(1) for g in found.values()))
        return torch.cat(rows).sqrt().numpy()


class Trak:
    """`TRAKer.featurize` on a processor: its BasicProjector."""

    def __init__(self, model, batches, count, width, folder):
        import trak

        class Loss(trak.modelout_functions.AbstractModelOutput):
            """The output function is the loss itself, so its own weight is one."""

            def __init__(self):
                super().__init__()

            @staticmethod
            def get_output(model, weights, buffers, ids, labels):
                return mean_loss(model, weights, ids, labels)

            def get_out_to_loss_grad(self, model, weights, buffers, batch):
                return torch.ones(len(batch[0]), 1)

        self._model, self._batches = model, batches
        self._traker = trak.TRAKer(
            model=model,
            task=Loss(),
            train_set_size=count,
            save_dir=pathlib.Path(folder) / "trak",
            device="cpu",
            proj_dim=width,
            use_half_precision=False,
            logging_level=40,
        )
        self._turn = 0

    def run(self):
        # Features are made once for each checkpoint, so every turn is a new one.
        self._traker.load_checkpoint(self._model.state_dict(), model_id=self._turn)
        for batch in self._batches:
            self._traker.featurize(batch=batch, num_samples=len(batch[0]))
        self._traker._last_ind = 0
        self._turn += 1
        return np.array(self._traker.saver.current_store["grads"])


class Dattri:
    """Gradients of an `AttributionTask` through `random_project`, as its TRAK does."""

    def __init__(self, model, batches, width):
        from dattri.func import projection
        from dattri.task import AttributionTask

        def loss(params, data):
            return mean_loss(model, params, *data)

        self._task = AttributionTask(loss, model, model.state_dict())
        self._params, _ = self._task.get_param(0)
        self._gradient = self._task.get_grad_loss_func(in_dims=(None, (0, 0)))
        self._batches, self._width = batches, width
        self._project = {}
        self._random_project = projection.random_project

    def run(self):
        rows = []
        for batch in self._batches:
            gradient = self._gradient(self._params, batch)
            size = len(gradient)
            if size not in self._project:
                self._project[size] = self._random_project(
                    gradient, size, self._width, 32, device="cpu"
                )
            rows.append(self._project[size](gradient).detach())
        return torch.cat(rows).numpy()


def _answer(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
