"""Which groups of a batch are complete, and that the gateway is told so: trainers that follow it wait for no more rollouts of those.

Owned by `batch.py`. A group that is closed twice is closed once, so a batch that is taken up again tells of all that are complete.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

from turngate.client.gateway import GatewayClient, GatewayUnreachable
from turngate.errors import TurngateError
from turngate.rollout.ledger import FinishedRollout

_AGAIN_S = 0.5  # between two tries, while the gateway does not answer
RECORDED_CLASSES = ("graded", "agent failed", "invalid task")  # the gateway has their outcome, and it counts in a group


class GroupCloser:
    """Of one batch. `run` is a task for as long as it goes on; nobody else waits for the gateway. `refused` is told where the gateway
    does not take it, and nothing is to be gained by asking again."""

    def __init__(self, gateway: GatewayClient, n: int, refused: Callable[[str], None]) -> None:
        self._gateway = gateway
        self._n = n
        self._refused = refused
        self._finished: defaultdict[str, list[bool]] = defaultdict(list)  # by group, whether each is heard of
        self._closed: dict[str, list[bool]] = {}  # likewise, of those that are complete
        self._complete: asyncio.Queue[str] = asyncio.Queue()
        self.empty_groups = 0  # groups that are complete, and of which no trainer will hear
        self.empty_group_added = asyncio.Event()

    def finished(self, one: FinishedRollout) -> None:
        """One rollout is, for good, whatever came of it."""
        group = _group_name(one)
        members = self._finished[group]
        members.append(_is_recorded(one))
        if len(members) < self._n:
            return
        self._closed[group] = self._finished.pop(group)
        self._complete.put_nowait(group)
        if not any(members):
            self.empty_groups += 1
            self.empty_group_added.set()

    def reopened(self, one: FinishedRollout) -> None:
        """One that was finished is to be done again. What its group has by then is told when it is complete once more."""
        group = _group_name(one)
        members = self._closed.pop(group, None)
        if members is not None:
            self._finished[group] = members
            self.empty_groups -= not any(members)
        self._finished[group].remove(_is_recorded(one))

    async def run(self) -> None:
        while True:
            group = await self._complete.get()
            await self._close(group)
            self._complete.task_done()

    async def flush(self, limit_s: float) -> bool:
        """Whether the gateway knows of all that are complete, within so many seconds."""
        try:
            async with asyncio.timeout(limit_s):
                await self._complete.join()
        except TimeoutError:
            return False
        return True

    async def _close(self, group: str) -> None:
        """A gateway that is being started again, or cannot write for now, is waited for."""
        while True:
            try:
                return await self._gateway.close_group(group)
            except GatewayUnreachable:
                await asyncio.sleep(_AGAIN_S)
            except TurngateError as error:
                self._refused(f"the gateway does not take it that group {group} is complete: {error.message}")
                return None


def _group_name(one: FinishedRollout) -> str:
    return one.rollout.rpartition(".")[0]


def _is_recorded(one: FinishedRollout) -> bool:
    return bool(one.session) and one.kind in RECORDED_CLASSES
