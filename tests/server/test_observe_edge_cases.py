"""Test edge cases of observe mode: endpoint errors, fields a dialect cannot express, and interrupted streams."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from google.genai import errors as google

from tests.engines.providers import (
    KEY,
    PROVIDERS,
    AnthropicProvider,
    ChatProvider,
    GeminiProvider,
    ModelTurn,
    Provider,
    ResponsesProvider,
)
from tests.engines.standins import StandIn, answer_with, event, serving
from tests.kit import gateway, until
from tests.sdk_agents import DIALECTS, Agent, MessagesAgent, agent
from tests.server.test_observe import OWN, RESULTS, SCRIPT, every_dialect, every_endpoint, scene
from tests.speed import scaled
from turngate.config import ServeConfig
from turngate.errors import ConfigError

Json = Any
ALL_ERRORS = (openai.APIStatusError, openai.APIError, anthropic.APIStatusError, google.APIError)
PIXEL = base64.b64encode(b"\x89PNG not really").decode()


def status(error: Exception) -> int:
    return int(getattr(error, "status_code", 0) or getattr(error, "code", 0) or 0)


# ── images ──────────────────────────────────────────────────────────────────────────────────────────────────────────

IMAGES: dict[str, Json] = {
    "chat": {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}],
    },
    "responses": {"role": "user", "content": [{"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}]},
    "messages": {
        "role": "user",
        "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}],
    },
    "gemini": {"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": PIXEL}}]},
}


@pytest.mark.sample(4)
@every_endpoint
@every_dialect
async def test_image_is_forwarded_only_within_its_dialect(
    dialect: str, endpoint: type[Provider], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(endpoint(*SCRIPT), dialect, monkeypatch) as s:
        s.agent.history.append(IMAGES[dialect])
        if dialect != OWN[endpoint.name]:
            with pytest.raises(ALL_ERRORS, match="supported") as caught:
                await s.agent.ask("What is this?")
            assert status(caught.value) == 400 and s.provider.bodies == []
            assert await s.gateway.turns(s.session.id) == []
            return
        assert (await s.agent.ask("What is this?")).text == SCRIPT[0].text
        await s.agent.answer(RESULTS)
        assert PIXEL.encode() in s.provider.bodies[0] and PIXEL.encode() in s.provider.bodies[1]
        turns = await s.gateway.turns(s.session.id)
        assert [turn["cause"] for turn in turns] == [None, None]  # no fork


@every_dialect
async def test_image_is_refused_in_exact_mode(dialect: str) -> None:
    async with gateway() as g:
        session = await g.open()
        async with agent(dialect, g.root, session.key) as a:
            a.history.append(IMAGES[dialect])
            with pytest.raises(ALL_ERRORS, match="supported") as caught:
                await a.ask("What is this?")
            assert status(caught.value) == 400


# ── errors of the endpoint ──────────────────────────────────────────────────────────────────────────────────────────

OVERFLOWS = {
    "openai": "This model's maximum context length is 4096 tokens. However, your messages resulted in 5000 tokens.",
    "anthropic": "prompt is too long: 5000 tokens > 4096 maximum",
    "gemini": "The input token count (5000) exceeds the maximum number of tokens allowed (4096).",
    "responses": "Your input exceeds the context window of this model. Please adjust your input and try again.",
}
# The phrases by which agents of each dialect recognize a context overflow.
OVERFLOW_PATTERNS = {
    "chat": "maximum context length|context window|prompt is too long|token count",
    "responses": "context window",
    "messages": "prompt is too long",
    "gemini": "exceeds the maximum number of tokens",
}


class FailingEndpoint(StandIn):
    def __init__(self, kind: type[Provider], code: int, message: str) -> None:
        body: Json = {"error": {"message": message, "type": "x", "code": code}}
        if kind is AnthropicProvider:
            body = {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
        if kind is GeminiProvider:
            body = {"error": {"code": code, "message": message, "status": "X"}}
        super().__init__(answer_with(body, code))
        self.name = kind.name


async def ask_failing(
    kind: type[Provider], dialect: str, code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> Any:
    async with scene(FailingEndpoint(kind, code, message), dialect, monkeypatch) as s:  # type: ignore[arg-type]
        with pytest.raises((*ALL_ERRORS, AssertionError)) as caught:
            await s.agent.ask("Hi")
        assert KEY not in str(caught.value) and await s.gateway.turns(s.session.id) == []
        return caught.value


@pytest.mark.sample(4)
@every_endpoint
@every_dialect
async def test_context_overflow_is_recognisable_in_each_dialect(
    dialect: str, endpoint: type[Provider], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = await ask_failing(endpoint, dialect, 400, OVERFLOWS[endpoint.name], monkeypatch)
    assert re.search(OVERFLOW_PATTERNS[dialect], str(error))
    if dialect == "messages" and endpoint.name != "responses":
        assert "prompt is too long: 5000 tokens > 4096 maximum" in str(error)


@pytest.mark.sample(4)
@every_endpoint
@every_dialect
async def test_provider_key_errors_are_server_errors(
    dialect: str, endpoint: type[Provider], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that gets an authentication error gives up, so these read as server errors."""
    for code, message in ((401, f"bad key {KEY}"), (403, "not allowed")):
        assert status(await ask_failing(endpoint, dialect, code, message, monkeypatch)) >= 500


@pytest.mark.sample(4)
@every_endpoint
@every_dialect
async def test_busy_provider_is_rate_limit(
    dialect: str, endpoint: type[Provider], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = 529 if endpoint is AnthropicProvider else 429
    assert status(await ask_failing(endpoint, dialect, code, "Overloaded", monkeypatch)) == 429


# ── interrupted streams ─────────────────────────────────────────────────────────────────────────────────────────────


@every_dialect
async def test_disconnect_reaches_provider(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(AnthropicProvider):
        def stream(self, said: ModelTurn, turn: int) -> Any:
            return [*super().stream(said, turn)[:8], 3600.0]

    async with scene(Slow(*SCRIPT), dialect, monkeypatch) as s:
        task = asyncio.create_task(s.agent.ask("Look around."))
        await until(lambda: bool(s.provider.seen))
        await asyncio.sleep(scaled(0.1))  # let the gateway read what was sent
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(s.provider.hung_up.wait(), scaled(5))
        await until(lambda: s.gateway.rows("SELECT count(*) FROM nodes WHERE kind='sampled'") == [(1,)])
        [turn] = await s.gateway.turns(s.session.id)
        assert (turn["role"], turn["finish"], turn["fault"]) == ("aborted", "abort", "aborted")
        assert turn["message"]["reasoning"] == SCRIPT[0].thought


async def test_provider_stream_error_is_recorded_and_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(AnthropicProvider):
        def stream(self, said: ModelTurn, turn: int) -> list[bytes]:
            error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
            return [*super().stream(said, turn)[:8], b"event: error\n" + event(error)]

    async with scene(Failing(*SCRIPT), "messages", monkeypatch) as s:
        with pytest.raises(anthropic.APIStatusError, match="Overloaded"):
            await s.agent.ask("Hi")
        [turn] = await s.gateway.turns(s.session.id)
        assert (turn["finish"], turn["fault"]) == ("abort", "anthropic: Overloaded")


@pytest.mark.parametrize("endpoint", [AnthropicProvider, GeminiProvider, ResponsesProvider], ids=lambda kind: kind.name)
async def test_provider_signatures_survive_restart(
    endpoint: type[Provider], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The chat dialect cannot carry signatures, so they are restored from the trace."""
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    async with serving(endpoint(*SCRIPT)) as provider:
        settings: Json = {
            "observe": endpoint.name,
            "engine_url": [provider.url],
            "engine_key_env": "PROVIDER_KEY",
            "data": tmp_path,
        }
        async with gateway(**settings) as g:
            session = await g.open(mode="observe")
            async with agent("chat", g.root, session.key) as a:
                await a.ask("Look around.")
                await a.answer(RESULTS)
                history = a.history
        async with gateway(**settings) as g, agent("chat", g.root, session.key) as b:
            b.history, b.last = history, a.last
            for message in b.history:  # as most agents do
                message.pop("reasoning_content", None)
            assert (await b.answer(RESULTS)).text == SCRIPT[2].text
            assert provider.refusals == []
            assert [turn["role"] for turn in await g.turns(session.id)] == ["main"] * 3


# ── forwarded fields ────────────────────────────────────────────────────────────────────────────────────────────────


@every_endpoint
async def test_betas_are_sent_only_to_anthropic(endpoint: type[Provider], monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(endpoint(*SCRIPT), "messages", monkeypatch) as s:
        await s.agent.ask("Hi")
        seen = s.provider.headers[0].get("anthropic-beta")
        assert seen == ("b-1" if endpoint is AnthropicProvider else None)


@every_endpoint
async def test_session_model_and_sampling_override_agent(
    endpoint: type[Provider], monkeypatch: pytest.MonkeyPatch
) -> None:
    for dialect in DIALECTS:
        config: Json = {"model": "m", "max_tokens": 77, "sampling": {"temperature": 0.5}}
        async with scene(endpoint(*SCRIPT), dialect, monkeypatch, **config) as s:
            await s.agent.ask("Hi")
            request = json.dumps(s.provider.last_body)
            assert "77" in request and '"temperature": 0.5' in request
            assert s.provider.last_body.get("model", "m") == "m" and "/m:" in s.provider.paths[0] + "/m:"


async def test_fields_lost_in_translation_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(AnthropicProvider(*SCRIPT), "chat", monkeypatch) as s:
        s.agent.extra = {"presence_penalty": 0.5, "chat_template_kwargs": {"a": 1}, "seed": 7}
        await s.agent.ask("Hi")
        [turn] = await s.gateway.turns(s.session.id)
        assert turn["lost"] == ["presence_penalty", "seed", "chat_template_kwargs"]


async def test_filtered_answer_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Filtered(GeminiProvider):
        def finish(self, said: ModelTurn) -> str:
            return "SAFETY"

    async with scene(Filtered(ModelTurn("I would")), "messages", monkeypatch) as s:
        reply = await s.agent.ask("Hi")
        assert (reply.text, reply.finish) == ("I would", "stop")
        [turn] = await s.gateway.turns(s.session.id)
        assert turn["fault"] == "gemini withheld the answer (SAFETY)"


async def test_redacted_thinking_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    class RedactedThinking(AnthropicProvider):
        def blocks(self, said: ModelTurn, turn: int) -> list[Json]:
            return [{"type": "redacted_thinking", "data": f"hidden {turn}"}, *super().blocks(said, turn)]

    for dialect in ("messages", "chat"):
        async with scene(RedactedThinking(*SCRIPT), dialect, monkeypatch) as s:
            await s.agent.ask("Look around.")
            await s.agent.answer(RESULTS)
            block = s.provider.last_body["messages"][1]["content"][0]
            assert block == {"type": "redacted_thinking", "data": "hidden 0"}


@every_dialect
@pytest.mark.parametrize("endpoint", [AnthropicProvider, ResponsesProvider], ids=lambda kind: kind.name)
async def test_separately_signed_thoughts_stay_separate(
    dialect: str, endpoint: type[Provider], monkeypatch: pytest.MonkeyPatch
) -> None:
    class TwoThoughts(endpoint):  # type: ignore[valid-type, misc]
        def blocks(self, said: ModelTurn, turn: int) -> list[Json]:
            first = {"type": "thinking", "thinking": "Hm.", "signature": self.signature("Hm.")}
            return [first, *super().blocks(said, turn)]

        def items(self, said: ModelTurn, turn: int) -> list[Json]:
            first, *rest = super().items(said, turn)
            return [first, {**first, "id": f"rs_{turn}"}, *rest]

    async with scene(TwoThoughts(*SCRIPT), dialect, monkeypatch) as s:
        await s.agent.ask("Look around.")
        await s.agent.answer(RESULTS)
        if endpoint is AnthropicProvider:
            kinds = [block["type"] for block in s.provider.last_body["messages"][1]["content"]]
            assert kinds == ["thinking", "thinking", "text", "tool_use", "tool_use"]
        else:
            kinds = [item.get("type", "message") for item in s.provider.last_body["input"]]
            assert kinds[1:6] == ["reasoning", "reasoning", "message", "function_call", "function_call"]


async def test_truncated_answers_and_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in PROVIDERS:
        for dialect in DIALECTS:
            async with scene(endpoint(ModelTurn("It is", cut=True)), dialect, monkeypatch) as s:
                assert (await s.agent.ask("Hi")).finish == "length"
                assert (await s.gateway.show(s.session.id))["roles"] == {"main": 1}

    class Stopping(ChatProvider):
        def stream(self, said: ModelTurn, turn: int) -> list[bytes]:
            return [
                part.replace(b'"finish_reason": "stop"', b'"finish_reason": "stop", "stop_reason": "END"')
                for part in super().stream(said, turn)
            ]

    async with scene(Stopping(ModelTurn("It is")), "messages", monkeypatch) as s:
        assert isinstance(s.agent, MessagesAgent)
        reply = await s.agent.client.messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "Hi"}], stop_sequences=["END"]
        )
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "END")
        assert s.provider.last_body["stop"] == ["END"]


async def test_sampled_token_limit_with_reported_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = {"sampled_tokens": 10}
    async with scene(ChatProvider(*SCRIPT, returns_ids=True), "chat", monkeypatch, limits=limits) as s:
        await s.agent.ask("Look around.")
        assert "limit (sampled tokens)" in (await s.agent.answer(RESULTS)).text
        assert len(s.provider.seen) == 1


# ── counting ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def count_tokens(a: Agent) -> int:
    match a:
        case MessagesAgent():
            count = await a.client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "Hi"}])
            return count.input_tokens
        case _:
            total = await a.client.aio.models.count_tokens(model="m", contents="Hi")  # type: ignore[attr-defined]
            return total.total_tokens or 0


@pytest.mark.sample(4)
@every_endpoint
@pytest.mark.parametrize("dialect", ["messages", "gemini"])
async def test_endpoint_counts_tokens_if_supported(
    dialect: str, endpoint: type[Provider], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(endpoint(*SCRIPT), dialect, monkeypatch) as s:
        if endpoint is ChatProvider:
            with pytest.raises(ALL_ERRORS, match="estimate") as caught:
                await count_tokens(s.agent)
            assert status(caught.value) == 404
            return
        assert await count_tokens(s.agent) == len(json.dumps(s.provider.last_body))
        assert s.provider.refusals == [] and await s.gateway.turns(s.session.id) == []


async def test_logprobs_are_refused_as_unsupported() -> None:
    async with gateway(observe="openai", engine_url=["http://127.0.0.1:1"]) as g:
        for shown in (False, True):
            session = await g.open(mode="observe", show_logprobs=shown)
            with pytest.raises(openai.BadRequestError, match="not supported in observe mode; leave it out"):
                await g.ask(session.key, "Hi", logprobs=True)


async def test_session_of_unserved_mode_is_told_its_mode_after_restart(tmp_path: Path) -> None:
    async with gateway(data=tmp_path) as g:
        exact = await g.open()
    async with gateway(observe="anthropic", engine_url=["http://127.0.0.1:1"], data=tmp_path) as g:
        observed = await g.open(mode="observe")
        with pytest.raises(openai.ConflictError, match="no engine for exact sessions; open a session with a mode that"):
            await g.ask(exact.key, "Hi")
        async with agent("messages", g.root, exact.key) as a:
            with pytest.raises(anthropic.APIStatusError, match="no engine for exact sessions"):
                await count_tokens(a)
    async with gateway(data=tmp_path) as g:
        with pytest.raises(openai.ConflictError, match="no endpoint to observe; open a session with mode 'exact'"):
            await g.ask(observed.key, "Hi")
        async with agent("messages", g.root, observed.key) as a:
            with pytest.raises(anthropic.APIStatusError, match="no endpoint to observe"):
                await count_tokens(a)


async def test_unreachable_provider_is_retryable_error() -> None:
    """The agent gets a retryable error, and nothing is recorded."""
    async with gateway(observe="anthropic", engine_url=["http://127.0.0.1:1"]) as g:
        session = await g.open(mode="observe")
        async with agent("messages", g.root, session.key) as a:
            with pytest.raises(anthropic.APIStatusError) as caught:
                await a.ask("Hi")
            assert caught.value.status_code == 529 and "127.0.0.1" not in str(caught.value)
        assert (await g.http().get("/health")).status_code == 503
        assert await g.turns(session.id) == []


def test_invalid_observe_settings_are_refused() -> None:
    url = "http://127.0.0.1:1"
    for kind, capture in (("anthropic", "logprobs"), ("gemini", "tokens"), ("responses", "tokens")):
        with pytest.raises(ConfigError, match=f"^capture must be one of .* for the engine {kind!r}, not {capture!r}"):
            ServeConfig(engine=kind, engine_url=[url], capture=capture).check()
    for kind in OWN:
        with pytest.raises(ConfigError, match="one --engine-url"):
            ServeConfig(engine=kind, engine_url=[url, url]).check()
        ServeConfig(engine=kind, engine_url=[url], capture="text").check()
