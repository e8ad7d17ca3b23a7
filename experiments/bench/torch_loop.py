"""The peer of `bench training`: a plain transformers + PyTorch loop, told by lines.

Reads JSON lines: first the batches and the learning rate, then the number of the batch
to train on, and null to end. Answers each with a JSON line. Needs torch and
transformers, and nothing of clusterjax.
"""

import json
import sys
import time

import torch
import transformers


def main() -> None:
    """Serves training steps until told to end."""
    first = json.loads(sys.stdin.readline())
    batches = [
        {name: torch.tensor(value) for name, value in batch.items()}
        for batch in first["batches"]
    ]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.float32
    )
    model.train()
    tx = torch.optim.AdamW(model.parameters(), lr=first["rate"], weight_decay=0.0)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    _answer(f"{versions}, {torch.get_num_threads()} threads, sdpa, AdamW")
    for line in sys.stdin:
        index = json.loads(line)
        if index is None:
            return
        begin, worked = time.perf_counter(), time.process_time()
        batch = batches[index]
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            use_cache=False,
        ).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), batch["next_token"].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        tx.step()
        tx.zero_grad()
        _answer((time.perf_counter() - begin, time.process_time() - worked))


def _answer(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
