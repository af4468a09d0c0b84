"""A cache of vocabularies and certificates in `$TURNGATE_CACHE/certified`.

Without this cache, reading a tokenizer and probing its template would take up most of the start-up time. A record's name is derived from
the tokenizer's files, the model, the family, our rendering code, and the versions of Python and of the tokenizer and template packages.
If any of these changes, so does the name. A record that is found is therefore never out of date.
"""

from __future__ import annotations

import os
import sys
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from turngate.render.certify import Certificate
from turngate.render.tokenizer import TOOL_TEMPLATE_FILE
from turngate.render.vocabulary import Vocabulary

_VERSION = 2  # of the record format; increase it when the meaning of a record changes
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",  # its stop tokens may close a turn
    "chat_template.jinja",
    TOOL_TEMPLATE_FILE,
)
_MAX_RECORDS = 64  # a record with a large vocabulary takes about 2 MB
_PACKAGES = ("tokenizers", "tiktoken", "jinja2", "renderers")


class CertificateRecord(msgspec.Struct, frozen=True):
    """What is cached for a tokenizer folder, a model and a family."""

    vocabulary: Vocabulary
    fast: bool  # whether the fast encoder agrees with the slow encoder
    certificate: Certificate


def record_name(folder: Path, model: str, family: str) -> str:
    """Return the name of the record for a model, a family, and the current files of a tokenizer folder."""
    purpose = blake2b(f"{model}\0{family}".encode(), digest_size=8)
    return f"{_tokenizer_digest(folder)}-{purpose.hexdigest()}"


def _tokenizer_digest(folder: Path) -> str:
    """Return a digest of the tokenizer's files, our rendering code, and the versions of Python and of the tokenizer and template packages.

    For a file that does not exist, only the name is included.
    """
    digest = blake2b(f"{_VERSION} {sys.version}".encode(), digest_size=16)
    for path in [*(folder / file for file in _FILES), *sorted(Path(__file__).parent.glob("*.py"))]:
        digest.update(path.name.encode() + b"\0")
        if path.is_file():
            digest.update(blake2b(path.read_bytes()).digest())
    for package in _PACKAGES:
        digest.update(f"{package} {_version(package)}\0".encode())
    return digest.hexdigest()


def load_record(name: str) -> CertificateRecord | None:
    try:
        return _read_record(_cache_folder() / f"{name}.msgpack")
    except RuntimeError:  # the home folder is unknown
        return None


def load_any_record(folder: Path) -> CertificateRecord | None:
    """Load one of the records of a tokenizer folder. All of them have the same vocabulary. Return None if there is none."""
    try:
        records = map(_read_record, _cache_folder().glob(f"{_tokenizer_digest(folder)}-*.msgpack"))
        return next((record for record in records if record is not None), None)
    except RuntimeError:
        return None


def _read_record(path: Path) -> CertificateRecord | None:
    try:
        digest, record = path.read_bytes().split(b"\n", 1)
        if digest != _checksum(record):
            return None
        return msgspec.msgpack.decode(record, type=CertificateRecord)
    except (OSError, ValueError, msgspec.DecodeError):
        return None


def save_record(name: str, record: CertificateRecord) -> None:
    """Save a record, and delete the oldest records beyond `_MAX_RECORDS`. Ignore errors: the next start can probe the renderer again."""
    try:
        _cache_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        part = _cache_folder() / f"{name}.{os.getpid()}"
        encoded = msgspec.msgpack.encode(record)
        part.write_bytes(_checksum(encoded) + b"\n" + encoded)
        part.replace(_cache_folder() / f"{name}.msgpack")
        newest = sorted(_cache_folder().glob("*.msgpack"), key=lambda file: file.stat().st_mtime, reverse=True)
        for old in newest[_MAX_RECORDS:]:
            old.unlink(missing_ok=True)
    except (OSError, RuntimeError):  # RuntimeError means that the home folder is unknown
        return


def _checksum(record: bytes) -> bytes:
    return blake2b(record, digest_size=16).hexdigest().encode()


def _cache_folder() -> Path:
    cache = os.environ.get("TURNGATE_CACHE") or Path.home() / ".cache" / "turngate"
    return Path(cache).expanduser().absolute() / "certified"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
