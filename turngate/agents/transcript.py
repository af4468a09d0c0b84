"""Read an agent's transcript, which is its own record of a run.

The files are not trusted, because the agent wrote them. Links are not followed, sizes are limited, and the content is used only to compare
it with the trace (`rollout/transcript_diff.py`). The agent's description contains the expressions that extract turns from the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jmespath
import msgspec

from turngate.agents.spec import Transcript
from turngate.errors import AgentError

# Limits that keep reading fast, even if the agent has written huge files.
MAX_FILE_BYTES = 64_000_000
MAX_LINE_BYTES = 16_000_000  # of one JSON document: a line of a JSONL file, or a whole JSON file
MAX_RECORDS = 100_000  # per file


class TranscriptCall(msgspec.Struct, frozen=True):
    """A tool call. `arguments` contains the parsed JSON, or the text itself if it is not valid JSON."""

    name: str
    arguments: Any = None


class TranscriptTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One reply of the model, as recorded in a transcript or in the trace."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[TranscriptCall, ...] = ()
    id: str = ""


class Transcripts(msgspec.Struct, frozen=True):
    """The turns in the transcripts of one run: those of the main conversation, and those of each sub-agent."""

    main: tuple[TranscriptTurn, ...] = ()
    subagents: tuple[tuple[TranscriptTurn, ...], ...] = ()


def read_transcripts(spec: Transcript, home: Path, stdout: bytes = b"") -> Transcripts:
    """Read the turns from a copy of the agent's HOME, or from its standard output. If there is no transcript, return no turns.

    Raise `AgentError` if a transcript is too large.
    """
    if spec.stdout:
        return Transcripts(tuple(_turns(spec, _records(spec, stdout))))
    main: list[TranscriptTurn] = []
    subagents: list[tuple[TranscriptTurn, ...]] = []
    for file in _files(home, spec.path):
        records = _records(spec, file.read_bytes())
        turns = tuple(_turns(spec, records))
        if spec.subagent and any(_search(spec.subagent, record) for record in records):
            subagents.append(turns)
        else:
            main.extend(turns)
    if spec.subagents:
        subagents += [tuple(_turns(spec, _records(spec, file.read_bytes()))) for file in _files(home, spec.subagents)]
    return Transcripts(tuple(main), tuple(subagents))


def _files(home: Path, pattern: str) -> Iterator[Path]:
    """Yield the files below `home` that match `pattern`, sorted by name. Skip links, because they could point outside `home`."""
    for file in sorted(home.glob(pattern)):
        inside = file.relative_to(home)
        linked = any((home / part).is_symlink() for part in (inside, *inside.parents) if part != Path())
        if not linked and file.is_file():
            if file.stat().st_size > MAX_FILE_BYTES:
                raise AgentError(f"transcript: {inside} is larger than {MAX_FILE_BYTES} bytes", param="transcript")
            yield file


def _records(spec: Transcript, data: bytes) -> list[Any]:
    """Parse the records of a transcript. Raise `AgentError` if it is too large.

    Skip lines that are not valid JSON, because they are other output or were truncated. An invalid JSON file has no records.
    """
    if spec.format == "json":
        return _json_records(spec, data)
    lines = data.splitlines()
    if len(lines) > MAX_RECORDS:
        raise AgentError(f"the transcript has more than {MAX_RECORDS} lines", param="transcript")
    if any(len(line) > MAX_LINE_BYTES for line in lines):
        raise AgentError(f"the transcript has a line longer than {MAX_LINE_BYTES} bytes", param="transcript")
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return records


def _json_records(spec: Transcript, data: bytes) -> list[Any]:
    if len(data) > MAX_LINE_BYTES:
        raise AgentError(f"the transcript is larger than {MAX_LINE_BYTES} bytes", param="transcript")
    try:
        values = _search(spec.records, json.loads(data))
    except (ValueError, RecursionError):
        return []
    if not isinstance(values, list):
        return []
    if len(values) > MAX_RECORDS:
        raise AgentError(f"the transcript has more than {MAX_RECORDS} records", param="transcript")
    return values


def _turns(spec: Transcript, records: Iterable[Any]) -> Iterator[TranscriptTurn]:
    """Assemble the turns of a transcript from the parts in its records, and yield them."""
    parts: dict[str, TranscriptTurn] = {}  # ordered by the first part of each turn, which is the order of the turns
    open_turn: TranscriptTurn | None = None
    key = ""
    for n, record in enumerate(records):
        value = _search(spec.turn, record)
        part = _turn(value) if isinstance(value, Mapping) else None
        if spec.merge == "end":
            if spec.begin and _search(spec.begin, record):
                open_turn = None
            open_turn = _join_parts(open_turn, part) if part else open_turn
            if open_turn and (ended := _search(spec.end, record)):
                parts[str(n)] = msgspec.structs.replace(open_turn, id=ended if isinstance(ended, str) else "")
                open_turn = None
        elif part:
            if spec.merge != "id" or not key or part.id:
                key = part.id if spec.merge != "none" and part.id else f"\0{n}"
            parts[key] = _join_parts(parts.get(key), part) if spec.merge == "id" else part
    yield from parts.values()
    if open_turn:  # the end of this turn was not recorded
        yield open_turn


def _search(expression: str, record: Any) -> Any:
    try:
        return jmespath.search(expression, record)
    except jmespath.exceptions.JMESPathError:  # a function in the expression rejects the types in this record
        return None


def _turn(value: Mapping[str, Any]) -> TranscriptTurn:
    calls = value.get("calls")
    return TranscriptTurn(
        text=_text(value.get("text")),
        reasoning=_text(value.get("reasoning")),
        calls=tuple(_call(call) for call in calls or () if isinstance(call, Mapping))
        if isinstance(calls, list)
        else (),
        id=_text(value.get("id")),
    )


def _call(value: Mapping[str, Any]) -> TranscriptCall:
    return TranscriptCall(_text(value.get("name")), parse_arguments(value.get("arguments")))


def parse_arguments(arguments: Any) -> Any:
    """Parse arguments if they are JSON text. Return anything else unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _join_parts(before: TranscriptTurn | None, part: TranscriptTurn) -> TranscriptTurn:
    if before is None:
        return part
    return TranscriptTurn(
        text=before.text + part.text,
        reasoning=before.reasoning + part.reasoning,
        calls=before.calls + part.calls,
        id=before.id or part.id,
    )


# ---- comparing ----
