"""Settle attempts whose end is unknown to the runner, and record outcomes that the gateway does not have yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from turngate.client.gateway import GatewayClient, RequestRejected
from turngate.client.protocol import SessionOutcome, SupersededAttempt
from turngate.errors import Conflict, TurngateError
from turngate.rollout import health
from turngate.rollout.ledger import AttemptStarted, FinishedRollout, UnrecordedRollout
from turngate.rollout.recording import record_outcome
from turngate.rollout.results import BatchResults, build_adopted, describe_unrecorded, exclude
from turngate.rollout.stop_signal import StopSignal

_LEASE_CHECK_S = 1.0


async def supersede_after_lease(
    gateway: GatewayClient,
    rollout: str,
    attempt: int,
    session: str,
    note: Callable[[str], None] = lambda text: None,
) -> SupersededAttempt[SessionOutcome]:
    """Supersede an attempt, unless it has an outcome. Return the attempt, and its outcome if it has one.

    If the attempt may still be running on a cell, first wait until the cell has shipped the session to the shared store or the cell's lease
    has ended. `note` is called once if this call has to wait.
    """
    is_noted = False
    while True:
        try:
            return await gateway.supersede(rollout, attempt, session)
        except RequestRejected as refused:
            if refused.answered != Conflict.status:
                raise
            if not is_noted:
                note(f"waiting for the lease of a lost cell to end: {refused.message}")
            is_noted = True
            await asyncio.sleep(_LEASE_CHECK_S)


class LostAttempts:
    """Settles the lost attempts of one batch.

    A lost attempt may still be running on a machine that cannot be reached. Unless the gateway already has its outcome, the attempt is
    superseded at the gateway, so that its rollout is never trained on twice, even if that machine comes back.
    """

    def __init__(self, gateway: GatewayClient, results: BatchResults, stop: StopSignal) -> None:
        self._gateway = gateway
        self._results = results
        self._stop = stop

    async def settle(self, started: AttemptStarted, why: Literal["cancelled", "lost"], message: str) -> None:
        """Settle an attempt whose end is unknown.

        If the gateway has an outcome that counts and is not an infrastructure fault, finish the rollout; otherwise, end the attempt.
        """
        identity = started.rollout, started.attempt, started.session
        if why == "lost":
            settled = await supersede_after_lease(self._gateway, *identity, self._results.note)
        else:  # the batch is stopping; if the cell still holds its lease, the next run settles the attempt
            settled = await self._gateway.supersede(*identity)
        recorded = settled.outcome
        if recorded is None or settled.attempt.state == "superseded":
            await self._results.end_attempt(started, why, message)
        elif recorded.kind == "infrastructure fault":
            await self._results.end_attempt(started, "fault", recorded.message)
        else:
            shown = await self._gateway.show(settled.attempt.session)
            await self._results.finish(build_adopted(started, recorded, shown))

    async def record(self, unrecorded: UnrecordedRollout) -> None:
        """Record an outcome that the gateway has not recorded yet. Stop the batch if that fails again.

        If the session was deleted or has a different outcome, settle the attempt instead.
        """
        finished = unrecorded.finished
        try:
            excluded = await record_outcome(
                self._gateway, finished.session, unrecorded.recorded, wait_s=health.RESTART_S
            )
            await self._results.finish(exclude(finished, excluded))
        except RequestRejected as refused:
            if refused.answered not in (404, 409):
                return self._stop.stop(describe_unrecorded(finished, refused.message))
            # The session was deleted or has a different outcome. The gateway's record takes precedence.
            return await self.settle(_build_started(finished), "lost", refused.message)
        except TurngateError as error:
            return self._stop.stop(describe_unrecorded(finished, error.message))


def _build_started(finished: FinishedRollout) -> AttemptStarted:
    return AttemptStarted(
        rollout=finished.rollout,
        round=finished.round,
        attempt=finished.attempt,
        session=finished.session,
        at=finished.at,
    )
