"""Tests of the current gateway with recorded requests of real agents (`tools/record_golden.py`); no agent is needed.

Record a new agent version again: the diff shows what changed, and these tests show whether it is still supported.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import msgspec
import pytest

from tests.golden import recording
from tests.golden.recording import FOLDER, IDS, NAMES, Json
from tests.golden.replay import Replay, decode_reply, play, shape
from turngate.agents.spec import load_catalog
from turngate.dialects import DIALECTS, WireRequest
from turngate.errors import BadRequest
from turngate.server.routing import DialectRoutes, RouteMatch
from turngate.types import Call, Done, Message, Usage

# The role of each call, in the order in which the agent made them.
ROLES = {
    "aider": ["main"],
    "claude-code": ["main"] * 5,
    "claude-code-subagent": ["main", "subagent", "subagent", "main"],
    "cline": ["main"] * 5,
    "codex": ["main"] * 5,
    "continue": ["main"] * 5,
    "copilot-cli": ["main"] * 5,
    "gemini-cli": ["main"] * 5,
    "kimi-code": ["main"] * 5,
    "mini-swe-agent": ["main"] * 5,
    "opencode": ["side", *["main"] * 5],
    "openhands": ["main"] * 5,
    "opencode-subagent": ["side", "main", "subagent", "subagent", "main"],
    "pi": ["main"] * 5,
    "qwen-code": ["main"] * 5,
}


WITH_EXAMPLES = ("aider",)  # their first request contains replies that the model did not give


class Fields(NamedTuple):
    """The fields of an agent's requests."""

    used: str  # they change the call or its answer
    neutral: str = ""  # decoded, but they request the default
    ignored: str = ""  # any value is accepted


# A field that is missing here is new: find out what it means and add it.
FIELDS = {
    "aider": Fields("messages model stream"),
    "claude-code": Fields(
        "messages model system tools max_tokens thinking context_management output_config stream",
        ignored="metadata",  # signals read the session's name from it
    ),
    "cline": Fields("messages model temperature max_tokens stream stream_options"),
    "codex": Fields(
        "input model tools reasoning include stream prompt_cache_key store",
        neutral="tool_choice parallel_tool_calls",
        ignored="client_metadata",  # signals read the thread's name from it
    ),
    "continue": Fields("messages model tools max_tokens stream stream_options"),
    "copilot-cli": Fields(
        "messages model tools temperature top_p frequency_penalty presence_penalty max_tokens stream stream_options"
    ),
    "gemini-cli": Fields("contents systemInstruction tools generationConfig"),
    "kimi-code": Fields(
        "messages model tools max_tokens stream stream_options reasoning_effort",
        ignored="prompt_cache_key",
    ),
    "mini-swe-agent": Fields("messages model tools max_tokens"),
    "opencode": Fields("messages model tools max_tokens stream stream_options", neutral="tool_choice"),
    "openhands": Fields("messages model reasoning_effort tools", ignored="prompt_cache_key"),
    "pi": Fields(
        "messages model tools max_completion_tokens stream stream_options reasoning_effort",
        ignored="store",
    ),
    "qwen-code": Fields("messages model tools max_tokens stream stream_options"),
}

each_recording = pytest.mark.parametrize("name", NAMES)
_paths = DialectRoutes(DIALECTS)


def find_roles(name: str) -> list[str]:
    assert name in ROLES, f"add {name} to ROLES: the role of each of its calls, in order"
    return ROLES[name]


def find_fields(name: str) -> Fields:
    agent = recording.read(name)["agent"]
    assert agent in FIELDS, f"add {agent} to FIELDS: the fields of its requests"
    return FIELDS[agent]


def exchanges(name: str) -> list[Json]:
    found: list[Json] = recording.read(name)["exchanges"]
    return found


def route(request: Json) -> RouteMatch:
    found = _paths.match(request["path"].partition("?")[0])
    assert found is not None, f"no route for {request['path']}"
    return found


def decode(request: Json, body: Json) -> Call:
    found = route(request)
    query = dict(pair.split("=") for pair in request["path"].partition("?")[2].split("&") if pair)
    return found.dialect.decode(
        WireRequest(json.dumps(body).encode(), request["headers"], query, found.verb, found.model)
    )


def conversation(request: Json, body: Json = None) -> list[Message]:
    history = decode(request, body or request["body"]).history
    return [message for n in range(len(history.raws)) for message in history.decode(n)]


# ── requests ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_catalogue_agent_is_recorded() -> None:
    """`shell` runs any command, so it is not recorded."""
    assert {recording.read(name)["agent"] for name in NAMES} == set(load_catalog()) - {"shell"}
    assert set(ROLES) <= set(NAMES), "remove what is no longer recorded from ROLES"


@each_recording
def test_recording_is_of_catalogue_version(name: str) -> None:
    found = recording.read(name)
    spec = load_catalog()[found["agent"]].spec
    assert (found["version"], found["dialect"]) == (spec.install.version, spec.dialect), (
        f"record it again: python tools/record_golden.py {name}"
    )


@each_recording
def test_every_request_decodes(name: str) -> None:
    for exchange in exchanges(name):
        request = exchange["request"]
        call, history = decode(request, request["body"]), conversation(request)
        assert route(request).dialect.name == recording.read(name)["dialect"]
        assert not [message.unsupported for message in history if message.unsupported]
        assert history[-1].role != "assistant"
        assert call.tools is None or len(call.tools.decode()) >= 1


@each_recording
def test_repeated_answers_were_given_before(name: str) -> None:
    """Every assistant message in a later request was given before, with the same text, calls and call ids."""
    first = conversation(exchanges(name)[0]["request"])
    given = {(message.content, ()) for message in first if message.role == "assistant" and name in WITH_EXAMPLES}
    ids: set[str] = set()
    for exchange in exchanges(name):
        answers = [message for message in conversation(exchange["request"]) if message.role == "assistant"]
        assert {(answer.content, tuple(call.name for call in answer.tool_calls)) for answer in answers} <= given
        assert {call.id.removeprefix("call_") for answer in answers for call in answer.tool_calls} <= ids
        reply = decode_reply(recording.read(name)["dialect"], exchange["reply"])
        given.add((reply.say, tuple(call.tool for call in reply.calls)))
        ids.update(IDS.findall(json.dumps(exchange["reply"])))


@each_recording
def test_no_unknown_fields(name: str) -> None:
    known = " ".join(find_fields(name)).split()
    for exchange in exchanges(name):
        assert set(exchange["request"]["body"]) <= set(known)


@each_recording
def test_fields_are_used_as_listed(name: str) -> None:
    fields = find_fields(name)
    request = exchanges(name)[-1]["request"]
    whole = meaning(request, request["body"])
    idle = {field for field in request["body"] if _without(request, field) == whole}
    assert set(request["body"]) - idle == set(fields.used.split())
    assert {field for field in idle if _with_nonsense(request, field) == whole} == set(fields.ignored.split())


def _without(request: Json, field: str) -> Json:
    return meaning(request, {name: value for name, value in request["body"].items() if name != field})


def _with_nonsense(request: Json, field: str) -> Json:
    return meaning(request, {**request["body"], field: [{"nonsense": 17}]})


def meaning(request: Json, body: Json) -> Json:
    """The decoded call and its encoded reply, or the error message if it is rejected."""
    try:
        call, history = decode(request, body), conversation(request, body)
        tools = None if call.tools is None else call.tools.decode()
    except BadRequest as error:
        return error.message
    done = Done("stop", Message("assistant", "Yes.", "Hm."), Usage(2, 1))
    answer = route(request).dialect.encode_reply(call, done).decode()
    plain = {"history": (), "tools": None, "body": b"", "reply_options": None}
    rest = {name: plain.get(name, value) for name, value in msgspec.structs.asdict(call).items()}
    return rest, history, tools, IDS.sub("", re.sub(r"\b\d{10}\b", "", answer))


# ── replays ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@each_recording
async def test_replay_gives_same_conversations(name: str) -> None:
    roles = find_roles(name)
    played = await play(recording.read(name))
    assert [turn["role"] for turn in played.turns] == roles
    assert [context["told"].get("role", "main") for context in played.contexts] == roles, (
        "the agent's signals give other roles"
    )
    conversations = list(dict.fromkeys(roles))
    assert len([context for context in played.contexts if context["parent"] is None]) == len(conversations)
    assert not _forks(played)
    by_role = {row["spans"][0]["role"]: row for row in played.rows}
    assert len(played.rows) == len(conversations), "expected one row per conversation"
    for role in conversations:
        spans = by_role[role]["spans"]
        assert [span["role"] for span in spans] == [role] * roles.count(role)
        assert {span["trained"] for span in spans} == {role != "side"}
    _check_reply_shapes(name, played)


@each_recording
async def test_structure_alone_gives_same_roles(name: str) -> None:
    """Without the agent's signals and rules, every call still has the right role, and the trace says that structure decided."""
    played = await play(recording.read(name), with_signals=False)
    assert [turn["role"] for turn in played.turns] == find_roles(name), [turn["evidence"] for turn in played.turns]
    assert {turn["evidence"].partition(":")[0] for turn in played.turns} == {"structure"}


def _forks(played: Replay) -> list[Json]:
    """Nodes with several children, and causes of forked calls."""
    nodes = [*played.turns, *played.contexts]
    parents = [node["parent"] for node in nodes if node["parent"] is not None]
    roots = [context["id"] for context in played.contexts if context["parent"] is None]
    twice = [parent for parent in set(parents) if parents.count(parent) > 1]
    caused = [node["cause"] for node in nodes if node["cause"] and node["parent"] not in (None, *roots)]
    return [*twice, *caused]


def _check_reply_shapes(name: str, played: Replay) -> None:
    """Check that replies have the shape of the recorded ones, which the agent accepts."""
    for n, (exchange, reply) in enumerate(zip(exchanges(name), played.replies, strict=True)):
        before = {**exchange["reply"], "headers": sorted(exchange["reply"]["headers"])}
        now = {**reply, "headers": sorted(reply["headers"])}
        assert shape(now) == shape(before), f"exchange {n}"
        assert reply["headers"]["content-type"] == exchange["reply"]["headers"]["content-type"]


# ── the files ───────────────────────────────────────────────────────────────────────────────────────────────────────


@each_recording
def test_file_is_in_canonical_format(name: str) -> None:
    text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    assert recording.text(recording.read(name)) == text
    assert len(text) < 300_000


@each_recording
def test_file_has_no_keys_or_local_paths(name: str) -> None:
    text = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    assert not re.findall(
        r"tg-[0-9A-Za-z_-]{20,}|Bearer (?!REDACTED\b)\S+|/tmp/tg-\S*|/root/\S*|/home/(?!user/)\w\S*", text
    )
    assert '"x-api-key": "REDACTED"' in text or '"x-goog-api-key": "REDACTED"' in text or "Bearer REDACTED" in text
