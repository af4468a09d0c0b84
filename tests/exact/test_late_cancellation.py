"""Calls cancelled after the last token, while the engine is being closed: the sampled tokens are recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import kit
from tests.exact.agent import World
from tests.exact.test_rows import SYSTEM, say, user
from tests.speed import scaled
from turngate.engines.base import Chunk, Generate


@pytest.mark.parametrize("stream", [False, True])
async def test_cancellation_after_last_token_keeps_turn(tmp_path: Path, stream: bool) -> None:
    async with World.of(tmp_path, kit.renderer()) as world:
        exiting = asyncio.Event()
        generate = world.engine.generate

        @asynccontextmanager
        async def generate_and_linger(request: Generate) -> AsyncIterator[AsyncIterator[Chunk]]:
            async with generate(request) as chunks:
                try:
                    yield chunks
                finally:
                    exiting.set()
                    await asyncio.sleep(3600)

        world.engine.generate = generate_and_linger  # type: ignore[method-assign,assignment]
        agent = world.agent()
        agent.messages = [SYSTEM, user("Say something.")]
        call: asyncio.Task[Any] = asyncio.create_task(agent.call(say(world, "something"), stream=stream))
        async with asyncio.timeout(scaled(20)):
            await exiting.wait()
            await world.gateway.sessions.seal(agent.session_id)
            await asyncio.wait([call])
        call.exception()  # the agent cannot parse half a stream
        (turn,) = (await world.gateway.sessions.find(agent.session_id)).trace.turns()
        assert turn.info.finish == "abort" and len(turn.ids) > 1
        assert turn.logprobs is not None and len(turn.logprobs) == len(turn.ids)
