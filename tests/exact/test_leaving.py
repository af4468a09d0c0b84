"""Calls that are cancelled after the model's last token, while the engine is still being left: what was sampled is recorded."""

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
async def test_a_turn_that_is_cancelled_while_its_engine_is_left_is_recorded(tmp_path: Path, stream: bool) -> None:
    async with World.of(tmp_path, kit.renderer()) as world:
        leaving = asyncio.Event()
        generate = world.engine.generate

        @asynccontextmanager
        async def lingering(request: Generate) -> AsyncIterator[AsyncIterator[Chunk]]:
            async with generate(request) as chunks:
                try:
                    yield chunks
                finally:
                    leaving.set()
                    await asyncio.sleep(3600)

        world.engine.generate = lingering  # type: ignore[method-assign,assignment]
        agent = world.agent()
        agent.messages = [SYSTEM, user("Say something.")]
        call: asyncio.Task[Any] = asyncio.create_task(agent.call(say(world, "something"), stream=stream))
        async with asyncio.timeout(scaled(20)):
            await leaving.wait()
            await world.gateway.sessions.seal(agent.session_id)
            await asyncio.wait([call])
        call.exception()  # the agent cannot make sense of half a stream
        (turn,) = world.gateway.sessions.find(agent.session_id).trace.turns()
        assert turn.info.finish == "abort" and len(turn.ids) > 1
        assert turn.logprobs is not None and len(turn.logprobs) == len(turn.ids)
