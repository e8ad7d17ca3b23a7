"""From pairs to files: what is usable, what is held out, how many of each source."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from clusterjax import errors, files
from clusterjax.data import tokenizer as tokenizer_lib
from experiments.real_sources import catalogue

Pair = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is wanted.

    Attributes:
      num_train: training examples of all sources together.
      num_heldout: held-out examples.
      max_tokens: most tokens of instruction and response together.
      exponent: a source's share goes as (usable examples) ** exponent: 1 = as they
        come, 0 = all equal.
      min_usable: a source with fewer examples that fit is left out.
      seed: of the draw.
    """

    num_train: int = 1000
    num_heldout: int = 200
    max_tokens: int = 120
    exponent: float = 0.5
    min_usable: int = 50
    seed: int = 0


@dataclasses.dataclass
class Usable:
    """The pairs of one source that fit.

    Attributes:
      found: distinct pairs in the package.
      train, heldout: those within the length limit, in the order of their draw.
    """

    found: int
    train: list[Pair]
    heldout: list[Pair]


def sort_out(
    pairs: Iterable[Pair], tokenizer: tokenizer_lib.Tokenizer, settings: Settings
) -> Usable:
    """Drops empty, repeated and long pairs; splits the rest by their instruction.

    A tenth of all instructions is held out, by hash: other sources, sizes or versions
    never move a pair to the other side. A response that is on both sides stays on the
    held-out side only.
    """
    distinct = list(
        dict.fromkeys((i.strip(), r.strip()) for i, r in pairs if i.strip())
    )
    distinct = [pair for pair in distinct if pair[1]]
    encoded = tokenizer.encode_batch([f"{i}\n{r}" for i, r in distinct])
    fitting = [
        pair
        for pair, tokens in zip(distinct, encoded, strict=True)
        if len(tokens.ids) <= settings.max_tokens
    ]
    drawn = sorted(fitting, key=lambda pair: _hash(f"{settings.seed}", *pair))
    heldout = [pair for pair in drawn if _is_heldout(pair[0])]
    if len(drawn) < settings.min_usable:
        return Usable(len(distinct), [], [])
    answers = {_normal(response) for _, response in heldout}
    train = [
        pair
        for pair in drawn
        if not _is_heldout(pair[0]) and _normal(pair[1]) not in answers
    ]
    return Usable(len(distinct), train, heldout)


def shares(available: Mapping[str, int], total: int, exponent: float) -> dict[str, int]:
    """How many of each source: proportional to available ** exponent, no more than all.

    Raises:
      errors.DataError: there are fewer than `total` altogether.
    """
    if sum(available.values()) < total:
        raise errors.DataError(
            f"{total:,} examples are asked for, and the sources have"
            f" {sum(available.values()):,} of this length; lower --num_train or"
            " --num_heldout, raise --max_tokens, or add sources"
        )
    result = dict.fromkeys(available, 0)
    # A source that has too few gives all it has, and the others share the rest.
    while (left := total - sum(result.values())) > 0:
        open_ = {n: c**exponent for n, c in available.items() if result[n] < c}
        whole = sum(open_.values())
        exact = {name: left * weight / whole for name, weight in open_.items()}
        extra = {name: int(value) for name, value in exact.items()}
        by_rest = sorted(exact, key=lambda name: extra[name] - exact[name])
        for name in by_rest[: left - sum(extra.values())]:
            extra[name] += 1
        for name, count in extra.items():
            result[name] = min(result[name] + count, available[name])
    return result


def write(
    opened: Sequence[catalogue.Opened],
    tokenizer: tokenizer_lib.Tokenizer,
    settings: Settings,
    out: pathlib.Path,
) -> dict[str, object]:
    """Writes `train/*.jsonl`, `heldout/*.jsonl` and `manifest.json`; returns the last.

    Each line is an object with `instruction`, `response` and `source`.

    Raises:
      errors.DataError: too few examples, or a package of another layout.
    """
    usable = {
        item.source.name: sort_out(item.pairs(), tokenizer, settings) for item in opened
    }
    wanted = {
        part: shares(
            {name: len(getattr(found, part)) for name, found in usable.items()},
            total,
            settings.exponent,
        )
        for part, total in (
            ("train", settings.num_train),
            ("heldout", settings.num_heldout),
        )
    }
    for part, counts in wanted.items():
        for name, count in counts.items():
            if not count:
                continue
            chosen = getattr(usable[name], part)[:count]
            files.write_text(out / part / f"{name}.jsonl", _lines(name, chosen))
    manifest = {
        "settings": dataclasses.asdict(settings),
        "tokenizer": tokenizer.fingerprint,
        "sources": [
            {
                "source": item.source.name,
                "holds": item.source.holds,
                "licence": item.source.licence,
                **item.origin(),
                "found": usable[item.source.name].found,
                "usable": len(usable[item.source.name].train)
                + len(usable[item.source.name].heldout),
                "train": wanted["train"][item.source.name],
                "heldout": wanted["heldout"][item.source.name],
            }
            for item in opened
        ],
    }
    files.write_json(out / "manifest.json", manifest)
    return manifest


def _lines(name: str, pairs: Iterable[Pair]) -> str:
    rows = (
        {"instruction": instruction, "response": response, "source": name}
        for instruction, response in pairs
    )
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _hash(*texts: str) -> bytes:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).digest()


def _is_heldout(instruction: str) -> bool:
    return int.from_bytes(_hash(_normal(instruction))[:8], "big") % 10 == 0


def _normal(text: str) -> str:
    return "".join(text.split()).casefold()
