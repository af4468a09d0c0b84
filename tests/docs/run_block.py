"""Run Python blocks of the documentation, one after the other in one namespace, as a notebook does: `await` works at the top level.

    python -m tests.docs.run_block names.py block-12.py

Loops over feeds, gates and events, which a trainer runs for days, end after one round.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from turngate.client.feed import BlockingFeed, Delivery, Feed
from turngate.client.gate import RemoteGate
from turngate.client.gateway import GatewayClient
from turngate.engines.gate import Gate
from turngate.engines.gate_call import GateCall

_WAIT_S = 1.0


async def _until_commit(self: Feed) -> AsyncIterator[Delivery]:
    start = self.committed
    while self.committed == start:
        if (delivery := await self.next(_WAIT_S)) is not None:
            yield delivery


def _until_blocking_commit(self: BlockingFeed) -> Iterator[Delivery]:
    start = self.committed
    while self.committed == start:
        if (delivery := self.next(_WAIT_S)) is not None:
            yield delivery


async def _one_call(self: Gate | RemoteGate) -> AsyncIterator[GateCall]:
    yield (await self.take())[0]


def limit_loops() -> None:
    Feed.__aiter__ = _until_commit  # type: ignore[method-assign, assignment]
    BlockingFeed.__iter__ = _until_blocking_commit  # type: ignore[method-assign]
    Gate.__aiter__ = RemoteGate.__aiter__ = _one_call  # type: ignore[method-assign, assignment]
    GatewayClient.events = functools.partialmethod(GatewayClient.events, wait=False)  # type: ignore[method-assign, assignment]


def run_files(files: list[Path]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for file in files:
            code = compile(file.read_text(encoding="utf-8"), str(file), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(eval(code, names))
            else:
                exec(code, names)


if __name__ == "__main__":
    limit_loops()
    run_files([Path(argument) for argument in sys.argv[1:]])
