"""`stdlib_functions`: docstring and signature → body, from the standard library.

The examples are mined from the source files of the running Python, so no text is
shipped and none is fetched. Functions and methods with a docstring become pairs; the
qualified name decides between train and held-out.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import pathlib
import sysconfig
import textwrap
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import tensorflow_datasets as tfds

from clusterjax.data.builtin import splits, storage

MIN_DOCSTRING_CHARS = 20
MIN_BODY_LINES = 2
MAX_CHARS = 1000

# Not mined: tests, bundled copies of other projects, and what a distribution may leave
# out, so that the set hardly differs between two installations of one Python.
_SKIPPED = """
    __pycache__ test tests idle_test site-packages dist-packages ensurepip idlelib
    lib2to3 distutils tkinter turtle turtledemo pydoc_data msilib lib-dynload aifc
    asynchat asyncore binhex cgi cgitb chunk crypt formatter imghdr imp mailcap nis
    nntplib ossaudiodev pipes smtpd sndhdr sunau telnetlib uu xdrlib _osx_support
    _aix_support _android_support _ios_support _bootsubprocess _distutils_system_mod
    antigravity this __phello__
"""
SKIPPED = frozenset(_SKIPPED.split())

# A module that moved behind a public name keeps that name, and with it its split.
PUBLIC_NAMES = {"_pydatetime": "datetime", "_pydecimal": "decimal", "_pyio": "io"}

_GROUPS = {
    "text": """
        string textwrap re difflib codecs encodings gettext locale shlex pprint
        reprlib stringprep fnmatch _strptime html quopri base64
    """,
    "numbers": """
        decimal fractions statistics random numbers colorsys _pylong secrets
    """,
    "time": "datetime calendar zoneinfo sched timeit",
    "containers": """
        collections _collections_abc heapq bisect queue graphlib types enum
        weakref _weakrefset copy dataclasses functools operator contextlib abc
        _py_abc keyword
    """,
    "concurrency": """
        asyncio concurrent multiprocessing threading _threading_local subprocess
        selectors signal contextvars
    """,
    "network": """
        http urllib socket socketserver ssl ftplib imaplib poplib smtplib
        ipaddress wsgiref xmlrpc webbrowser uuid netrc hashlib hmac
    """,
    "mail": "email mailbox mimetypes",
    "files": """
        pathlib os posixpath ntpath genericpath shutil tempfile glob fileinput
        filecmp io linecache stat
    """,
    "archives": """
        tarfile zipfile gzip bz2 lzma zipapp zipimport _compression compression
    """,
    "formats": """
        json csv configparser tomllib plistlib xml pickle pickletools copyreg
        shelve dbm sqlite3 wave
    """,
    "logging": "logging warnings",
    "testing": """
        unittest doctest pdb bdb trace traceback tracemalloc pstats profile
        cProfile cmd
    """,
    "introspection": """
        inspect ast dis symtable typing tokenize token pydoc pyclbr opcode
        tabnanny codeop code ctypes annotationlib
    """,
    "imports": """
        importlib pkgutil runpy modulefinder compileall py_compile site
        sysconfig venv platform
    """,
    "terminal": """
        argparse optparse getopt getpass curses pty tty rlcompleter _pyrepl
    """,
}
GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(modules.split()) for group, modules in _GROUPS.items()
}
OTHER_GROUP = "other"

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """A function of a module or a method of a class.

    Attributes:
      key: qualified name, `module.Class.method`.
      node: its syntax tree.
      first_line: first line of the definition with its decorators, from 1.
      in_class: whether it is a method.
    """

    key: str
    node: Function
    first_line: int
    in_class: bool


def library_root() -> pathlib.Path:
    """The folder with the running Python's standard library."""
    return pathlib.Path(sysconfig.get_paths()["stdlib"])


def source_files(
    root: pathlib.Path, skipped: Collection[str] = SKIPPED
) -> Iterator[tuple[str, str, ast.Module]]:
    """(module name, text, syntax tree) of each source file under `root`, sorted.

    Files and folders with a name in `skipped` are left out, and so is a file that is
    not UTF-8 or does not parse: a library may hold files that are broken on purpose.
    """
    for path in _python_files(root, skipped):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        parts = (PUBLIC_NAMES.get(parts[0], parts[0]), *parts[1:])
        try:
            text = path.read_text(encoding="utf-8")
            tree = parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield ".".join(parts), text, tree


def _python_files(
    folder: pathlib.Path, skipped: Collection[str]
) -> Iterator[pathlib.Path]:
    for path in sorted(folder.iterdir()):
        if path.stem in skipped or path.name.startswith(("config-", "_sysconfig")):
            continue
        if path.is_dir():
            yield from _python_files(path, skipped)
        elif path.suffix == ".py":
            yield path


def parse(text: str) -> ast.Module:
    """The syntax tree of a source file; warnings about its escapes are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def definitions(module: str, tree: ast.Module) -> Iterator[Definition]:
    """The functions and methods of a module, but not those inside a function."""

    def visit(node: ast.AST, prefix: str) -> Iterator[Definition]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}.{child.name}")
            elif isinstance(child, Function):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                in_class = isinstance(node, ast.ClassDef)
                yield Definition(f"{prefix}.{child.name}", child, first, in_class)
            elif isinstance(child, ast.If | ast.Try):
                yield from visit(child, prefix)

    return visit(tree, module)


def body_text(lines: list[str], node: Function) -> str:
    """The body of a function without its docstring, at indentation 0."""
    first = 1 if ast.get_docstring(node, clean=False) is not None else 0
    if len(node.body) == first:
        return ""
    start = node.body[first].lineno - 1
    if node.body[first].lineno == node.lineno:
        return ""  # the whole function stands on one line
    return textwrap.dedent("\n".join(lines[start : node.end_lineno])).strip("\n")


def mine(root: pathlib.Path) -> list[splits.Example]:
    """All pairs of the library under `root`, in order of their qualified names.

    A pair has a docstring of at least `MIN_DOCSTRING_CHARS`, a body of at least
    `MIN_BODY_LINES` and in all at most `MAX_CHARS` characters. Of several functions
    with one qualified name or one body (whitespace and case apart) the first is kept.
    """
    examples: dict[str, splits.Example] = {}
    for module, text, tree in source_files(root):
        # As the syntax tree counts; `splitlines` also ends a line at a form feed.
        lines = text.split("\n")
        for item in definitions(module, tree):
            example = _pair(module, lines, item)
            if example is not None:
                examples.setdefault(example.key, example)
    bodies: set[str] = set()
    unique = []
    # Of two equal bodies the held-out one stays, so that no copy crosses the split.
    order = sorted(
        examples.values(), key=lambda e: (not splits.is_heldout(e.key), e.key)
    )
    for example in order:
        body = splits.normalise(example.response)
        if body not in bodies:
            bodies.add(body)
            unique.append(example)
    return sorted(unique, key=lambda e: e.key)


def _pair(module: str, lines: list[str], item: Definition) -> splits.Example | None:
    node = item.node
    docstring = ast.get_docstring(node)
    if docstring is None or len(docstring) < MIN_DOCSTRING_CHARS:
        return None
    body = body_text(lines, node)
    if sum(bool(line.strip()) for line in body.splitlines()) < MIN_BODY_LINES:
        return None
    if body[0].isspace():
        return None  # a string that reaches column 0 keeps it from being dedented
    header_end = node.body[0].end_lineno
    header = textwrap.dedent("\n".join(lines[item.first_line - 1 : header_end]))
    if len(header) + len(body) > MAX_CHARS:
        return None
    kind = "method" if item.in_class else "function"
    owner = item.key.rpartition(".")[0]
    return splits.Example(
        key=item.key,
        source=group_of(module),
        family=module.partition(".")[0],
        instruction=f"Write the body of this {kind} of {owner}:\n\n{header}",
        response=body,
    )


@functools.cache
def _group_by_module() -> dict[str, str]:
    return {module: group for group, names in GROUPS.items() for module in names}


def group_of(module: str) -> str:
    """The group (`source`) of a module, by its top-level name."""
    return _group_by_module().get(module.partition(".")[0], OTHER_GROUP)


def cap_groups(examples: list[splits.Example], cap: int) -> list[splits.Example]:
    """At most `cap` examples of each group, those of lowest hash, in the same order."""
    kept: dict[str, int] = {}
    chosen = set()
    for example in sorted(examples, key=lambda e: _order_hash(e.key)):
        if kept.get(example.source, 0) < cap:
            kept[example.source] = kept.get(example.source, 0) + 1
            chosen.add(example.key)
    return [example for example in examples if example.key in chosen]


def _order_hash(key: str) -> bytes:
    # Another hash than the split's, or the cap would favour the held-out part.
    return hashlib.sha256(b"order:" + key.encode()).digest()


def fingerprints(example: splits.Example) -> tuple[str, ...]:
    """What makes two pairs duplicates: the body, or the signature with docstring."""
    header = example.instruction.partition("\n\n")[2]
    return (f"body:{example.response}", f"header:{header}")


@dataclasses.dataclass
class StdlibFunctionsConfig(tfds.core.BuilderConfig):
    """Settings of `stdlib_functions`.

    Attributes:
      cap_per_group: largest number of examples of one module group, 0 = no cap.
    """

    cap_per_group: int = 0


class StdlibFunctions(tfds.core.GeneratorBasedBuilder):
    """Docstring and signature → function body, from the running Python's library."""

    VERSION = tfds.core.Version("1.0.0")
    # TFDS looks for download checksums beside the code, by a package it does not
    # declare; there is nothing to download.
    code_path = None  # pyright: ignore[reportAssignmentType]
    BUILDER_CONFIGS = [StdlibFunctionsConfig(name="default")]  # noqa: RUF012 (TFDS)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=storage.features(),
            license="Python Software Foundation License",
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # nothing is downloaded
        config = self.builder_config
        assert isinstance(config, StdlibFunctionsConfig)
        examples = mine(library_root())
        if config.cap_per_group:
            examples = cap_groups(examples, config.cap_per_group)
        return storage.split_generators(self, splits.split(examples, fingerprints))

    def _generate_examples(self, examples):
        yield from storage.rows(examples)
