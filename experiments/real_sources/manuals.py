"""Manuals: C manual pages (man), perlfaq (pod), command recipes (cheat)."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator

from experiments.real_sources import archives

Pair = tuple[str, str]

_FONTS = {"B", "I", "SM", "SB"}
_ALTERNATING = {"BI", "BR", "IB", "IR", "RB", "RI"}
_ESCAPES = {
    r"\-": "-",
    r"\e": "\\",
    r"\(aq": "'",
    r"\[aq]": "'",
    r"\(dq": '"',
    r"\[dq]": '"',
    r"\(lq": '"',
    r"\(rq": '"',
    r"\(em": " - ",
    r"\(bu": "*",
    r"\(ha": "^",
    r"\(ti": "~",
    r"\ ": " ",
    r"\~": " ",
}


def man_pages(archive: archives.Archive) -> Iterator[Pair]:
    """What a function is for, its declaration, the first paragraph on it."""
    for _, packed in archive.members(r".*/man/man[23]/[^/]+\.[23]\.gz"):
        sections = _sections(gzip.decompress(packed).decode("utf-8", "replace"))
        names, dash, purpose = " ".join(sections.get("NAME", "").split()).partition(
            " - "
        )
        declared = sections.get("SYNOPSIS", "").split("\n\nFeature Test Macro")[0]
        about = sections.get("DESCRIPTION", "").split("\n\n")[0]
        if not (dash and declared and about):
            continue  # a page that only points to another
        name, what = names.split(",")[0].strip(), purpose.strip().capitalize()
        yield (
            f"What is the C function {name} for, and how is it declared?",
            f"{what}.\n\n{declared}\n\n{' '.join(about.split())}",
        )


def perl_faq(archive: archives.Archive) -> Iterator[Pair]:
    """Every question of perlfaq1 to perlfaq9 with its answer."""
    for _, content in archive.members(r".*/pod/perlfaq\d\.pod"):
        parts = re.split(r"^=head\d ", content.decode("utf-8", "replace"), flags=re.M)
        for part in parts:
            title, _, body = part.partition("\n\n")
            if title.strip().endswith("?"):
                yield " ".join(_plain_pod(title).split()), _plain_pod(body).strip()


def shell_recipes(archive: archives.Archive) -> Iterator[Pair]:
    """A comment that says what to do, and the command lines below it."""
    for name, content in archive.members(r"[^/]+/cheat/cheatsheets/[^/_.]+"):
        tool = name.rpartition("/")[2]
        for block in re.split(r"\n\s*\n", content.decode("utf-8", "replace")):
            lines = block.strip().splitlines()
            comment = [line for line in lines if line.startswith("#")]
            commands = lines[len(comment) :]
            # Comments among the commands explain parts of them: no single question.
            if not commands or any(line.startswith("#") for line in commands):
                continue
            wish = " ".join(line.lstrip("# ").strip() for line in comment).rstrip(" :")
            if wish:
                yield f"Shell, using {tool}: {wish}", "\n".join(commands)


def _sections(page: str) -> dict[str, str]:
    """Plain text of each section of a man page by its title."""
    result: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in page.splitlines():
        if line.startswith(".SH "):
            lines = result.setdefault(line[4:].strip().strip('"'), [])
        elif not line.startswith(('.\\"', "'\\\"")):
            lines.append(_plain_line(line))
    return {
        title: re.sub(r"\n{3,}", "\n\n", "\n".join(text)).strip()
        for title, text in result.items()
    }


def _plain_line(line: str) -> str:
    macro, _, rest = line[1:].partition(" ") if line.startswith(".") else ("", "", line)
    if macro in _FONTS | _ALTERNATING:
        words = [a or b for a, b in re.findall(r'"([^"]*)"|(\S+)', rest)]
        rest = ("" if macro in _ALTERNATING else " ").join(words)
    elif macro:
        return ""  # layout only; `.PP` and its like part paragraphs
    for escape, text in _ESCAPES.items():
        rest = rest.replace(escape, text)
    return re.sub(r"\\f(?:\[\w*\]|\(..|.)|\\[&%/,:]", "", rest)


def _plain_pod(text: str) -> str:
    """Without formatting codes and commands; see perlpod(1)."""
    text = re.sub(r"^=\w+.*$", "", text, flags=re.M)
    for _ in range(3):  # codes nest
        text = re.sub(r"\bL<(?:([^|<>]*)\|)?([^<>]*)>", lambda m: m[1] or m[2], text)
        text = re.sub(r"\b[BCFISXZ]<([^<>]*)>", r"\1", text)
        text = text.replace("E<gt>", "\x01").replace("E<lt>", "\x02")
    text = re.sub(r"\b[BCFI]<<+ (.*?) >>+", r"\1", text)
    text = text.replace("\x01", ">").replace("\x02", "<")
    return re.sub(r"\n{3,}", "\n\n", text)
