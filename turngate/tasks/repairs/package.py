"""Load packages for repair tasks from folders or from releases on the package index, such as `humanize==4.12.3`.

A package must include its tests.
"""

from __future__ import annotations

import email.parser
import gzip
import hashlib
import html
import http.client
import io
import os
import re
import tarfile
import tempfile
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterator, Mapping
from email.message import Message
from pathlib import Path, PurePosixPath

import msgspec

from turngate.agents.install import cache_folder
from turngate.common.validation import parse_toml, path_exists
from turngate.errors import TaskError

INDEX = "https://pypi.org/simple"
MAX_FILE_BYTES = 400_000
MAX_PACKAGE_BYTES = 4_000_000
FETCH_TIMEOUT_S = 120.0
TEST_FOLDERS = ("test", "tests", "testing")
_METADATA = "PKG-INFO"  # the metadata of a release, in its archive and in the folder that it is unpacked to
_RELEASE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)")
# Parts of a repository that neither the package nor its tests need.
_LEFT_OUT = {"docs", "doc", "build", "dist", "benchmarks", "node_modules", "__pycache__"}
_NOT_THE_PACKAGE = {"setup.py", "conftest.py", "noxfile.py", "tasks.py", "versioneer.py", "_version.py", "__main__.py"}


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a package and its tests, as text."""

    name: str
    version: str
    license: str  # empty if the package does not state it
    origin: str  # a release with its SHA-256, or the name of a folder
    files: Mapping[str, str]
    left_out: tuple[str, ...] = ()  # files that are too large or not text

    @property
    def modules(self) -> tuple[str, ...]:
        """The package's own modules, which bugs can be injected into."""
        return tuple(sorted(path for path in self.files if self._is_module(path)))

    @property
    def root(self) -> str:
        """The folder that contains the package's code: `src`, or an empty string for the top folder."""
        return "src" if any(path.startswith("src/") and path.endswith(".py") for path in self.files) else ""

    @property
    def has_pytest_options(self) -> bool:
        """Whether the package sets command-line options for pytest. Test runs ignore them, because they may need plugins."""
        files = ("pyproject.toml", "setup.cfg", "tox.ini", "pytest.ini", ".pytest.ini", "pytest.toml")
        return any("addopts" in self.files.get(name, "") for name in files)

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    def _is_module(self, path: str) -> bool:
        pure, stem = PurePosixPath(path), self.slug.replace("-", "_")
        if pure.suffix != ".py" or is_test(path) or pure.name in _NOT_THE_PACKAGE:
            return False
        return path in (f"{stem}.py", f"src/{stem}.py") or (pure.parent / "__init__.py").as_posix() in self.files


def is_test(path: str) -> bool:
    pure = PurePosixPath(path)
    return (
        any(part in TEST_FOLDERS for part in pure.parts[:-1])
        or pure.name.startswith("test_")
        or pure.name.endswith("_test.py")
        or pure.name in ("test.py", "tests.py", "conftest.py")
    )


def load_package(source: str) -> Package:
    """Load a package from a folder or a release. Raise `TaskError` if it cannot be read, is too large, or has no tests or no code."""
    folder = Path(os.path.expanduser(source))  # noqa: PTH111  (`Path.expanduser` raises an error for unknown users)
    if path_exists(folder) and folder.is_dir():
        package = _load_folder(folder)
    elif (match := _RELEASE.fullmatch(source)) is not None:
        package = _load_release(match["name"], match["version"])
    else:
        raise TaskError(
            f"repairs: {source} is neither a folder nor a release; write a release as NAME==VERSION", param="sources"
        )
    if not package.modules:
        raise TaskError(
            f"repairs: {source} has no code to inject bugs into; a package needs a folder with an __init__.py, or a module with the same "
            "name as the package",
            param="sources",
        )
    if not any(is_test(path) and path.endswith(".py") for path in package.files):
        raise TaskError(
            f"repairs: {source} has no tests; choose a folder or a release that includes them", param="sources"
        )
    return package


# ── folders ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _load_folder(folder: Path) -> Package:
    try:
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.is_symlink() and _is_needed(path.relative_to(folder).as_posix())
        }
    except OSError as error:
        raise TaskError(
            f"repairs: {error.filename or folder} cannot be read ({error.strerror}); check the permissions of the folder's files",
            param="sources",
        ) from None
    about = _parse_metadata(files.pop(_METADATA, b""))
    texts, left_out = _decode_files(files, str(folder))
    project = _read_project(folder, texts)
    stated = project.get("license")
    return Package(
        name=str(project.get("name") or about["Name"] or folder.resolve().name),
        version=str(project.get("version") or about["Version"] or ""),
        license=str(stated.get("text", "") if isinstance(stated, dict) else stated or "") or _read_license(about),
        origin=folder.resolve().name,
        files=texts,
        left_out=left_out,
    )


def _read_project(folder: Path, files: Mapping[str, str]) -> Mapping[str, object]:
    try:
        table = parse_toml(files.get("pyproject.toml", "")).get("project", {})
    except ValueError as error:
        raise TaskError(f"repairs: {folder / 'pyproject.toml'} is not valid TOML: {error}", param="sources") from None
    return table if isinstance(table, dict) else {}


def _is_needed(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return not any(part in _LEFT_OUT or part.endswith(".egg-info") or part.startswith(".") for part in parts)


def _decode_files(files: Mapping[str, bytes], where: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Decode the text files. Return their text by path, and the paths of files that are too large or not text."""
    texts: dict[str, str] = {}
    left_out = []
    for path, content in files.items():
        try:
            if len(content) > MAX_FILE_BYTES or b"\0" in content:
                raise UnicodeError
            texts[path] = content.decode("utf-8")
        except UnicodeError:
            left_out.append(path)
    if (size := sum(len(text) for text in texts.values())) > MAX_PACKAGE_BYTES:
        raise TaskError(
            f"repairs: {where} has {size / 1e6:.1f} MB of text; the limit is {MAX_PACKAGE_BYTES / 1e6:.0f} MB, "
            "because every task contains the whole package; choose a smaller package",
            param="sources",
        )
    return texts, tuple(left_out)


# ── releases ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _load_release(name: str, version: str) -> Package:
    content = _fetch_archive(name, version)
    files = dict(_unpack(content, f"{name}=={version}"))
    about = _parse_metadata(files.pop(_METADATA, b""))
    texts, left_out = _decode_files(
        {path: files[path] for path in sorted(files) if _is_needed(path)}, f"{name}=={version}"
    )
    return Package(
        name=name,
        version=version,
        license=_read_license(about),
        origin=f"{name}=={version} sha256:{hashlib.sha256(content).hexdigest()}",
        files=texts,
        left_out=left_out,
    )


def _parse_metadata(content: bytes) -> Message:
    return email.parser.Parser().parsestr(content.decode("utf-8", "replace"))


def _read_license(about: Message) -> str:
    """Return the license that a release states: an SPDX expression, a short text, or classifiers."""
    expression, text = about["License-Expression"], about["License"]
    if expression:
        return str(expression)
    if text and "\n" not in text and text != "UNKNOWN":
        return str(text)
    classifiers = about.get_all("Classifier", [])
    return ", ".join(line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License ::"))


def _unpack(content: bytes, where: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an archive, with paths relative to the single folder at its root."""
    try:
        # Decompress it first: `tarfile` does not verify the checksum of the compressed data.
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(content))) as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                if member.isfile() and len(path.parts) > 1 and ".." not in path.parts and not path.is_absolute():
                    file = archive.extractfile(member)
                    assert file is not None
                    yield PurePosixPath(*path.parts[1:]).as_posix(), file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise TaskError(
            f"repairs: the archive of {where} cannot be read: {error}; delete its file from {cache_folder() / 'releases'} and try again",
            param="sources",
        ) from None


def _fetch_archive(name: str, version: str) -> bytes:
    """Return the source archive of a release from the cache or the index. A download is checked if the index states its SHA-256."""
    place = cache_folder() / "releases" / f"{name}-{version}.tar.gz"
    try:
        if place.is_file():
            return place.read_bytes()
    except OSError as error:
        raise _cache_error(place, "read", error) from None
    address = _find_archive(name, version)
    content = _fetch(address)
    algorithm, _, expected = urllib.parse.urlsplit(address).fragment.partition("=")
    if algorithm == "sha256" and hashlib.sha256(content).hexdigest() != expected:
        raise TaskError(
            f"repairs: {address} does not match the checksum on the index; try again, or set PIP_INDEX_URL to another index",
            param="sources",
        )
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as new:
            try:
                new.write(content)
                new.flush()
                Path(new.name).rename(place)
            finally:
                Path(new.name).unlink(missing_ok=True)
    except OSError as error:
        raise _cache_error(place, "written", error) from None
    return content


def _cache_error(place: Path, failed: str, error: OSError) -> TaskError:
    return TaskError(
        f"repairs: {place} cannot be {failed} ({error.strerror}); check the disk and the folder's permissions, or set TURNGATE_CACHE to "
        "another folder",
        param="sources",
    )


def _find_archive(name: str, version: str) -> str:
    """Return the address of a release's source archive on the index that pip uses."""
    page = f"{(os.environ.get('PIP_INDEX_URL') or INDEX).rstrip('/')}/{re.sub(r'[-_.]+', '-', name).lower()}/"
    wanted = f"{_normalize(name)}-{version}.tar.gz"
    for link in re.findall(r'href="([^"]+)"', _fetch(page).decode("utf-8", "replace")):
        address = urllib.parse.urljoin(page, html.unescape(link))
        file = urllib.parse.unquote(urllib.parse.urlsplit(address).path).rpartition("/")[2]
        stem, dash, rest = file.rpartition("-")
        if f"{_normalize(stem)}{dash}{rest}" == wanted:
            return address
    raise TaskError(
        f"repairs: {page} has no source archive for {name} {version}; choose a different version, or pass a folder with its source",
        param="sources",
    )


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _fetch(address: str) -> bytes:
    try:
        with urllib.request.urlopen(address, timeout=FETCH_TIMEOUT_S) as reply:  # noqa: S310  # the index that pip uses
            content: bytes = reply.read()
            return content
    except (OSError, ValueError) as error:
        problem = str(error)
    except http.client.HTTPException as error:
        problem = f"{error!r:.200}"  # it may quote what the server sent
    raise TaskError(
        f"repairs: {address} cannot be downloaded: {problem}; check the package's name, the network and PIP_INDEX_URL",
        param="sources",
    )
