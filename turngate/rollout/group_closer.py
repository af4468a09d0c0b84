"""Ask the gateway to close the groups of a batch as soon as they are complete, so that trainers do not wait for more rollouts.

Closing a group is idempotent, so a resumed batch can safely close all complete groups again.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable

from turngate.client.gateway import GatewayClient
from turngate.client.retry import retry_while_unreachable
from turngate.errors import TurngateError
from turngate.rollout.ledger import FinishedRollout

_RETRY_S = 0.5  # pause between two tries while the gateway does not respond
RECORDED_CLASSES = ("graded", "agent failed", "invalid task")  # the gateway includes only these classes in a group


class GroupCloser:
    """Closes the groups of one batch in the background, in the asyncio task that runs `run`.

    If a group cannot be closed, for example because the gateway refuses, `on_failure` is called with the reason.
    """

    def __init__(self, gateway: GatewayClient, n: int, on_failure: Callable[[str], None]) -> None:
        self._gateway = gateway
        self._n = n
        self._on_failure = on_failure
        # Group → whether each of its finished rollouts is recorded.
        self._incomplete: defaultdict[str, list[bool]] = defaultdict(list)
        self._closed: dict[str, list[bool]] = {}  # the same, for complete groups
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self.empty_groups = 0  # complete groups without a recorded member, which trainers never see
        self.empty_group_added = asyncio.Event()

    def add(self, finished: FinishedRollout) -> None:
        """Count a finished rollout. When it completes its group, queue the group to be closed."""
        group = _group_name(finished)
        members = self._incomplete[group]
        members.append(_is_recorded(finished))
        if len(members) < self._n:
            return
        self._closed[group] = self._incomplete.pop(group)
        self._queue.put_nowait(group)
        if not any(members):
            self.empty_groups += 1
            self.empty_group_added.set()

    def reopen(self, finished: FinishedRollout) -> None:
        """Stop counting a finished rollout that will run again. A group that is already closed is closed again after the new attempt."""
        group = _group_name(finished)
        members = self._closed.pop(group, None)
        if members is not None:
            self._incomplete[group] = members
            self.empty_groups -= not any(members)
        self._incomplete[group].remove(_is_recorded(finished))

    async def run(self) -> None:
        """Close complete groups until cancelled."""
        while True:
            group = await self._queue.get()
            await self._close(group)
            self._queue.task_done()

    async def flush(self, limit_s: float) -> bool:
        """Wait until no complete group is waiting to be closed. Return False if that takes longer than `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._queue.join()
        except TimeoutError:
            return False
        return True

    async def _close(self, group: str) -> None:
        """Close a group at the gateway. Keep trying while the gateway is restarting or temporarily unable to write."""
        try:
            await retry_while_unreachable(lambda: self._gateway.close_group(group), limit_s=math.inf, pause_s=_RETRY_S)
        except TurngateError as error:
            self._on_failure(f"closing group {group} failed: {error.message}")


def _group_name(finished: FinishedRollout) -> str:
    return finished.rollout.rpartition(".")[0]


def _is_recorded(finished: FinishedRollout) -> bool:
    return bool(finished.session) and finished.kind in RECORDED_CLASSES
