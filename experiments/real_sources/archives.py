"""Fetched packages (wheel, source archive, npm tarball, Debian package), unopened."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import pathlib
import re
import tarfile
import urllib.parse
import zipfile
from collections.abc import Iterator
from typing import Literal

from clusterjax import errors

_AR_MAGIC, _AR_HEADER = b"!<arch>\n", 60
_FETCH = {
    "pypi": "pip download --no-deps --dest {folder} {name}",
    "npm": "npm pack --pack-destination {folder} {name}",
    "debian": "(cd {folder} && apt-get download {name})",
}


@dataclasses.dataclass(frozen=True)
class Package:
    """A published package.

    Attributes:
      registry: where it is published.
      name: its name there.
    """

    registry: Literal["pypi", "npm", "debian"]
    name: str

    def fetch_command(self, folder: pathlib.Path) -> str:
        """The shell command that puts its archive into `folder`."""
        return _FETCH[self.registry].format(folder=folder, name=self.name)

    def file_pattern(self) -> re.Pattern[str]:
        """What its archive's file name looks like; group `version` is the version."""
        if self.registry == "debian":
            return re.compile(re.escape(self.name) + r"_(?P<version>[^_]+)_\w+\.deb")
        if self.registry == "npm":
            return re.compile(re.escape(self.name) + r"-(?P<version>\d[^-]*)\.tgz")
        # PyPI writes `-`, `_` and `.` of a name alike.
        name = "[-_.]".join(map(re.escape, re.split("[-_.]", self.name)))
        version = r"-(?P<version>\d[^-]*)"
        return re.compile(f"{name}{version}(?:-.*\\.whl|\\.tar\\.gz)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Archive:
    """One fetched package.

    Attributes:
      package: which one.
      version: as in the file's name.
      path: the file.
    """

    package: Package
    version: str
    path: pathlib.Path

    def members(self, pattern: str) -> list[tuple[str, bytes]]:
        """(name, content) of the files whose whole name matches, by name.

        Raises:
          errors.DataError: the file is damaged, or no file in it matches.
        """
        wanted = re.compile(pattern)
        try:
            found = [
                (name, content)
                for name, content in _files(self.path, wanted)
                if wanted.fullmatch(name)
            ]
        except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
            raise errors.DataError(
                f"{self.path} can't be read ({error}); fetch it again:"
                f" {self.package.fetch_command(self.path.parent)}"
            ) from error
        if not found:
            raise errors.DataError(
                f"{self.path} holds no file like {pattern}: this version of"
                f" {self.package.name} is laid out otherwise"
            )
        return sorted(found)

    def digest(self) -> str:
        """SHA-256 of the file, 64 hex digits."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def find(package: Package, folder: pathlib.Path) -> Archive | None:
    """The package's archive in `folder`, or None.

    Raises:
      errors.DataError: there is more than one.
    """
    pattern = package.file_pattern()
    found = [
        (path, match)
        for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if (match := pattern.fullmatch(path.name))
    ]
    if len(found) > 1:
        names = " and ".join(path.name for path, _ in found)
        raise errors.DataError(f"{folder} holds {names}; leave one of them")
    if not found:
        return None
    path, match = found[0]
    return Archive(package, urllib.parse.unquote(match["version"]), path)


def _files(path: pathlib.Path, wanted: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if wanted.fullmatch(name):
                    yield name, archive.read(name)
        return
    content = _debian_data(path) if path.suffix == ".deb" else path.read_bytes()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if member.isfile() and wanted.fullmatch(name):
                file = archive.extractfile(member)
                assert file is not None
                yield name, file.read()


def _debian_data(path: pathlib.Path) -> bytes:
    """The tarball of a Debian package: member `data.tar.*` of an `ar` archive."""
    content = path.read_bytes()
    if not content.startswith(_AR_MAGIC):
        raise OSError("not a Debian package")
    place = len(_AR_MAGIC)
    while place + _AR_HEADER <= len(content):
        header = content[place : place + _AR_HEADER]
        name = header[:16].decode("ascii", "replace").strip().rstrip("/")
        size = int(header[48:58])
        place += _AR_HEADER
        if name.startswith("data.tar"):
            if name.endswith(".zst"):
                raise OSError(f"{name}: zstd is not read; take Debian's own package")
            return content[place : place + size]
        place += size + size % 2  # members begin at even places
    raise OSError("no data.tar in it")
