"""Write records atomically to JSON Lines, Parquet, or a folder with one JSON file per record."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import msgspec
import numpy as np
import orjson

from turngate.errors import ConfigError
from turngate.types import Json

_BATCH = 2_000_000  # tokens in a row group of a Parquet file


class RecordLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How the records of an export format are laid out in a file or a folder.

    `columns` maps the name of each column to its kind, such as `text` or `id[]`. It is empty if the records have no fixed columns.
    """

    what: str  # name of the records in error messages
    columns: Mapping[str, str] = {}
    folder: str = ""  # the field that names the file, for formats with one file per record


class UnwritableRecord(Exception):
    """A record cannot be written because of its content. Other records are not affected."""


class OutputFile(ABC):
    records = 0
    replaced = 0  # existing files with the same name
    others = 0  # existing files of other records, left unchanged

    @abstractmethod
    def add(self, record: Mapping[str, Json]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


@contextmanager
def open_output(out: Path, layout: RecordLayout, *, folder: bool = False) -> Iterator[OutputFile]:
    """Open `out` for writing.

    A single output file gets its final name only if the `with` block succeeds. `folder` means that the user asked for a folder, in which
    each record becomes a file.
    """
    kinds = ".jsonl or .parquet" if layout.columns else ".jsonl"
    if folder and not layout.folder:
        raise ConfigError(
            f"out: {out}/ names a folder, but {layout.what} are written to a single file; pass the name of a {kinds} file",
            param="out",
        )
    if layout.folder and (folder or not out.suffix or out.is_dir()):
        yield _FolderOutput(out, layout.folder)
        return
    if out.suffix not in (".jsonl", ".parquet"):
        more = " or a folder" if layout.folder else ""
        raise ConfigError(f"out must be a {kinds} file{more}, not {out}", param="out")
    if out.suffix == ".parquet" and not layout.columns:
        raise ConfigError(f"out: {layout.what} cannot be written to a Parquet file; write a .jsonl file", param="out")
    _create_folder(out.absolute().parent)
    if out.is_dir():
        raise ConfigError(f"out: {out} is a folder; pass the name of a file", param="out")
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.unfinished")
    existed = out.is_file()
    callers_error: OSError | None = None
    try:
        with _open_private(unfinished) as raw:
            file = _ParquetFile(raw, out, layout.columns) if out.suffix == ".parquet" else _JsonLinesFile(raw, out)
            try:
                yield file
            except OSError as error:
                callers_error = error
                raise
            finally:
                file.close()
            raw.flush()
            os.fsync(raw.fileno())
        unfinished.replace(out)
        file.replaced = int(existed)
    except OSError as error:
        if error is callers_error:
            raise
        raise _write_error(out, error) from None
    finally:
        unfinished.unlink(missing_ok=True)


def _write_error(out: Path, error: OSError) -> ConfigError:
    return ConfigError(f"out: {out} cannot be written ({error.strerror or error})", param="out")


def _create_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: the folder {folder} cannot be created ({error.strerror})", param="out") from None
    return folder


@contextmanager
def _open_private(path: Path) -> Iterator[IO[bytes]]:
    # Readable by the owner only: recordings may be confidential.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        yield file


def to_file_name(session: str) -> str:
    """Return a unique file name for a session: its id, percent-encoded except for colons, which become `~`."""
    return quote(session, safe="").replace("~", "%7E").replace("%3A", "~")


def encode_json(record: object) -> bytes:
    """Encode a record as JSON. Arrays become lists, with null for NaN."""
    try:
        return orjson.dumps(record, default=_to_fragment)
    except TypeError:  # lone surrogates, from agents that cut text in the middle of a character
        try:
            return json.dumps(record, default=_to_list).encode()
        except RecursionError:
            raise UnwritableRecord("a record that is nested too deeply for JSON") from None


def _to_fragment(value: object) -> Json:
    return orjson.Fragment(_array(value)) if isinstance(value, np.ndarray) else msgspec.to_builtins(value)


def _to_list(value: object) -> Json:
    return orjson.loads(_array(value)) if isinstance(value, np.ndarray) else msgspec.to_builtins(value)


def _array(value: np.ndarray) -> bytes:
    # Convert to 64-bit floats: the shortest decimal form of a 32-bit float parses as a different 64-bit float.
    wide = value.astype(np.float64) if value.dtype.kind == "f" else value
    return orjson.dumps(np.ascontiguousarray(wide), option=orjson.OPT_SERIALIZE_NUMPY)


class _JsonLinesFile(OutputFile):
    def __init__(self, raw: IO[bytes], out: Path) -> None:
        self._raw, self._out = raw, out

    def add(self, record: Mapping[str, Json]) -> None:
        line = encode_json(record) + b"\n"
        try:
            self._raw.write(line)
        except OSError as error:
            raise _write_error(self._out, error) from None
        self.records += 1

    def close(self) -> None:
        pass


class _FolderOutput(OutputFile):
    """A folder with one file per record. Each file is written atomically, and files written before a failure are kept."""

    def __init__(self, folder: Path, named_after: str) -> None:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"out: {folder} is a file, but a folder is needed; choose a different name", param="out")
        self._folder = folder
        self._named_after = named_after
        self._before = {path.name for path in folder.glob("*.json")}
        self.others = len(self._before)

    def add(self, record: Mapping[str, Json]) -> None:
        name = to_file_name(str(record[self._named_after]))
        if not self.records:
            _create_folder(self._folder)
        unfinished = self._folder / f".{name}.{os.getpid()}.unfinished"
        try:
            with _open_private(unfinished) as file:
                file.write(encode_json(record) + b"\n")
            unfinished.replace(self._folder / f"{name}.json")
        except OSError as error:
            raise ConfigError(f"out: {self._folder} cannot be written to ({error.strerror})", param="out") from None
        finally:
            unfinished.unlink(missing_ok=True)
        self.records += 1
        if f"{name}.json" in self._before:
            self.replaced += 1
            self.others -= 1

    def close(self) -> None:
        pass


class _ParquetFile(OutputFile):
    def __init__(self, raw: IO[bytes], out: Path, columns: Mapping[str, str]) -> None:
        self._out = out
        if find_spec("pyarrow") is None:
            raise ConfigError(
                "out: writing a Parquet file requires pyarrow; run `pip install 'turngate[parquet]'`, or write a .jsonl file",
                param="out",
            )
        self._arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
        self._schema = self._arrow.schema([(name, self._type(kind)) for name, kind in columns.items()])
        self._writer = parquet.ParquetWriter(raw, self._schema, compression="zstd")
        self._waiting: list[Mapping[str, Json]] = []
        self._tokens = 0

    def _type(self, kind: str) -> Any:
        arrow = self._arrow
        if kind.endswith("[]"):
            return arrow.list_(self._type(kind[:-2]))
        return {
            "text": arrow.string(),
            "json": arrow.string(),
            "int": arrow.int64(),
            "id": arrow.int32(),
            "bit": arrow.int8(),
            "flag": arrow.bool_(),
            "number": arrow.float64(),
            "logprob": arrow.float32(),
        }[kind]

    def add(self, record: Mapping[str, Json]) -> None:
        texts = {  # encoded now, so that a record that cannot be encoded is left out alone
            field.name: _encode_text(record[field.name])
            for field in self._schema
            if self._arrow.types.is_string(field.type)
        }
        self._waiting.append({**record, **texts})
        self._tokens += 1000 + sum(len(value) for value in record.values() if isinstance(value, np.ndarray))
        self.records += 1
        if self._tokens > _BATCH:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._waiting:
            columns = [[record[field.name] for record in self._waiting] for field in self._schema]
            arrays = [self._array(values, field.type) for values, field in zip(columns, self._schema, strict=True)]
            try:
                self._writer.write_table(self._arrow.Table.from_arrays(arrays, schema=self._schema))
            except OSError as error:
                raise _write_error(self._out, error) from None
        self._waiting, self._tokens = [], 0

    def _array(self, values: list[Json], kind: Any) -> Any:
        if self._arrow.types.is_list(kind) and any(isinstance(v, np.ndarray) and v.dtype.kind == "f" for v in values):
            # Store NaN as null, so that no program uses it as a number.
            values = [v if v is None else self._arrow.array(v, type=kind.value_type, from_pandas=True) for v in values]
        return self._arrow.array(values, type=kind)


def _encode_text(value: Json) -> str | None:
    """Return the text for a Parquet column. Values that are not text become JSON, and lone surrogates are escaped."""
    if value is None:
        return None
    text = value if isinstance(value, str) else encode_json(value).decode()
    return text.encode("utf-8", "backslashreplace").decode()
