"""Log lines: as text for people, or as JSON for machines, with what they are about and without any secret.

`begun` is for whoever owns the process: a command, or a worker. `about` says whose work goes on from here in this task (a
model call's, a rollout's), so that a line written anywhere below carries the session, the rollout and the group. `keep_out` is the last
line of defence: nothing should ever write a key into a line, and if something does, it is not in the line.
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
HIDDEN = "[secret]"
_SHORTEST = 8  # of what is kept out: something shorter is in every other word
# What we give out: the secret of a session, and an admin key.
_OURS = re.compile(r"(?<![\w-])(?:tg-[0-9a-f]{4}|tga-)[\w-]{43}(?![\w-])", re.ASCII)
# What a header or a URL would carry, whoever gave it out.
_CARRIED = re.compile(r"(?i)(\b(?:bearer|x-api-key:?|x-goog-api-key:?|api[-_]?key[=:])\s*)[\w.~+/=-]{8,}")
# A user, or a user and a password, which may hold a slash though it should not.
_IN_URL = re.compile(r"""(\w+://)(?:[^\s/@"'<>,]+|[^\s/@:"'<>,]+:[^\s@"'<>,]+)@""")
_about: ContextVar[tuple[str, Mapping[str, Json]]] = ContextVar("turngate_about", default=("", {}))
_kept_out: set[str] = set()


class Line(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line of JSON. What is not known is left out."""

    time: str  # UTC
    level: str
    logger: str
    message: str
    session: str = ""
    rollout: str = ""
    group: str = ""
    worker: int | None = None
    error: str = ""  # the exception's class and words
    traceback: str = ""


def about(session: str, facts: Mapping[str, Json]) -> None:
    """From here on, in this task and those it starts. `facts`: the session's metadata, of which `rollout` and `group` are told."""
    _about.set((session, facts))


@contextmanager
def within(session: str, facts: Mapping[str, Json]) -> Iterator[None]:
    """The same, for as long as the block runs."""
    before = _about.set((session, facts))
    try:
        yield
    finally:
        _about.reset(before)


def keep_out(*secrets: str) -> None:
    """These never appear in a line."""
    _kept_out.update(secret for secret in secrets if len(secret) >= _SHORTEST)


def hidden(text: str) -> str:
    """The same without what is known to be a secret: keys that were read, and what we give out. For what agents left, too."""
    for secret in _kept_out:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    return _OURS.sub(HIDDEN, text)


def clean(text: str) -> str:
    """The same without whatever looks like a secret."""
    text = hidden(text)
    text = _CARRIED.sub(rf"\1{HIDDEN}", text)
    return _IN_URL.sub(rf"\1{HIDDEN}@", text)


@contextmanager
def begun(format: Format = "text", level: int = logging.INFO, *, worker: int | None = None) -> Iterator[None]:
    """All lines go to standard error in this format, for as long as the block runs. `level`: of our own; of others, warnings."""
    handler = Lines(sys.stderr)
    handler.setFormatter(JsonLines(worker) if format == "json" else TextLines(worker))
    root, ours = logging.getLogger(), logging.getLogger("turngate")
    before = root.level, ours.level
    root.addHandler(handler)
    root.setLevel(max(level, logging.WARNING))
    ours.setLevel(level)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before[0])
        ours.setLevel(before[1])


class Lines(logging.StreamHandler[TextIO]):
    """Where a line cannot be written, that is all that is said: by itself `logging` would print its words and values as they are."""

    def handleError(self, record: logging.LogRecord) -> None:
        failed = type(sys.exc_info()[1]).__name__
        said = f"a line from {record.filename}:{record.lineno} could not be written: {failed}"
        told = logging.LogRecord(record.name, logging.ERROR, record.pathname, record.lineno, said, None, None)
        with suppress(OSError, ValueError):  # nobody reads them any more
            self.stream.write(self.format(told) + self.terminator)
            self.flush()


class TextLines(logging.Formatter):
    def __init__(self, worker: int | None = None) -> None:
        super().__init__("%(asctime)s %(message)s" if worker is None else f"%(asctime)s worker {worker}: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record = copy.copy(record)
        record.msg, record.args = _said(record), None
        return _writable(clean(super().format(record)))


class JsonLines(logging.Formatter):
    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        session, facts = _about.get()
        failed = record.exc_info[1] if record.exc_info else None
        line = Line(
            time=f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            level=record.levelname.lower(),
            logger=record.name,
            message=_writable(clean(_said(record))),
            session=_writable(session),
            rollout=_name(facts, "rollout"),
            group=_name(facts, "group"),
            worker=self._worker,
            error="" if failed is None else _writable(clean(f"{type(failed).__name__}: {failed}")),
            traceback=_writable(clean(self.formatException(record.exc_info)))
            if record.exc_info and failed is not None
            else "",
        )
        return msgspec.json.encode(line).decode()


def _said(record: logging.LogRecord) -> str:
    """Words that do not fit their values are told as they are: a line that cannot be written would be lost."""
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError):
        values = record.args.values() if isinstance(record.args, Mapping) else record.args or ()
        return " ".join(map(str, (record.msg, *values)))  # as they are, since quoted a secret is another one


def _writable(text: str) -> str:
    """Names of files and what others send may hold halves of characters, which no file takes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _name(facts: Mapping[str, Json], field: str) -> str:
    value = facts.get(field)
    return _writable(clean(value)) if isinstance(value, str) else ""
