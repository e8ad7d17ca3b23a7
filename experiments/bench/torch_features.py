"""The peers of `bench features`: gradient features the plain PyTorch way.

Reads JSON lines: first the examples, then what to run, and null to end; answers each
with a JSON line. Needs torch and transformers, and nothing of clusterjax.
"""

import json
import sys
import time

import torch
import transformers


def main() -> None:
    """Serves feature passes until told to end."""
    first = json.loads(sys.stdin.readline())
    examples = [(torch.tensor(i), torch.tensor(l)) for i, l in first["examples"]]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.float32
    ).eval()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    _answer(f"{versions}, {torch.get_num_threads()} threads, sdpa")
    for line in sys.stdin:
        order = json.loads(line)
        if order is None:
            return
        begin, processor = time.perf_counter(), time.process_time()
        if order["run"] == "proxy":
            found = proxy(model, examples, order["batch"])
        else:
            found = sketches(model, examples[: order["count"]], order["k"])
        _answer(
            {
                "seconds": time.perf_counter() - begin,
                "processor": time.process_time() - processor,
                "norm": found.tolist(),
            }
        )


@torch.no_grad()
def proxy(model, examples, batch_size):
    """(p_y − 1) h averaged over labels: full logits, right-padded, in file order."""
    norms = []
    for begin in range(0, len(examples), batch_size):
        part = examples[begin : begin + batch_size]
        ids, labels = (
            torch.nn.utils.rnn.pad_sequence(
                [example[i] for example in part], True, padding_value=fill
            )
            for i, fill in ((0, 0), (1, -100))
        )
        lengths = torch.tensor([len(i) for i, _ in part])
        mask = torch.arange(ids.shape[1])[None] < lengths[:, None]
        out = model(
            input_ids=ids,
            attention_mask=mask.long(),
            output_hidden_states=True,
            use_cache=False,
        )
        hidden = out.hidden_states[-1][:, :-1]
        chance = torch.softmax(out.logits[:, :-1].float(), dim=-1)
        target = labels[:, 1:]
        used = (target != -100).float()
        picked = chance.gather(-1, target.clamp(min=0)[..., None])[..., 0]
        weight = (picked - 1) * used / used.sum(1, keepdim=True)
        feature = torch.einsum("bt,bth->bh", weight, hidden)
        norms.append(feature.norm(dim=1))
    return torch.cat(norms)


def sketches(model, examples, k):
    """Kronecker-projected per-example gradients by `torch.func`, one row at a time."""
    names = [n for n, p in model.named_parameters() if n.endswith("proj.weight")]
    weights = {n: p.detach() for n, p in model.named_parameters()}
    chosen = {n: weights.pop(n) for n in names}
    random = torch.Generator().manual_seed(0)

    def signs(rows):
        return torch.randint(0, 2, (rows, k), generator=random) * 2.0 - 1.0

    sides = {n: [signs(size) for size in w.shape] for n, w in chosen.items()}

    def loss(chosen, ids, labels):
        logits = torch.func.functional_call(
            model, {**weights, **chosen}, (ids[None],), {"use_cache": False}
        ).logits
        return torch.nn.functional.cross_entropy(logits[0, :-1].float(), labels[1:])

    gradient = torch.func.grad(loss)
    norms = []
    for ids, labels in examples:
        grads = gradient(chosen, ids, labels)
        parts = [
            (out_side.T @ grads[n] @ in_side).flatten() / k
            for n, (out_side, in_side) in sides.items()
        ]
        norms.append(torch.cat(parts).norm())
    return torch.stack(norms)


def _answer(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
