"""Test how the client handles replies with missing, unknown or damaged fields."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from turngate.client.gateway import GatewayClient, InvalidReply
from turngate.client.protocol import FenceView, SessionDescription, SessionInfo
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.session import SessionConfig
from turngate.types import Json

pytestmark = pytest.mark.process

SESSION: dict[str, Json] = {
    "id": "s",
    "key": 1,
    "status": "sealed",
    "stop": "",
    "opened": 1.0,
    "closed": 2.0,
    "config": {"model": "m"},
    "outcome": None,
    "turns": 1,
    "sampled_tokens": 5,
    "in_flight": 0,
    "last_error": None,
    "unheard_s": 0.0,
    "last_used": 2.0,
    "tokens": 9,
    "roles": {"main": 1},
    "forks": [],
}


@asynccontextmanager
async def gateway_sending(body: bytes) -> AsyncIterator[GatewayClient]:
    async def reply(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=body, headers={"x-turngate": "1"}, content_type="application/json")

    runner = web.ServerRunner(web.Server(reply))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with GatewayClient(f"http://{host}:{port}", "k" * 20) as client:
            yield client
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("name", [name for name in SESSION if name != "unheard_s"])
async def test_missing_field_is_named(name: str) -> None:
    body = msgspec.json.encode({field: value for field, value in SESSION.items() if field != name})
    async with gateway_sending(body) as client:
        with pytest.raises(InvalidReply, match=rf"\({name} is missing\)") as error:
            await client.show("s")
        assert error.value.param == name


async def test_field_of_wrong_type_is_named() -> None:
    async with gateway_sending(msgspec.json.encode({**SESSION, "turns": "many"})) as client:
        with pytest.raises(InvalidReply, match=r"\(turns must be an integer, not a string\)"):
            await client.show("s")


async def test_truncated_reply_is_invalid() -> None:
    async with gateway_sending(msgspec.json.encode(SESSION)[:-9]) as client:
        with pytest.raises(InvalidReply, match="sent a reply that is not valid JSON"):
            await client.show("s")


async def test_unknown_fields_are_ignored_and_optional_ones_default() -> None:
    newer = {
        **SESSION,
        "colour": "red",
        "config": {"model": "m", "mood": "good", "limits": {"turns": 3, "jokes": 1}},
        "outcome": {"kind": "graded", "reward": 1.0, "certainty": 0.5},
    }
    async with gateway_sending(msgspec.json.encode(newer)) as client:
        session = await client.show("s")
    assert (session.config.model, session.config.limits) == ("m", {"turns": 3, "jokes": 1})
    assert session.outcome is not None and session.outcome.reward == 1.0
    older = {name: value for name, value in SESSION.items() if name != "unheard_s"}
    async with gateway_sending(msgspec.json.encode(older)) as client:
        assert (await client.show("s")).unheard_s == 0.0


def test_default_fields_are_omitted_when_encoding() -> None:
    values = {**SESSION, "config": SessionConfig(model="m"), "outcome": None}
    sent = SessionDescription[SessionConfig, RecordedOutcome](**values)
    assert msgspec.json.decode(msgspec.json.encode(sent)) == SESSION
    damaged = msgspec.structs.replace(sent, damaged="its outcome is damaged on disk")
    assert msgspec.json.decode(msgspec.json.encode(damaged))["damaged"] == "its outcome is damaged on disk"
    assert msgspec.json.decode(msgspec.json.encode(sent), type=SessionInfo).config.model == "m"
    fence = FenceView(version=0, paused=False, in_flight=0)
    assert msgspec.json.decode(msgspec.json.encode(fence)) == {"version": 0, "paused": False, "in_flight": 0}
    assert msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(fence, model="a")))["model"] == "a"
