"""The file format of golden recordings: packed, so that files are small and their diffs readable.

    {"name", "agent", "version", "dialect", "exchanges": [{
        "request": {"method", "path", "headers", "body"},
        "reply": {"status", "headers", "events" or "body"}
    }]}

`path` includes the query; `events` are those of a stream: {"event": its optional name, "data": …}. Bodies and data are JSON values,
so whitespace is not kept. In a file, objects with an @ are references; exchanges are counted from 0:

    {"@same": 3}                             the same field of exchange 3
    {"@first": 5, "@of": 3, "@then": […]}    a list that starts with the first five items of the same field of exchange 3
    {"@sent": "tools"}                       in a reply: that field of its own request's body
    {"@lines": ["…", "…"]}                   a text of several lines

Written by `tools/record_golden.py`, read by the tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

Json = Any
FOLDER = Path(__file__).parent
NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))
# Generated ids: a UUID, or hexadecimal digits after a prefix. Their placeholders have the same format.
IDS = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    # Item ids of a Responses reply are the reply's digits plus two more.
    r"|(?:(?<![0-9A-Za-z])|(?<=_tg))(?:[0-9a-f]{64}|[0-9a-f]{32}|[0-9a-f]{24})(?=(?:[0-9a-f]{2})?(?![0-9A-Za-z]))"
)
_SMALL = 60  # up to this many characters, no reference is used
_LONG = 100  # longer texts are written line by line
_WIDE = 120


@cache
def read(name: str) -> Json:
    """Read and unpack a recording. Do not modify the cached result."""
    found = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return {**found, "exchanges": unpack(found["exchanges"])}


def text(recording: Json) -> str:
    """The file content of a recording."""
    return _format({**recording, "exchanges": pack(recording["exchanges"])}) + "\n"


def value(body: bytes) -> Json:
    """Decode a body for the recording."""
    if not body:
        return None
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


def decode_payload(content_type: str, body: bytes) -> Json:
    """Decode a reply's events or body for the recording."""
    if not content_type.startswith("text/event-stream"):
        return {"body": value(body)}
    events = []
    for block in re.split(r"\r?\n\r?\n", body.decode()):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" in fields:
            named = {"event": fields["event"]} if "event" in fields else {}
            events.append({**named, "data": value(fields["data"].encode())})
    return {"events": events}


# ── packing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def pack(exchanges: Sequence[Json]) -> list[Json]:
    return [_pack_exchange(exchange, exchanges[:n]) for n, exchange in enumerate(exchanges)]


def _pack_exchange(exchange: Json, before: Sequence[Json]) -> Json:
    request, reply = exchange["request"], exchange["reply"]
    requests, replies = [e["request"] for e in before], [e["reply"] for e in before]
    body = request["body"]
    short = {
        **request,
        "headers": _reference(request["headers"], [r["headers"] for r in requests]),
        "body": {name: _reference(value, [_field(r, name) for r in requests]) for name, value in body.items()}
        if isinstance(body, dict)
        else body,
    }
    packed_reply = {
        name: _reference(value, [r["headers"] for r in replies])
        if name == "headers"
        else _reference_request(value, body)
        for name, value in reply.items()
    }
    return {"request": short, "reply": packed_reply}


def _field(request: Json, name: str) -> Json:
    return request["body"].get(name) if isinstance(request["body"], dict) else None


def _reference(value: Json, earlier: Sequence[Json]) -> Json:
    """Replace a value, or the start of a list, by a reference to an earlier exchange."""
    if len(_plain(value)) <= _SMALL:
        return value
    for n, old in enumerate(earlier):
        if _plain(old) == _plain(value):
            return {"@same": n}
    if isinstance(value, list):
        common = [_common_prefix(value, old) for old in earlier]
        count = max(common, default=0)
        if count:
            return {"@first": count, "@of": common.index(count), "@then": _split_lines(value[count:])}
    return _split_lines(value)


def _common_prefix(new: list[Json], old: Json) -> int:
    """Length of the common prefix."""
    pairs = zip(new, old, strict=False) if isinstance(old, list) else ()
    return next((n for n, (a, b) in enumerate(pairs) if _plain(a) != _plain(b)), min(len(new), len(old or ())))


def _reference_request(value: Json, sent: Json) -> Json:
    """Replace parts of a reply that repeat fields of its request."""
    if isinstance(value, dict | list) and isinstance(sent, dict) and len(_plain(value)) > _SMALL:
        for name, own in sent.items():
            if _plain(own) == _plain(value):
                return {"@sent": name}
    match value:
        case dict():
            return {name: _reference_request(item, sent) for name, item in value.items()}
        case list():
            return [_reference_request(item, sent) for item in value]
        case _:
            return _split_lines(value)


def _split_lines(value: Json) -> Json:
    match value:
        case str() if len(value) > _LONG and "\n" in value:
            return {"@lines": value.split("\n")}
        case dict():
            assert not any(name.startswith("@") for name in value), "names must not start with @"
            return {name: _split_lines(item) for name, item in value.items()}
        case list():
            return [_split_lines(item) for item in value]
        case _:
            return value


def _plain(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)


# ── unpacking ───────────────────────────────────────────────────────────────────────────────────────────────────────


def unpack(exchanges: Sequence[Json]) -> list[Json]:
    whole: list[Json] = []
    for exchange in exchanges:
        request, reply = exchange["request"], exchange["reply"]
        body = request["body"]
        if isinstance(body, dict):
            body = {n: _restore(v, [_field(e["request"], n) for e in whole]) for n, v in body.items()}
        headers = _restore(request["headers"], [e["request"]["headers"] for e in whole])
        reply_headers = _restore(reply["headers"], [e["reply"]["headers"] for e in whole])
        rest = {name: _restore(value, (), body) for name, value in reply.items() if name != "headers"}
        sent = {**request, "headers": headers, "body": body}
        whole.append({"request": sent, "reply": {"status": reply["status"], "headers": reply_headers, **rest}})
    return whole


def _restore(value: Json, earlier: Sequence[Json] = (), sent: Json = None) -> Json:
    match value:
        case {"@same": int(n)}:
            return earlier[n]
        case {"@first": int(count), "@of": int(n), "@then": list(then)}:
            return [*earlier[n][:count], *_restore(then)]
        case {"@sent": str(name)}:
            return sent[name]
        case {"@lines": list(lines)}:
            return "\n".join(lines)
        case dict():
            return {name: _restore(item, (), sent) for name, item in value.items()}
        case list():
            return [_restore(item, (), sent) for item in value]
        case _:
            return value


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _format(value: Json, depth: int = 0, ahead: int = 0) -> str:
    """JSON with short values on one line. `ahead`: the width used before the value on its line."""
    line = _plain(value)
    if not isinstance(value, dict | list) or not value or depth + ahead + len(line) <= _WIDE:
        return line
    inside = " " * (depth + 1)
    if isinstance(value, list):
        rows = [inside + _format(item, depth + 1) for item in value]
    else:
        rows = [
            f"{inside}{_plain(name)}: {_format(item, depth + 1, len(_plain(name)) + 2)}" for name, item in value.items()
        ]
    opening, closing = "[]" if isinstance(value, list) else "{}"
    return f"{opening}\n" + ",\n".join(rows) + f"\n{' ' * depth}{closing}"
