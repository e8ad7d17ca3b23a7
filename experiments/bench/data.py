"""Reading data against bare tokenising: throughput, memory, warm start.

python -m experiments.bench data --tokenizer DIR [--examples 20000]
python -m experiments.bench data --tokenizer DIR --examples 1000000 --rounds 1
    --skip_bare

Texts are the pairs of `stdlib_functions`, repeated with a running number so that none
is a duplicate, and cut to about 200 tokens. The peer is `tokenizers.encode_batch` over
the very texts that the corpus tokenises, in the same block size, with nothing around.
Each measurement runs in a process of its own, so that its peak of resident memory is
its own.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import pathlib
import resource
import tempfile
import time
from typing import Any

from clusterjax import config as config_lib
from clusterjax import data
from clusterjax.data import builder, builtin, chat, layouts, sources
from experiments.bench import record

_CHARS = 700  # about 200 tokens of a vocabulary of 49k


def write_input(path: pathlib.Path, count: int) -> None:
    """JSON lines of `count` different instruction/response pairs."""
    with tempfile.TemporaryDirectory() as folder:
        made = builtin.prepare("stdlib_functions", folder)
        records = list(made.as_data_source("train"))  # pyright: ignore[reportCallIssue]
    prompts = [r["instruction"].decode()[: _CHARS // 2] for r in records]
    answers = "\n\n".join(r["response"].decode() for r in records)
    with open(path, "w", encoding="utf8") as file:
        for i, prompt in zip(range(count), itertools.cycle(prompts)):
            room = _CHARS - len(prompt)
            first = i * room % (len(answers) - _CHARS)
            answer = answers[first : first + room].strip()
            row = {"instruction": f"{i}: {prompt}", "response": answer}
            file.write(json.dumps(row) + "\n")


def config_of(path: pathlib.Path, cache: pathlib.Path) -> config_lib.DataConfig:
    return config_lib.DataConfig(
        sources=(config_lib.SourceConfig(path=str(path)),),
        template="chatml",
        cache_dir=str(cache),
    )


def bare(path: pathlib.Path, directory: str) -> dict[str, Any]:
    """Seconds of `encode_batch` alone over the rendered texts, and their tokens."""
    tokenizer = data.tokenizer.Tokenizer.load(directory)
    template = chat.load("chatml", tokenizer)
    cfg = config_of(path, path.parent)
    [source] = sources.open_all(cfg.sources, cfg, "data.sources")
    seconds, cpu, tokens = 0.0, 0.0, 0
    for block, layout in builder.blocks(source, "data.sources[0]"):
        texts = []
        for row in block:
            conversation = builder.convert(layout, source.config, row)
            assert isinstance(conversation, layouts.Conversation)
            texts.append(template.render(conversation).text)
        begin = time.perf_counter(), time.process_time()
        encodings = tokenizer.backend.encode_batch(texts, add_special_tokens=False)
        seconds += time.perf_counter() - begin[0]
        cpu += time.process_time() - begin[1]
        tokens += sum(len(encoding) for encoding in encodings)
    return {"seconds": seconds, "cpu_seconds": cpu, "tokens": tokens}


def whole(path: pathlib.Path, directory: str) -> dict[str, Any]:
    """Seconds of `data.load`, with an empty cache or after an earlier call."""
    tokenizer = data.tokenizer.Tokenizer.load(directory)
    begin, cpu = time.perf_counter(), time.process_time()
    corpus = data.load(config_of(path, path.parent / "cache"), tokenizer)
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu,
        "tokens": len(corpus.tokens),
        "examples": corpus.num_examples,
        "mean_length": float(corpus.lengths.mean()),
    }


def _measured(task: Any, arguments: tuple[Any, ...], queue: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = task(*arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    queue.put(found | {"peak_mb": peak / 1024, "import_mb": before / 1024})


def measure(task: Any, *arguments: Any) -> dict[str, Any]:
    """What `task(*arguments)` returns, and its peak of resident memory."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_measured, args=(task, arguments, queue))
    process.start()
    found = queue.get()
    process.join()
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="Hugging Face directory")
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5, help="medians are of these")
    parser.add_argument("--output", default="", help="JSON file for the figures")
    parser.add_argument("--skip_bare", action="store_true")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "rows.jsonl"
        write_input(path, args.examples)
        print(f"{args.examples:,} rows, {path.stat().st_size / 1e6:,.0f} MB")
        results: dict[str, list[dict[str, Any]]] = {}
        for round_ in range(args.rounds):
            cold = path.with_name(f"round{round_}.jsonl")
            path = path.rename(cold)  # another name, another cold start
            if not args.skip_bare:
                results.setdefault("bare", []).append(
                    measure(bare, path, args.tokenizer)
                )
            for name in ("cold", "warm"):
                found = measure(whole, path, args.tokenizer)
                results.setdefault(name, []).append(found)
    middle = {name: _middle(rounds) for name, rounds in results.items()}
    for name, found in middle.items():
        rate = found["tokens"] / found["seconds"]
        print(
            f"{name:5} {found['seconds']:8.2f} s {rate:12,.0f} tokens/s"
            f" {found['cpu_seconds']:8.2f} s of CPU"
            f" peak {found['peak_mb']:,.0f} MB"
            f" ({found['import_mb']:,.0f} MB of it imports)"
        )
    if "bare" in middle:
        wall, cpu = (
            middle["bare"][name] / middle["cold"][name]
            for name in ("seconds", "cpu_seconds")
        )
        print(
            f"a cold start reaches {wall:.0%} of bare encode_batch ({cpu:.0%} by"
            " CPU seconds, which other jobs on the machine disturb less)"
        )
    if args.output:
        record.write(args.output, "data", [_table(middle)], details=results)


def _middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Median of every figure over the rounds."""
    return {
        name: record.median([found[name] for found in rounds]) for name in rounds[0]
    }


def _table(middle: dict[str, dict[str, Any]]) -> record.Table:
    titles = {
        "bare": "encode_batch alone",
        "cold": "data.load, empty cache",
        "warm": "data.load, after an earlier one",
    }
    heads = ("what", "wall (s)", "processor (s)", "tokens per second", "peak (MB)")
    rows = [
        (
            titles[name],
            found["seconds"],
            found["cpu_seconds"],
            found["tokens"] / found["seconds"],
            found["peak_mb"],
        )
        for name, found in middle.items()
    ]
    return record.Table("reading", heads, rows, (None, 2, 2, 0, 0))


if __name__ == "__main__":
    # Under its own name, by which the measuring processes find the functions.
    importlib.import_module("experiments.bench.data").main()
