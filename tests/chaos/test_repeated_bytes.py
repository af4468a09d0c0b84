"""Repeated bytes deceive a client that uses a connection for several calls, and one that does not check what it received.

The gateway answers each request that arrives, and records each answer once.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gauntlet.clients.base import Message, ReceivedCall
from tests.chaos.agents import is_intact
from tests.chaos.engine import write_answer, write_thought
from tests.chaos.fault_proxy import NetworkFault, open_proxy
from tests.kit import Running, gateway, say, user

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
REPEAT = NetworkFault(way="up", repeat=1.0)


async def exchange(streams: Streams, key: str, text: str, connection: str) -> str:
    """Send a call, and return the text of the next reply on its connection."""
    reader, writer = streams
    body = json.dumps({"model": "m", "messages": [user(text)]})
    head = ["POST /v1/chat/completions HTTP/1.1", "host: x", "content-type: application/json"]
    head += [f"authorization: Bearer {key}", f"connection: {connection}", f"content-length: {len(body)}", "", body]
    writer.write("\r\n".join(head).encode())
    return await read_reply(reader)


@asynccontextmanager
async def connect(port: int) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def read_reply(reader: asyncio.StreamReader) -> str:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    (size,) = [int(line.partition(":")[2]) for line in lines if line.startswith("content-length")]
    return str(json.loads(await reader.readexactly(size))["choices"][0]["message"]["content"])


async def list_answers(g: Running, session: str) -> list[str]:
    return sorted(turn["message"]["content"] for turn in await g.turns(session))


async def test_next_call_on_connection_gets_reply_to_repeated_request() -> None:
    async with (
        gateway(lambda request, n: say(f"Answer {n}.")) as g,
        open_proxy(int(g.root.rpartition(":")[2]), random.Random(1)) as proxy,
    ):
        session = await g.open()
        async with connect(proxy.port) as streams:
            proxy.fault = REPEAT
            first = await exchange(streams, session.key, "One", "keep-alive")
            proxy.fault = None
            second = await exchange(streams, session.key, "Two", "keep-alive")
            third = await read_reply(streams[0])
        assert len({first, second, third}) == 3
        turns = {turn["message"]["content"]: turn for turn in await g.turns(session.id)}
        assert turns.keys() == {first, second, third}
        # The second reply belongs to the first question, asked again. The client took it for the answer to its second one.
        assert turns[first]["parent"] == turns[second]["parent"] != turns[third]["parent"]


async def test_connection_for_one_call_gets_no_reply_to_repeated_request() -> None:
    async with (
        gateway(lambda request, n: say(f"Answer {n}.")) as g,
        open_proxy(int(g.root.rpartition(":")[2]), random.Random(1)) as proxy,
    ):
        session = await g.open()
        answers = []
        for text in ("One", "Two"):
            proxy.fault = REPEAT if text == "One" else None
            async with connect(proxy.port) as streams:
                answers.append(await exchange(streams, session.key, text, "close"))
                assert await streams[0].read() == b""
        assert await list_answers(g, session.id) == sorted(answers)


ANSWER, THOUGHT = write_answer(3), write_thought(3)


def call(name: str = "read_file", arguments: str = json.dumps({"path": ANSWER})) -> Message:
    return Message("assistant", calls=[ReceivedCall("c", name, arguments)])


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Message("assistant", ANSWER), True),
        (Message("assistant", ANSWER, THOUGHT), True),
        (call(), True),
        (Message("assistant", ANSWER * 2), False),
        (Message("assistant", ANSWER[:9] + ANSWER), False),
        (Message("assistant", ANSWER, THOUGHT * 2), False),
        (Message("assistant", ANSWER, THOUGHT[:4] + THOUGHT), False),
        (call("read_fileread_file"), False),
        (call(arguments=json.dumps({"path": ANSWER}) * 2), False),
        (Message("assistant", calls=[*call().calls, *call().calls]), False),
    ],
)
def test_message_with_repeated_part_is_not_intact(message: Message, expected: bool) -> None:
    assert is_intact(message) == expected
