"""`skills`: a seeded generator of short tasks with exact answers.

The family sizes follow Zipf's law and a chosen share of the examples rewords another
one: redundant and imbalanced on purpose, with the family recorded, so that what a
selection covers can be measured against the truth.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow_datasets as tfds

from clusterjax import errors
from clusterjax.data.builtin import families, splits, storage, tasks

SOURCE = "skills"
MAX_MISSES = 1000  # draws in a row that give nothing new: the family is exhausted


def family_sizes(num_examples: int, zipf_exponent: float) -> np.ndarray:
    """Examples of each family, by rank: proportional to rank^(−exponent).

    Args:
      num_examples: total, at least the number of families.
      zipf_exponent: 0 gives equal sizes.

    Returns:
      int64 [families], each at least 1, with the given sum (largest remainders).
    """
    count = len(families.FAMILIES)
    if num_examples < count:
        raise errors.ConfigError(
            f"skills.num_examples={num_examples} is fewer than the {count} task "
            f"families; give at least {count}"
        )
    share = np.arange(1, count + 1, dtype=np.float64) ** -zipf_exponent
    exact = share / share.sum() * (num_examples - count)
    sizes = np.floor(exact).astype(np.int64)
    missing = num_examples - count - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:missing]] += 1
    return sizes + 1


def generate(
    num_examples: int,
    seed: int = 0,
    zipf_exponent: float = 1.0,
    near_duplicate_rate: float = 0.2,
) -> list[splits.Example]:
    """Draws the examples of all families.

    Args:
      num_examples: total over both splits.
      seed: another seed gives other tasks.
      zipf_exponent: how uneven the families are; 0 = equal.
      near_duplicate_rate: share of each family's examples that reword a task which
        the family already has, in [0, 1).

    Returns:
      The examples, family by family; rewordings share the `key` of their task. No
      instruction comes twice.

    Raises:
      errors.ConfigError: a setting is out of range, or a family has too few tasks.
    """
    if not 0 <= near_duplicate_rate < 1:
        raise errors.ConfigError(
            f"skills.near_duplicate_rate={near_duplicate_rate} must be at least 0 and "
            "below 1"
        )
    sizes = family_sizes(num_examples, zipf_exponent)
    examples: list[splits.Example] = []
    for rank, (family, size) in enumerate(zip(families.FAMILIES, sizes, strict=True)):
        bits = np.random.PCG64(np.random.SeedSequence([seed, rank]))
        draw = tasks.Draw(np.random.Generator(bits))
        examples += _family(family, int(size), near_duplicate_rate, draw)
    return examples


def _family(
    family: families.Family, size: int, near_duplicate_rate: float, draw: tasks.Draw
) -> list[splits.Example]:
    num_rewordings = min(round(near_duplicate_rate * size), size - 1)
    drawn: dict[str, tasks.Task] = {}
    examples = []
    instructions: set[str] = set()

    def add(key: str, task: tasks.Task) -> bool:
        instruction = draw.choice(family.wordings).format(**task.fields)
        if instruction in instructions:
            return False
        instructions.add(instruction)
        examples.append(
            splits.Example(key, SOURCE, family.name, instruction, task.answer)
        )
        return True

    misses = 0
    while len(examples) < size and misses < MAX_MISSES:
        if len(drawn) < size - num_rewordings:
            task = family.draw(draw)
            key = f"{family.name}:{'|'.join(map(str, task.arguments))}"
            added = key not in drawn and add(key, task)
        else:
            key = draw.choice(list(drawn))
            task = drawn[key]
            added = add(key, task)
        if added:
            drawn[key] = task
        misses = 0 if added else misses + 1
    if len(examples) == size:
        return examples
    raise errors.ConfigError(
        f"skills: the family {family.name} has fewer than the {size} different "
        "examples asked for; lower skills.num_examples, skills.zipf_exponent or "
        "skills.near_duplicate_rate"
    )


def fingerprints(example: splits.Example) -> tuple[str, ...]:
    """What makes two examples duplicates: the instruction."""
    return (example.instruction,)


@dataclasses.dataclass
class SkillsConfig(tfds.core.BuilderConfig):
    """Settings of `skills`.

    Attributes:
      num_examples: examples of both splits together.
      seed: of the tasks and wordings.
      zipf_exponent: how uneven the family sizes are; 0 = equal.
      near_duplicate_rate: share of examples that reword another, in [0, 1).
    """

    num_examples: int = 2000
    seed: int = 0
    zipf_exponent: float = 1.0
    near_duplicate_rate: float = 0.2


class Skills(tfds.core.GeneratorBasedBuilder):
    """Short tasks with exact answers in Zipf-distributed families."""

    VERSION = tfds.core.Version("1.0.0")
    # TFDS looks for download checksums beside the code, by a package it does not
    # declare; there is nothing to download.
    code_path = None  # pyright: ignore[reportAssignmentType]
    BUILDER_CONFIGS = [SkillsConfig(name="default")]  # noqa: RUF012 (TFDS)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=storage.features(),
            license="Apache-2.0",
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # nothing is downloaded
        config = self.builder_config
        assert isinstance(config, SkillsConfig)
        examples = generate(
            config.num_examples,
            config.seed,
            config.zipf_exponent,
            config.near_duplicate_rate,
        )
        return storage.split_generators(self, splits.split(examples, fingerprints))

    def _generate_examples(self, examples):
        yield from storage.rows(examples)
