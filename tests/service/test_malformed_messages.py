"""Agents that send malformed messages: results show them as well as possible, and the grade stands."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit import say, until
from tests.service.kit import run_service
from turngate.service import conversation, final_state, report
from turngate.service.config import Clamp
from turngate.service.event_log import RolloutEventLog
from turngate.service.result import ConversationMessage
from turngate.service.truncation import Truncator
from turngate.types import Json
from turngate.views.trace import TraceView, parse_trace

pytestmark = pytest.mark.process

DEEP: Json = "x"
for _ in range(100_000):
    DEEP = [DEEP]
VALUES: list[Json] = [
    None,
    True,
    0,
    7,
    1.5,
    "",
    "text",
    [],
    {},
    ["a", 1, None],
    {"a": {"b": [1]}},
    [[["x"]]],
    "half \ud800",
]
FIELDS = ("role", "content", "name", "reasoning", "reasoning_content", "tool_calls", "tool_call_id", "refusal")
TOOL_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def make_trace(*messages: Json, sampled: int = 1) -> TraceView:
    """A trace with one context of these messages and one turn."""
    context = {"id": 1, "kind": "context", "parent": None, "ids": [1, 2], "messages": [], "preamble": ""}
    context |= {"dialect": "chat", "cause": None, "told": {}}
    turn: dict[str, Json] = {"id": 2, "kind": "sampled", "parent": 1, "role": "main"}
    turn |= {"ids": [3] * sampled, "logprobs": [-0.5] * sampled}
    turn |= {
        "message": {"role": "assistant", "content": "Yes."},
        "finish": "stop",
        "version_start": 0,
        "version_end": 0,
    }
    turn |= {"started": 0.0, "ended": 1.0, "sampling": {}, "biases": [], "cause": None, "capture": "tokens"}
    turn |= {"fault": "", "engine": "", "lost": [], "delivered": True}
    trace = {
        "session": "s",
        "status": "sealed",
        "stop": "",
        "config": {},
        "vocabulary": "",
        "preambles": {},
        "nodes": [context, turn],
    }
    view = parse_trace(trace)
    view.contexts[1] = msgspec.structs.replace(view.contexts[1], messages=list(messages))
    return view


def build_message(message: Json) -> ConversationMessage:
    messages = conversation.build_messages(make_trace(message))
    assert [one.cursor for one in messages] == [1, 2] and messages[1].text == "Yes."
    return messages[0]


@pytest.mark.parametrize(
    ("message", "text", "arguments"),
    [
        ({"role": "assistant", "tool_calls": [TOOL_CALL]}, "", ['{"a": 1}']),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": None}}]}, "", [""]),
        ({"role": "assistant", "tool_calls": [{"custom": {"name": "f", "input": "ls"}}, 5]}, "", ["ls", "5"]),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "", [""]),
        ({"role": "user", "content": 5}, "5", []),
        ({"role": "user", "content": [{"text": "a"}, "b", {"type": "image"}, {"text": {"c": 1}}, {}]}, 'ab[image]{"c": 1}[part]', []),
        ({"role": "user", "content": DEEP}, "[nested too deeply to show]", []),
        ("no object", "no object", []),
        (None, "", []),
    ],
)  # fmt: skip
def test_non_text_content_is_shown_as_json(message: Json, text: str, arguments: list[str]) -> None:
    shown = build_message(message)
    assert (shown.text, [call.arguments for call in shown.tool_calls]) == (text, arguments)


def test_any_json_is_accepted_as_message() -> None:
    chance = random.Random(5)

    def random_json(depth: int = 0) -> Json:
        kind = chance.random()
        if depth > 3 or kind < 0.5:
            return chance.choice(VALUES)
        if kind < 0.7:
            return [random_json(depth + 1) for _ in range(chance.randrange(3))]
        names = (*FIELDS, "id", "function", "custom", "arguments", "input", "text", "type")
        return {chance.choice(names): random_json(depth + 1) for _ in range(chance.randrange(6))}

    for _ in range(3000):
        message = {name: random_json() for name in chance.sample(FIELDS, 4)}
        for text in (build_message(message).text, build_message(message).reasoning, build_message(message).role):
            text.encode()


# Sends conversations of every dialect with a few values replaced. The gateway rejects some of them.
FUZZ = """
import copy, random
chance = random.Random(11)
ODD = [None, True, 7, 1.5, "", "text", [], {}, ["a", 1, None], {"a": {"b": [1]}}, [{"type": "text", "text": "x"}], [{"type": "?"}]]
M = os.environ["TURNGATE_MODEL"]
call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
chat = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "n"},
  {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "r"}]
use = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
messages = [{"role": "user", "content": "x"},
  {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, use]},
  {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "r"}], "is_error": True}]}]
items = [{"role": "user", "content": [{"type": "input_text", "text": "x"}]},
  {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "t"}], "content": []},
  {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
  {"type": "function_call_output", "call_id": "a", "output": "r"}]
contents = [{"role": "user", "parts": [{"text": "x"}]}, {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"x": 1}}}]},
  {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"r": 1}}}]}]
forms = [("/v1/chat/completions", {"model": M, "messages": chat}),
  ("/v1/messages", {"model": M, "max_tokens": 9, "messages": messages, "system": [{"type": "text", "text": "s"}]}),
  ("/v1/responses", {"model": M, "input": items, "instructions": "i"}),
  ("/v1beta/models/" + M + ":generateContent", {"contents": contents, "systemInstruction": {"parts": [{"text": "s"}]}})]

def places(value, path=()):
    found = [path] if path else []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += places(inner, (*path, key))
    return found

taken = {}
for n in range(COUNT):
    where, body = forms[n % 4]
    body = copy.deepcopy(body)
    for path in chance.sample([p for p in places(body) if len(p) > 2], chance.choice((0, 1, 1, 2))):
        try:
            inner = body
            for key in path[:-1]: inner = inner[key]
            inner[path[-1]] = copy.deepcopy(chance.choice(ODD))
        except (KeyError, IndexError, TypeError): pass
    status, text = http("POST", where, body)
    if status >= 500: print(status, where, json.dumps(body), text[:300])
    taken[where] = taken.get(where, 0) + (status == 200)
print(taken)
"""


async def test_malformed_messages_keep_grade() -> None:
    async with run_service() as service:
        request = service.request(f"COUNT = 160\n{FUZZ}", test_script="true")
        result = await service.rollouts.run(request)
        assert (result.status, result.kind, result.reward, result.error) == ("finished", "graded", 1.0, None)
        assert not any("could not" in note for note in result.notes), result.notes
        assert result.log_tails["stdout"].startswith("{"), result.log_tails  # no reply was a gateway error
        assert len(result.turns) == result.turn_count > 40
        page = await service.rollouts.messages(result.rollout_id, limit=1000)
        assert len(page.messages) > result.turn_count


async def test_object_arguments_are_shown_during_rollout() -> None:
    program = f"""
messages = [{{"role": "user", "content": "Hi"}}, {{"role": "assistant", "tool_calls": [{TOOL_CALL!r}]}},
        {{"role": "tool", "tool_call_id": "a", "content": "r"}}]
print(http("POST", "/v1/chat/completions", {{"model": "m", "messages": messages}})[0])
time.sleep(600)
"""
    async with run_service() as service:
        rollout = service.rollouts.start(service.request(program))
        await until(lambda: service.rollouts.state(rollout).turns == 1, 120)
        page = await service.rollouts.messages(rollout)
        assert page.messages[1].tool_calls[0].arguments == '{"a": 1}'


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", ["turns", "messages", "read_trace", "workdir", "settled", "drained"])
async def test_failed_report_step_is_a_note_and_keeps_grade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("nobody thought of this")

    async with run_service([say("Hello.")], data=tmp_path) as service:
        with monkeypatch.context() as patch:
            match step:
                case "turns":
                    patch.setattr(report, "build_turns", broken)
                case "messages":
                    patch.setattr(conversation, "build_messages", broken)
                case "read_trace":
                    patch.setattr("turngate.service.finalization.read_trace", broken)
                case "workdir":
                    patch.setattr(report, "read_workdir", broken)
                case "settled":
                    patch.setattr(final_state, "from_work", broken)
                case "drained":
                    patch.setattr(RolloutEventLog, "drain", lambda *_: fail())
            request = service.request(
                'ask("Hi")\nopen("x", "w").write("y")', test_script="exit 0", upload_files={"a": "b"}
            )
            result = await service.rollouts.run(request)
        assert (result.status, result.kind, result.reward, result.error) == ("finished", "graded", 1.0, None)
        assert any("ValueError" in note for note in result.notes), result.notes
        assert (result.turn_count, result.exit_code) == (1, 0) and result.wall_s > 0
        assert bool(result.turns) == (step in ("messages", "drained"))
        assert ("x" in result.workdir_files) == (step not in ("workdir", "settled"))
        state = service.rollouts.state(result.rollout_id)
        assert (state.done, state.reward, state.kind) == (True, 1.0, "graded") and service.leftovers() == []
    async with run_service(data=tmp_path) as service:
        assert await service.rollouts.finalize(result.rollout_id) == result


async def fail() -> None:
    raise ValueError("nobody thought of this")


@pytest.mark.parametrize(("limit", "kept"), [(0, True), (3, True), (4, True), (2, False), (1, False)])
def test_logprobs_are_complete_or_omitted(limit: int, kept: bool) -> None:
    cut = Truncator(Clamp(logprobs=limit))
    [turn] = conversation.build_turns(make_trace(sampled=3), cut)
    assert (turn.logprobs, turn.sampled_tokens) == ([-0.5] * 3 if kept else None, 3)
    assert kept == (cut.notes == []) and (kept or "turns[0].logprobs: all 3 values left out (null)" in cut.notes[0])
