"""Tests for the mock engine with an agent that calls it directly, without a gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any, cast

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from gauntlet import proof
from gauntlet.agent import Agent, build_script
from gauntlet.clients import CLIENTS
from gauntlet.clients.base import TOOLS, Conversation, Event, Message, ReceivedCall
from gauntlet.engine import Api
from gauntlet.gateways.base import Record, Turn, merge_calls
from gauntlet.reply_format import ToolCall, format_reply, parse_reply
from gauntlet.sampler import Engine
from gauntlet.scenario import Answer, Scenario
from gauntlet.scenarios import BY_NAME, SCENARIOS
from gauntlet.score import score_rollout
from gauntlet.tokens import Model

PLAIN = [s for s in SCENARIOS if not s.faults and s.name not in ("slow-engine", "lost-reply", "aborted", "huge-result")]


class Letters:
    """A model with one token per character, so no download is needed."""

    stop = 0x10FFFF

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_oddly(self, text: str, seed: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        return "".join(chr(token) for token in ids if special or token != self.stop)

    def token(self, token: int) -> str:
        return chr(token)

    def render(self, messages: Sequence[dict[str, Any]], tools: object, **variables: Any) -> str:
        return "".join(json.dumps(message, ensure_ascii=False) for message in messages)


@pytest.fixture
async def engine() -> AsyncIterator[str]:
    server = TestServer(Api(Engine(cast(Model, Letters()))).app())
    await server.start_server()
    yield str(server.make_url("")).rstrip("/")
    await server.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def learn(http: aiohttp.ClientSession, engine: str, steps: dict[str, Any]) -> None:
    async with http.post(f"{engine}/gauntlet/steps", json=steps) as response:
        assert response.status == 200


async def log_of(http: aiohttp.ClientSession, engine: str, rollout: str) -> list[dict[str, Any]]:
    async with http.get(f"{engine}/gauntlet/log", params={"rollout": rollout}) as response:
        return cast(list[dict[str, Any]], await response.json())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize("scenario", PLAIN, ids=lambda scenario: scenario.name)
async def test_agent_completes_every_scenario(
    http: aiohttp.ClientSession, engine: str, scenario: Scenario, dialect: str, stream: bool
) -> None:
    await learn(http, engine, build_script(scenario, "aa"))
    agent = Agent(http, CLIENTS[dialect], scenario, "aa", engine, "none", stream=stream)
    played = await agent.play()
    assert not played.error
    log = await log_of(http, engine, "aa")
    record = Record([Turn(tuple(entry["ids"])) for entry in log])
    score = score_rollout(scenario, log, record, taken=played.taken, faults_reported=played.errors_right)
    assert (score.captured, score.finished, score.unseen) == (scenario.turns, 1, 0)


@pytest.mark.parametrize("name", ["engine-429", "engine-500", "engine-503", "engine-drop", "cut-stream", "overflow"])
@pytest.mark.parametrize("stream", [False, True])
async def test_agent_sees_faults_and_retries(http: aiohttp.ClientSession, engine: str, name: str, stream: bool) -> None:
    scenario = BY_NAME[name]
    await learn(http, engine, build_script(scenario, "ab"))
    played = await Agent(http, CLIENTS["chat"], scenario, "ab", engine, "none", stream=stream).play()
    assert (played.error, played.errors_right, len(played.taken)) == ("", 1, scenario.turns)


async def test_engine_logs_the_temperature(http: aiohttp.ClientSession, engine: str) -> None:
    for n, (path, body) in enumerate(BODIES.items()):
        await learn(http, engine, {f"ag{n}.{step}": [{"text": "Yes."}] for step in range(2)})
        for step, settings in enumerate(({"temperature": 0}, {})):
            prompt = Letters().encode(f"What? [cue ag{n}.{step}]")
            asked = {name: (prompt if value == [] else value) for name, value in body.items()}
            asked = {**asked, "sampling_params": settings} if "sampling_params" in body else {**asked, **settings}
            async with http.post(engine + path, json=asked) as response:
                assert response.status == 200
        assert [entry["temperature"] for entry in await log_of(http, engine, f"ag{n}")] == [0, 1.0]


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_agent_continues_without_an_unserved_model(
    http: aiohttp.ClientSession, engine: str, dialect: str
) -> None:
    scenario = BY_NAME["refused-call"]
    await learn(http, engine, build_script(scenario, "ah"))
    played = await Agent(http, CLIENTS[dialect], scenario, "ah", engine, "none", stream=False).play()
    assert (played.error, played.refused, len(played.taken)) == ("", 1, scenario.turns)


async def test_disconnected_agent_has_not_taken_answer(http: aiohttp.ClientSession, engine: str) -> None:
    scenario = BY_NAME["lost-reply"]
    await learn(http, engine, build_script(scenario, "ac"))
    played = await Agent(http, CLIENTS["chat"], scenario, "ac", engine, "none", stream=True).play()
    assert played.taken == {0: 0, 1: 1, 2: 0}


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [], "logprobs": 0, "return_token_ids": True, "max_tokens": 100},
    "/inference/v1/generate": {"token_ids": [], "sampling_params": {"max_tokens": 100}},
    "/generate": {"input_ids": [], "sampling_params": {"max_new_tokens": 100}, "return_logprob": True},
}


async def test_token_apis_return_ids_and_proof_logprobs(http: aiohttp.ClientSession, engine: str) -> None:
    await learn(http, engine, {"ad.0": [{"text": "Yes."}]})
    prompt = Letters().encode("What? [cue ad.0]")
    sampled = [*Letters().encode("Yes."), Letters.stop]
    for path, body in BODIES.items():
        asked = {name: (prompt if value == [] else value) for name, value in body.items()}
        async with http.post(engine + path, json=asked) as response:
            reply = await response.json()
        choice = (reply.get("choices") or [{}])[0]
        if path == "/generate":
            values = [value for value, _, _ in reply["meta_info"]["output_token_logprobs"]]
            ids = reply["output_ids"]
        elif path == "/v1/completions":
            ids, values = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        else:
            ids, values = choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]
        assert ids == sampled
        assert values == proof.logprobs(prompt, sampled)
        assert all(merge_calls([(prompt, ids, values)])[0].mask[len(prompt) :])


async def test_streamed_chat_reply_equals_whole_reply(http: aiohttp.ClientSession, engine: str) -> None:
    text = format_reply("Hm…", "Look:", (ToolCall("bash", {"command": "ls 🎉"}), ToolCall("bash", {"command": "pwd"})))
    await learn(http, engine, {"ae.0": [{"text": text}]})
    client = CLIENTS["chat"]
    said = []
    for stream in (False, True):
        line = Conversation("Be brief.", TOOLS, [Message("user", "What? [cue ae.0]")])
        request = client.build_request(line, model="gauntlet", key="none", stream=stream)
        async with http.post(engine + request.path, json=request.body) as response:
            if not stream:
                said.append(client.read_reply(await response.json()))
                continue
            lines = [line for line in (await response.text()).split("\n") if line.startswith("data: {")]
            said.append(client.read_events([Event("", json.loads(line[6:])) for line in lines]))
    whole, streamed = said
    assert (whole.text, whole.reasoning) == (streamed.text, streamed.reasoning) == ("Look:", "Hm…")
    assert [(c.name, c.arguments) for c in whole.calls] == [(c.name, c.arguments) for c in streamed.calls]


async def test_text_missing_from_prompt_is_logged(http: aiohttp.ClientSession, engine: str) -> None:
    await learn(http, engine, {"af.0": [{"text": "Yes.", "sees": ["plan mode", "What?"]}]})
    body = {"prompt": Letters().encode("What? [cue af.0]"), "max_tokens": 9}
    async with http.post(f"{engine}/v1/completions", json=body) as response:
        assert response.status == 200
    assert (await log_of(http, engine, "af"))[0]["unseen"] == ["plan mode"]


def test_malformed_tool_call_is_text() -> None:
    text = 'Look.\n<tool_call>\n{"name": "bash", "argu\n</tool_call>'
    assert parse_reply(text, tools=True).content == text
    assert not parse_reply(text, tools=True).calls


def test_partial_parses_only_grow() -> None:
    text = format_reply("Well, well.", "Look here:\n", (ToolCall("bash", {"command": "ls <tool"}),))
    parsed = [parse_reply(text[:n], tools=True, complete=False) for n in range(len(text))] + [
        parse_reply(text, tools=True)
    ]
    for one, next_one in pairwise(parsed):
        assert next_one.reasoning.startswith(one.reasoning)
        assert next_one.content.startswith(one.content)
        assert next_one.calls[: len(one.calls)] == one.calls


@pytest.mark.parametrize("dialect", CLIENTS)
def test_voices_send_full_history(dialect: str) -> None:
    call = ReceivedCall("call_1", "bash", '{"command": "ls"}')
    opaque = {"reasoning": {"type": "reasoning", "summary": [{"text": "Hm."}]}} if dialect == "responses" else {}
    answer = Message("assistant", "Look:", "Hm.", [call], opaque=opaque)
    line = Conversation("Be brief.", TOOLS, [Message("user", "What?"), answer, Message("tool", "a.py", answers=call)])
    request = CLIENTS[dialect].build_request(line, model="gauntlet", key="secret", stream=False)
    body = json.dumps(request.body)
    places = [body.index(said) for said in ("What?", "Look:", "ls", "a.py")]
    assert places == sorted(places)
    assert "Be brief." in body
    assert "Hm." in body
    assert "secret" in str(request.headers)


def test_scenario_answers_are_unique() -> None:
    """Otherwise one answer could be mistaken for another in a record."""
    for scenario in SCENARIOS:
        texts = [each.to_text() for call in scenario.calls() for each in call.attempts if isinstance(each, Answer)]
        assert texts
        assert len(texts) == len(set(texts)), scenario.name
