"""What was found out about a tokenizer folder before, kept in `$TURNGATE_CACHE/certified`: reading and probing take longer than all
the rest of a start.

The name of a record is a digest of everything that the answer depends on: the folder's files, the family, our own rendering code and the
versions of what it uses. So a record is never wrong, only absent.
"""

from __future__ import annotations

import os
import sys
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from turngate.render.certify import Certificate
from turngate.render.vocabulary import Vocabulary

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_KEPT = 64  # records, of 2 MB each for a large vocabulary
_PACKAGES = ("tokenizers", "tiktoken", "jinja2", "renderers")


class Known(msgspec.Struct, frozen=True):
    vocabulary: Vocabulary
    fast: bool  # the fast encoder agrees with the true one
    certificate: Certificate


def name_of(folder: Path, model: str, family: str) -> str:
    """The record's name. A folder that cannot be read has one too: what is wrong with it is said when it is loaded."""
    loaded_for = blake2b(f"{model}\0{family}".encode(), digest_size=8)
    return f"{_read_as(folder)}-{loaded_for.hexdigest()}"


def _read_as(folder: Path) -> str:
    """The part of the name that tells the tokenizer and what reads it."""
    digest = blake2b(sys.version.encode(), digest_size=16)
    for path in [*(folder / file for file in _FILES), *sorted(Path(__file__).parent.glob("*.py"))]:
        digest.update(path.name.encode() + b"\0")
        if path.is_file():
            digest.update(blake2b(path.read_bytes()).digest())
    for package in _PACKAGES:
        digest.update(f"{package} {_version(package)}\0".encode())
    return digest.hexdigest()


def recall(name: str) -> Known | None:
    try:
        return _record(_folder() / f"{name}.msgpack")
    except RuntimeError:  # there is no home folder
        return None


def recall_any(folder: Path) -> Known | None:
    """Whatever model and family it was loaded for: the vocabulary is the same."""
    try:
        records = map(_record, _folder().glob(f"{_read_as(folder)}-*.msgpack"))
        return next((known for known in records if known is not None), None)
    except RuntimeError:
        return None


def _record(path: Path) -> Known | None:
    try:
        digest, record = path.read_bytes().split(b"\n", 1)
        if digest != _sum(record):
            return None
        return msgspec.msgpack.decode(record, type=Known)
    except (OSError, ValueError, msgspec.DecodeError):
        return None


def note(name: str, known: Known) -> None:
    """Where the cache cannot be written, the next start probes again."""
    try:
        _folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        part = _folder() / f"{name}.{os.getpid()}"
        record = msgspec.msgpack.encode(known)
        part.write_bytes(_sum(record) + b"\n" + record)
        part.replace(_folder() / f"{name}.msgpack")
        newest = sorted(_folder().glob("*.msgpack"), key=lambda file: file.stat().st_mtime, reverse=True)
        for old in newest[_KEPT:]:
            old.unlink(missing_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return


def _sum(record: bytes) -> bytes:
    return blake2b(record, digest_size=16).hexdigest().encode()


def _folder() -> Path:
    cache = os.environ.get("TURNGATE_CACHE") or Path.home() / ".cache" / "turngate"
    return Path(cache).expanduser().absolute() / "certified"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
