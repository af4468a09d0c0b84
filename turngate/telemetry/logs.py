"""Log lines as text or JSON, with secrets redacted.

A command or worker process calls `log_to_stderr` once. `set_log_context` and `log_context` attach a session to the current asyncio task.
The JSON lines that this asyncio task logs include the session, rollout and group. No code should log a key; redaction is only the last
line of defense.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Literal, TextIO

import msgspec

from turngate.types import Json

Format = Literal["text", "json"]
REDACTED = "[secret]"
_MIN_SECRET_CHARS = 8  # shorter secrets are not redacted, because they would match ordinary words
# Keys that Turngate issues: session secrets, admin keys and API keys.
_OWN_SECRETS = re.compile(r"(?<![\w-])(?:tg-[0-9a-f]{4}|tga-|tgp-[0-9a-f]{8}-)[\w-]{43}(?![\w-])", re.ASCII)
# Keys in headers and URLs, from any issuer.
_KEY_AFTER_NAME = re.compile(r"(?i)(\b(?:bearer|x-api-key:?|x-goog-api-key:?|api[-_]?key[=:])\s*)[\w.~+/=-]{8,}")
# A user name in a URL, with or without a password. The password may contain a slash, although a slash should be encoded.
_URL_CREDENTIALS = re.compile(r"""(\w+://)(?:[^\s/@"'<>,]+|[^\s/@:"'<>,]+:[^\s@"'<>,]+)@""")
_context: ContextVar[tuple[str, Mapping[str, Json]]] = ContextVar("turngate_about", default=("", {}))
_secrets: set[str] = set()


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One JSON log line. Empty fields are omitted."""

    time: str  # UTC
    level: str
    logger: str
    message: str
    session: str = ""
    rollout: str = ""
    group: str = ""
    worker: int | None = None
    error: str = ""  # the exception's class and message
    traceback: str = ""


def set_log_context(session: str, metadata: Mapping[str, Json]) -> None:
    """Attach a session to the log lines of this asyncio task and of the tasks that it starts. `metadata` provides `rollout` and `group`."""
    _context.set((session, metadata))


@contextmanager
def log_context(session: str, metadata: Mapping[str, Json]) -> Iterator[None]:
    """Attach a session to the log lines within the block."""
    token = _context.set((session, metadata))
    try:
        yield
    finally:
        _context.reset(token)


def register_secrets(*secrets: str) -> None:
    """Redact these strings from all log lines. Strings of fewer than 8 characters are ignored."""
    _secrets.update(secret for secret in secrets if len(secret) >= _MIN_SECRET_CHARS)


def redact_known(text: str) -> str:
    """Redact the keys that Turngate issues, and all registered secrets."""
    for secret in _secrets:
        if secret in text:
            text = text.replace(secret, REDACTED)
    return _OWN_SECRETS.sub(REDACTED, text)


def redact(text: str) -> str:
    """Redact known secrets, keys that follow names such as `Bearer` or `api_key=`, and credentials in URLs."""
    text = redact_known(text)
    text = _KEY_AFTER_NAME.sub(rf"\1{REDACTED}", text)
    return _URL_CREDENTIALS.sub(rf"\1{REDACTED}@", text)


@contextmanager
def log_to_stderr(format: Format = "text", level: int = logging.INFO, *, worker: int | None = None) -> Iterator[None]:
    """Log to standard error within the block. `level` applies to Turngate's loggers; for other libraries, it is at least WARNING."""
    handler = SafeStreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(worker) if format == "json" else TextFormatter(worker))
    root, own = logging.getLogger(), logging.getLogger("turngate")
    levels = root.level, own.level
    root.addHandler(handler)
    root.setLevel(max(level, logging.WARNING))
    own.setLevel(level)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(levels[0])
        own.setLevel(levels[1])


class SafeStreamHandler(logging.StreamHandler[TextIO]):
    """A stream handler that reports write errors without the content of the line, which `logging` itself would print unredacted."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._is_terminal = stream.isatty()

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_terminal:
            self.stream = sys.stderr  # a live display replaces sys.stderr, and prints lines above itself
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = type(sys.exc_info()[1]).__name__
        message = f"could not write a log line from {record.filename}:{record.lineno}: {error}"
        report = logging.LogRecord(record.name, logging.ERROR, record.pathname, record.lineno, message, None, None)
        with suppress(OSError, ValueError):  # standard error is closed
            self.stream.write(self.format(report) + self.terminator)
            self.flush()


class TextFormatter(logging.Formatter):
    def __init__(self, worker: int | None = None) -> None:
        super().__init__("%(asctime)s %(message)s" if worker is None else f"%(asctime)s worker {worker}: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record = copy.copy(record)
        record.msg, record.args = _message(record), None
        return _encodable(redact(super().format(record)))


class JsonFormatter(logging.Formatter):
    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        session, metadata = _context.get()
        error = record.exc_info[1] if record.exc_info else None
        line = LogLine(
            time=f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            level=record.levelname.lower(),
            logger=record.name,
            message=_encodable(redact(_message(record))),
            session=_encodable(session),
            rollout=_metadata_text(metadata, "rollout"),
            group=_metadata_text(metadata, "group"),
            worker=self._worker,
            error="" if error is None else _encodable(redact(f"{type(error).__name__}: {error}")),
            traceback=_encodable(redact(self.formatException(record.exc_info)))
            if record.exc_info and error is not None
            else "",
        )
        return msgspec.json.encode(line).decode()


def _message(record: logging.LogRecord) -> str:
    """Return a record's message. If the arguments do not match the format string, append them, so that the line is not lost."""
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError):
        values = record.args.values() if isinstance(record.args, Mapping) else record.args or ()
        return " ".join(map(str, (record.msg, *values)))  # not quoted, so that secrets are still recognized


def _encodable(text: str) -> str:
    """Escape lone surrogates, which file names and foreign input may contain."""
    return text.encode("utf-8", "backslashreplace").decode()


def _metadata_text(metadata: Mapping[str, Json], field: str) -> str:
    value = metadata.get(field)
    return _encodable(redact(value)) if isinstance(value, str) else ""
