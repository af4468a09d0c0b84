"""The targets that are fuzzed without HTTP: decoders, relays, parsers of replies, the verifier, and files that users and agents write.

A target has a strategy for its input and a check. The check raises every error except those that a user may see.
"""

from __future__ import annotations

import json
import random
import tempfile
import tomllib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st

from tests.fuzz.damaged_sessions import check_verify, session_damages
from tests.fuzz.json_values import VALUES, bodies, damaged, encode
from tests.fuzz.relay_calls import check_relay, relay_calls
from tests.fuzz.requests import read_calls
from turngate.agents.spec import CATALOG, Transcript, load_spec, parse_spec
from turngate.agents.transcript import read_transcripts
from turngate.config import load_config
from turngate.dialects import DIALECTS, Dialect, WireRequest
from turngate.errors import AgentError, BadRequest, ConfigError, TaskError, TooLarge
from turngate.render.call_syntax import DEEPSEEK, GEMMA, GLM, HERMES, LFM, LLAMA, MISTRAL, Syntax, parse_calls
from turngate.render.parse import Parsed, Parser
from turngate.rollout.transcript_diff import compare_turns
from turngate.tasks.loaders.harbor import load_task
from turngate.tasks.loaders.load import task_from_row
from turngate.types import CallDelta, Delta, Tool

Json = Any
SYNTAXES = {one.name: one for one in (HERMES, DEEPSEEK, MISTRAL, LLAMA, LFM, GEMMA, GLM)}
_MEMORY = Path("/dev/shm")
_TOOL = {"name": "read", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}
TOOLS = (Tool("read", {"type": "function", "function": _TOOL}),)


class Target(msgspec.Struct, frozen=True):
    """A function to fuzz. `check` receives what `inputs` draws, or the bytes that the coverage-guided fuzzer derives from `seeds`."""

    name: str
    inputs: st.SearchStrategy[Any]
    check: Callable[[Any], None]
    seeds: Callable[[], list[bytes]] = list
    covers: str = ""  # the folder whose lines guide the coverage-guided fuzzer; empty: it skips this target


# ── decoders ────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_decoder(dialect: Dialect, body: bytes) -> None:
    """Decode a request completely: the call, each message and the tools."""
    for verb in ("generate", "count"):
        try:
            call = dialect.decode(WireRequest(body, verb=verb, model="m"))  # type: ignore[arg-type]
            for index in range(len(call.history.raws)):
                call.history.decode(index)
            if call.tools is not None:
                call.tools.decode()
        except (BadRequest, TooLarge) as error:
            assert error.message, "an error has a message"
            msgspec.json.decode(dialect.encode_error(error))


def decoder_target(dialect: Dialect) -> Target:
    documents = st.sampled_from(read_calls(dialect.name))
    return Target(
        f"decode-{dialect.name}",
        bodies(damaged(documents, most=4)),
        lambda body: check_decoder(dialect, body),
        lambda: [json.dumps(call).encode() for call in read_calls(dialect.name)],
        "turngate/dialects",
    )


# ── parsers of replies ──────────────────────────────────────────────────────────────────────────────────────────────

_PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", " ", '{"name": "read", "arguments": {"n": 1}}'),
    *(
        "<function=read>",
        "</function>",
        "<parameter=n>",
        "</parameter>",
        '{"name": 1}',
        "[TOOL_CALLS]",
        "[ARGS]",
        "[/THINK]",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<|python_tag|>", "<|tool_call_start|>", "<|tool_call_end|>", "read(n=1)", "[read(n=-1, m='x')]", "```json\n"),
    *(
        "<|tool_call>",
        "<tool_call|>",
        "call:read{n:1}",
        '<|"|>',
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    *("1e999", "[" * 200, "{" * 60, "'", '"', "\\", "é𝕏", "\0", "9" * 400, "read", "_" * 30, "(" * 250, "-" * 500),
]
TEXTS = st.lists(st.sampled_from(_PIECES) | st.text(max_size=6), max_size=14).map("".join)


def check_parser(syntax: Syntax, text: str) -> None:
    """Parse a reply, whole and in pieces: the message is the same, and the events contain all of it."""
    for options in ({}, {"tools": TOOLS}, {"tools": TOOLS, "in_reasoning": True}, {"tools": TOOLS, "one_call": True}):
        whole = _parse(syntax, text, None, options)[1]
        events, parsed = _parse(syntax, text, random.Random(len(text)), options)
        assert msgspec.json.encode(_content(parsed)) == msgspec.json.encode(_content(whole))
        shown = "".join(event.text for event in events if isinstance(event, Delta) and event.kind == "content")
        assert shown == parsed.message.content
        assert [e.call for e in events if isinstance(e, CallDelta)] == list(parsed.message.tool_calls)
        for call in parsed.message.tool_calls:
            assert isinstance(json.loads(call.arguments), dict), "arguments are a JSON object"


def _parse(
    syntax: Syntax, text: str, cuts: random.Random | None, options: Json
) -> tuple[list[Delta | CallDelta], Parsed]:
    parser, events = Parser(syntax, **options), []
    while text:
        size = len(text) if cuts is None else cuts.randint(1, 9)
        events += parser.feed(text[:size])
        text = text[size:]
    rest, parsed = parser.finish()
    return events + rest, parsed


def _content(parsed: Parsed) -> Json:
    message = parsed.message
    return [message.content, message.reasoning, [(c.name, c.arguments) for c in message.tool_calls]]


def check_call_forms(text: str) -> None:
    for syntax in (LFM, GEMMA):
        with suppress(ValueError):
            for name, arguments in parse_calls(syntax, text, ()):
                assert isinstance(name, str) and isinstance(json.loads(arguments), dict)


def parser_target(syntax: Syntax) -> Target:
    return Target(
        f"parse-{syntax.name}",
        TEXTS,
        lambda text: check_parser(syntax, text if isinstance(text, str) else text.decode("utf-8", "replace")),
        lambda: [piece.encode() for piece in _PIECES] + [b"".join(piece.encode() for piece in _PIECES[:16])],
        "turngate/render",
    )


# ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def to_toml(document: Json) -> bytes:
    """Write a document as TOML. Only its first level has lines of its own. Null is left out, as TOML has none."""
    if not isinstance(document, dict):
        return encode(document)
    lines = [f"{json.dumps(str(key))} = {_inline(value)}" for key, value in document.items() if value is not None]
    return "\n".join(lines).encode("utf-8", "replace")


def _inline(value: Json, depth: int = 0) -> str:
    if depth > 400:
        return "1"
    if isinstance(value, dict):
        inner = (f"{json.dumps(str(k))} = {_inline(v, depth + 1)}" for k, v in value.items() if v is not None)
        return "{" + ", ".join(inner) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_inline(one, depth + 1) for one in value if one is not None) + "]"
    return json.dumps(value)


@st.composite
def toml_files(draw: Callable[..., Any], documents: st.SearchStrategy[Json]) -> bytes:
    raw = to_toml(draw(damaged(documents, most=3)))
    match draw(st.integers(0, 9)):
        case 0:
            at = draw(st.integers(0, len(raw)))
            return raw[:at] + draw(st.binary(max_size=3)) + raw[at:]
        case 1:
            return raw + draw(
                st.sampled_from([b"\nx = " + b"[" * 3000, b"\n[a.b]\n[a]\nb = 1", b"\nx = 1e999", b"\n\xff"])
            )
        case _:
            return raw


@cache
def _read_catalog() -> list[Json]:
    return [tomllib.loads(file.read_text()) for file in sorted(CATALOG.glob("*.toml"))]


def check_agent_file(raw: bytes) -> None:
    with suppress(AgentError, UnicodeDecodeError):
        parse_spec(raw.decode("utf-8"), "agent.toml")


_SETTINGS = {
    "engine": "scripted",
    "model": "m",
    "port": 8700,
    "engine_url": ["http://127.0.0.1:8000"],
    "workers": 2,
    "max_context": 1000,
    "durability": "memory",
}


def check_settings(raw: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=_MEMORY, suffix=".toml") as file:
        file.write(raw)
        file.flush()
        with suppress(ConfigError):
            load_config(Path(file.name), {})


_TASK_FILE = {
    "version": "1.0",
    "metadata": {"difficulty": "trivial"},
    "agent": {"timeout_sec": 600},
    "verifier": {"timeout_sec": 60, "env": {"A": "${A:-b}"}},
    "environment": {"docker_image": "x", "cpus": 1, "memory": "2G", "workdir": "/app"},
    "turngate": {"setup": "true"},
}


def check_task_file(raw: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=_MEMORY, prefix="turngate-fuzz-") as folder:
        (Path(folder) / "task.toml").write_bytes(raw)
        (Path(folder) / "instruction.md").write_text("Fix it.")
        (Path(folder) / "tests").mkdir()
        (Path(folder) / "tests" / "test.sh").write_text("true")
        with suppress(TaskError):
            load_task(Path(folder))


_ROWS = [
    {"id": "a", "instruction": "Fix it.", "files": {"a.py": "x"}, "setup": "true", "timeout_s": 5, "cpus": 1},
    {
        "id": "b",
        "instruction": "Fix it.",
        "grader": {"type": "rubric", "parts": [{"name": "t", "grader": {"type": "script", "script": "true"}}]},
        "solution": {"patch": "x"},
        "tools": [{"name": "ask", "description": "Ask.", "schema": {"type": "object"}}],
        "metadata": {"x": 1},
    },
    {
        "instance_id": "c-1",
        "repo": "a/b",
        "base_commit": "0" * 40,
        "problem_statement": "Fix it.",
        "test_patch": "diff --git a/x b/x",
        "FAIL_TO_PASS": '["t"]',
        "PASS_TO_PASS": [],
        "version": "1",
    },
]


def check_task_row(row: Json) -> None:
    if isinstance(row, bytes):
        try:
            row = msgspec.json.decode(row)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
    with suppress(TaskError):
        task_from_row(row, "rows.jsonl:1")


@cache
def _transcripts() -> list[Transcript]:
    specs = [load_spec(file) for file in sorted(CATALOG.glob("*.toml"))]
    return [msgspec.structs.replace(one.transcript, stdout=True) for one in specs if one.transcript is not None]


_RECORDS = [
    {"type": "assistant", "message": {"id": "m", "role": "assistant", "content": [{"type": "text", "text": "Hi"}]}},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "a"}, {"type": "tool_use", "input": {}}],
    },
    {"type": "response_item", "payload": {"type": "function_call", "name": "read", "arguments": "{}", "call_id": "c"}},
    {"info": {"role": "assistant"}, "parts": [{"type": "tool", "tool": "read", "state": {"input": {"path": "a"}}}]},
    {
        "messages": [
            {"role": "assistant", "content": "Hi", "tool_calls": [{"function": {"name": "r", "arguments": "{"}}]}
        ]
    },
]


def check_transcript(raw: bytes) -> None:
    """Read what an agent claims to have done, with the expressions of every agent."""
    for spec in _transcripts():
        with suppress(AgentError):
            found = read_transcripts(spec, Path("/nonexistent"), raw)
            compare_turns(found.main, found.main)


_RECORD_LINES = st.lists(bodies(damaged(st.sampled_from(_RECORDS)) | VALUES), max_size=4).map(b"\n".join)


TARGETS: tuple[Target, ...] = (
    *map(decoder_target, DIALECTS),
    Target("relay", relay_calls(), check_relay),
    Target("verify", session_damages(), check_verify),
    *map(parser_target, SYNTAXES.values()),
    Target(
        "call-forms",
        TEXTS,
        lambda text: check_call_forms(text if isinstance(text, str) else text.decode("utf-8", "replace")),
    ),
    Target(
        "agent-file",
        toml_files(st.deferred(lambda: st.sampled_from(_read_catalog()))),
        check_agent_file,
        lambda: [to_toml(one) for one in _read_catalog()],
        "turngate/agents",
    ),
    Target("settings-file", toml_files(st.just(_SETTINGS)), check_settings),
    Target("task-file", toml_files(st.just(_TASK_FILE)), check_task_file),
    Target("task-row", damaged(st.sampled_from(_ROWS), most=4), check_task_row),
    Target(
        "transcript",
        _RECORD_LINES,
        check_transcript,
        lambda: [json.dumps(one).encode() for one in _RECORDS],
        "turngate/agents",
    ),
)
