"""Find out whether a batch can go on at all: room on the disk, a sandbox backend that works, a gateway that answers."""

from __future__ import annotations

import asyncio
import shutil
import time

from turngate.client.gateway import GatewayClient
from turngate.client.retry import retry_while_unreachable
from turngate.errors import SandboxUnavailable, TurngateError
from turngate.rollout.plan import BatchPlan
from turngate.rollout.results import BatchResults

RESTART_S = 15.0  # to wait for a gateway that does not answer
_PROBE_S = 5.0  # for which the result of a probe holds
_MIN_IN_A_ROW = 20  # infrastructure faults in a row, before the batch stops


class BatchHealth:
    """Of one batch. Each check returns why the batch cannot go on, or nothing."""

    def __init__(self, plan: BatchPlan, gateway: GatewayClient, results: BatchResults) -> None:
        self._plan = plan
        self._gateway = gateway
        self._results = results
        self._faults_in_a_row = 0
        self._last_probe = (0.0, "")
        self._probing = asyncio.Lock()

    def count_success(self) -> None:
        self._faults_in_a_row = 0

    async def check_after_fault(self, message: str) -> str:
        """Say why no other rollout could do better now. Empty: nothing is known that speaks against it."""
        self._faults_in_a_row += 1
        if self._faults_in_a_row >= max(_MIN_IN_A_ROW, 2 * self._plan.bounds.running):
            return f"the last {self._faults_in_a_row} attempts were all infrastructure faults, the last one: {message}"
        async with self._probing:
            at, problem = self._last_probe
            if time.monotonic() - at > _PROBE_S:
                problem = await self._probe()
                self._last_probe = time.monotonic(), problem
            return problem

    def check_disk(self) -> str:
        free = shutil.disk_usage(self._plan.folder).free
        if free >= self._plan.min_free_bytes and not self._results.ledger.full:
            return ""
        return f"{self._plan.folder}: the disk is full ({free / 1e6:.1f} MB are free); make room"

    async def _probe(self) -> str:
        if full := self.check_disk():
            return full
        try:
            await self._plan.backend.check()
        except SandboxUnavailable as error:
            return f"no sandbox can be created: {error.message}"
        except TurngateError:
            pass  # it may pass
        try:
            await retry_while_unreachable(self._gateway.check, limit_s=RESTART_S)
        except TurngateError as error:
            return error.message
        return ""
