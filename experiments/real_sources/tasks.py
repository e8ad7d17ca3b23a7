"""Programs from a task, dialogue, and tasks that are made by rules."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator

import yaml

from clusterjax.data.builtin import stdlib_functions
from experiments.real_sources import archives

Pair = tuple[str, str]


def codeio(archive: archives.Archive) -> Iterator[Pair]:
    """Task and input-output specification → Python program."""
    ((_, packed),) = archive.members(r"reasoning_gym/data/codeio\.jsonl\.gz")
    for line in gzip.decompress(packed).decode().splitlines():
        row = json.loads(line)
        yield (
            f"{row['task_description']}\n\n{row['input_output_spec']}",
            row["code_sample"],
        )


def dialogue(archive: archives.Archive) -> Iterator[Pair]:
    """Every line of an English conversation with the one that answers it."""
    for _, content in archive.members(r"chatterbot_corpus/data/english/\w+\.yml"):
        for conversation in yaml.safe_load(content)["conversations"]:
            yield from itertools.pairwise(map(str, conversation))


def reasoning(count: int = 20, seed: int = 0) -> Iterator[Pair]:
    """`count` tasks of every generator of reasoning-gym, with their answers."""
    import reasoning_gym
    from reasoning_gym import factory

    for name in sorted(factory.DATASETS):
        if name == "composite":  # mixes the others
            continue
        for task in reasoning_gym.create_dataset(name, size=count, seed=seed):
            if task["answer"]:  # some kinds have many answers, and a judge instead
                yield task["question"], str(task["answer"])


def functions() -> Iterator[Pair]:
    """Signature and docstring → body, from the standard library of this Python."""
    for example in stdlib_functions.mine(stdlib_functions.library_root()):
        yield example.instruction, example.response
