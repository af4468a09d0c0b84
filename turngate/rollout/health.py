"""Check whether a batch can continue: it needs disk space, sandboxes and a gateway, and stops after too many faults in a row."""

from __future__ import annotations

import asyncio
import shutil
import time

from turngate.client.gateway import GatewayClient
from turngate.client.retry import retry_while_unreachable
from turngate.errors import SandboxUnavailable, TurngateError
from turngate.rollout.executor import AttemptExecutor
from turngate.rollout.plan import BatchPlan
from turngate.rollout.results import BatchResults

RESTART_S = 15.0  # how long to wait for a gateway or a sandbox service, such as dockerd, that does not respond
_PROBE_S = 5.0  # how long the result of a probe stays valid
_MIN_IN_A_ROW = (
    20  # this many infrastructure faults in a row stop a batch; more if it runs more than 10 rollouts at once
)


class BatchHealth:
    """Checks whether one batch can continue. Each check returns why the batch cannot continue, or an empty string if it can."""

    def __init__(
        self, plan: BatchPlan, gateway: GatewayClient, executor: AttemptExecutor, results: BatchResults
    ) -> None:
        self._plan = plan
        self._executor = executor
        self._gateway = gateway
        self._results = results
        self._faults_in_a_row = 0
        self._last_probe = (0.0, "")
        self._probing = asyncio.Lock()

    def count_success(self) -> None:
        """Reset the count of consecutive infrastructure faults."""
        self._faults_in_a_row = 0

    async def check_after_fault(self, message: str) -> str:
        """Count an infrastructure fault. Return why the batch cannot continue, or an empty string if it can."""
        self._faults_in_a_row += 1
        if self._faults_in_a_row >= max(_MIN_IN_A_ROW, 2 * self._plan.bounds.running):
            return f"the last {self._faults_in_a_row} attempts all ended with infrastructure faults; the last fault was: {message}"
        async with self._probing:
            at, problem = self._last_probe
            if time.monotonic() - at > _PROBE_S:
                problem = await self._probe()
                self._last_probe = time.monotonic(), problem
            return problem

    def check_disk(self) -> str:
        """Return an error message if the disk has too little free space for another rollout, otherwise an empty string."""
        free = shutil.disk_usage(self._plan.folder).free
        if free >= self._plan.min_free_bytes and not self._results.ledger.full:
            return ""
        problem = (
            "the disk is full" if self._results.ledger.full else "the disk is almost full, so no more rollouts start"
        )
        return f"{self._plan.folder}: {problem} ({free / 1e6:.1f} MB free); free up space and resume the batch"

    async def _probe(self) -> str:
        if full := self.check_disk():
            return full
        try:
            await retry_while_unreachable(
                self._executor.check, limit_s=RESTART_S, unreachable=(SandboxUnavailable,), warn=True
            )
        except SandboxUnavailable as error:
            return f"sandboxes cannot be created: {error.message}"
        except TurngateError:
            pass  # the problem may be temporary
        try:
            await retry_while_unreachable(self._gateway.check, limit_s=RESTART_S)
        except TurngateError as error:
            return error.message
        return ""
