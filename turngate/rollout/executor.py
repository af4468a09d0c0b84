"""The interface between a batch, which decides which attempts to run, and the executor that runs them on some machine.

A batch makes an order for each attempt (`order.py`) and passes it to an executor. `LocalExecutor` runs orders in this process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import msgspec

from turngate.client.gateway import GatewayClient
from turngate.errors import TurngateError
from turngate.rollout.classify import Classification, Ending, classify
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.grading import GradeCache
from turngate.rollout.order import RolloutOrder
from turngate.rollout.outcome import Fault, Outcome, PhaseGate, ProgressCallback
from turngate.rollout.rollout import Rollout
from turngate.rollout.spec import RolloutSpec
from turngate.sandboxes.base import Backend
from turngate.tasks.archive_cache import ArchiveError

log = logging.getLogger("turngate")
SandboxCallback = Callable[[RolloutOrder, str], None]


class AttemptResult(msgspec.Struct, frozen=True):
    """How an attempt ended, as plain data that can be sent between machines."""

    outcome: Outcome
    verdict: Classification
    is_lost: bool = False  # the attempt was lost with its machine, or refused there, so it does not use up a retry


class Attempt(Protocol):
    """One attempt at a rollout, prepared by an executor."""

    async def run(self) -> AttemptResult:
        """Run the attempt to its end. A failure of the rollout is returned in the result, not raised.

        Cancelling ends the attempt on the machine that runs it, before the cancellation propagates.
        """

    @property
    def result(self) -> AttemptResult | None:
        """The result so far, or None if it is unknown. After a cancellation, it shows whether the gateway has recorded the outcome."""


class AttemptExecutor(Protocol):
    """Runs attempts, on this machine or on others."""

    async def check(self) -> None:
        """Raise `SandboxUnavailable` if attempts cannot run. The message says why and, where possible, what to do."""

    async def sweep(self) -> None:
        """Remove the sandboxes that earlier executors left behind when they were killed."""

    def prepare(self, order: RolloutOrder, watch: ProgressCallback, gate: PhaseGate) -> Attempt:
        """Prepare an attempt. `watch` is called with its progress, and `gate` limits how many attempts are in each phase at once."""


class OrderResolver(Protocol):
    """Turns orders into specs, by adding the parts that depend on the machine, such as the agent's installation."""

    async def resolve(self, order: RolloutOrder) -> RolloutSpec:
        """Build the spec of the rollout from an order. Raise `TurngateError` if this machine cannot run the order."""

    def hold_files(self, order: RolloutOrder) -> AbstractContextManager[None]:
        """Keep the files of an order's task on this machine for the duration of the block."""

    @property
    def backends(self) -> Collection[Backend]:
        """The sandbox backends needed by the orders so far, and any that later orders are known to need."""


class LocalExecutor:
    """Runs attempts in this process. `on_sandbox_ready` is called with each order and the working folder of its sandbox."""

    def __init__(
        self,
        resolver: OrderResolver,
        gateway: GatewayClient,
        connector: GatewayConnector,
        *,
        on_sandbox_ready: SandboxCallback = lambda order, workdir: None,
    ) -> None:
        self._resolver = resolver
        self._gateway = gateway
        self._connector = connector
        self._on_sandbox_ready = on_sandbox_ready
        self._grades = GradeCache()

    async def check(self) -> None:
        for backend in self._resolver.backends:
            await backend.check()

    async def sweep(self) -> None:
        for backend in self._resolver.backends:
            await backend.sweep()

    def prepare(
        self,
        order: RolloutOrder,
        watch: ProgressCallback = lambda progress: None,
        gate: PhaseGate = lambda phase: nullcontext(),
    ) -> Attempt:
        ready = partial(self._on_sandbox_ready, order)
        return _LocalAttempt(order, self._resolver, self._gateway, self._connector, self._grades, watch, gate, ready)


class _LocalAttempt:
    def __init__(
        self,
        order: RolloutOrder,
        resolver: OrderResolver,
        gateway: GatewayClient,
        connector: GatewayConnector,
        grades: GradeCache,
        watch: ProgressCallback,
        gate: PhaseGate,
        on_sandbox_ready: Callable[[str], None],
    ) -> None:
        self._order = order
        self._resolver = resolver
        self._gateway = gateway
        self._connector = connector
        self._grades = grades
        self._watch = watch
        self._gate = gate
        self._on_sandbox_ready = on_sandbox_ready
        self._rollout: Rollout | None = None

    @property
    def result(self) -> AttemptResult | None:
        rollout = self._rollout
        return None if rollout is None else AttemptResult(rollout.outcome, rollout.verdict)

    async def run(self) -> AttemptResult:
        try:
            with self._resolver.hold_files(self._order):
                return await self._run()
        except ArchiveError as error:
            return fail_attempt(self._order, Fault("sandbox", error.boundary, error.message))

    async def _run(self) -> AttemptResult:
        order = self._order
        try:
            spec = await self._resolver.resolve(order)
        except TurngateError as error:
            return fail_attempt(order, Fault("sandbox", error.boundary, error.message))
        rollout = self._rollout = Rollout(
            spec,
            self._gateway,
            self._connector,
            self._watch,
            gate=self._gate,
            on_sandbox_ready=self._on_sandbox_ready,
            session=order.session_id,
            grades=self._grades,
        )
        try:
            await rollout.run()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # A bug in Turngate fails only this attempt, not the batch, and the agent is not at fault.
            log.exception("unexpected error in rollout %s, attempt %d", order.rollout, order.attempt)
            rollout.fail(error)
        return AttemptResult(rollout.outcome, rollout.verdict)


def fail_attempt(order: RolloutOrder, fault: Fault) -> AttemptResult:
    """Build the result of an attempt that failed before its rollout started, or whose outcome was lost."""
    graded = order.grade and order.task.task.grader is not None
    verdict = classify(Ending(fault=fault, graded=graded), order.policy)
    result = build_result(order, verdict)
    result.outcome.fault = fault
    return result


def build_result(order: RolloutOrder, verdict: Classification) -> AttemptResult:
    """Build the result of an attempt from its order and verdict. The caller fills in further fields of the outcome."""
    grade = verdict.grade
    outcome = Outcome(
        rollout=order.rollout,
        group=order.group,
        attempt=order.attempt,
        task=order.task.task.id,
        agent=order.agent.name,
        version=order.agent.install.version,
        sandbox=order.sandbox.name,
        model=order.model,
        status=verdict.status,
        kind=None if grade is None else grade.kind,
        reward=None if grade is None else grade.reward,
        grade=grade,
        stop=verdict.stop,
    )
    return AttemptResult(outcome, verdict)
