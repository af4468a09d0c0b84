"""Decide on the retry requests of a batch: those that arrive while it is running, and those that were still open when it started."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from turngate.client.gateway import GatewayClient
from turngate.common.aio import run_to_completion
from turngate.errors import TurngateError
from turngate.rollout import health, retry_requests
from turngate.rollout.ledger import FinishedRollout, LedgerError
from turngate.rollout.outcome import RolloutClass
from turngate.rollout.plan import BatchPlan, batch_stream
from turngate.rollout.results import BatchResults
from turngate.rollout.retry_requests import RetryReply, RetryRequest
from turngate.rollout.schedule import RolloutItem, Schedule
from turngate.rollout.stop_signal import StopSignal

log = logging.getLogger("turngate")
_RECONNECT_S = 5.0  # pause before reading events again from a gateway that did not respond
_REPLY_S = 2.0  # how long to wait for an attempt to end before replying that it is still running
_RETRYABLE: tuple[RolloutClass, ...] = ("infrastructure fault", "cancelled", "stale")
_ENDING = RetryReply(None, "the batch is ending; run it again with the same folder to process this request")


class RetryListener:
    """Handles the retry requests of one batch.

    A finished rollout can run again if its class is in `_RETRYABLE` and the request names its last attempt.
    """

    def __init__(
        self, plan: BatchPlan, gateway: GatewayClient, results: BatchResults, schedule: Schedule, stop: StopSignal
    ) -> None:
        self.tasks: set[asyncio.Task[None]] = set()  # one per undecided request
        self._plan = plan
        self._gateway = gateway
        self._results = results
        self._schedule = schedule
        self._stop = stop
        self._deciding = asyncio.Lock()  # requests are decided one at a time
        self._last: int | None = None  # position of the last event; None if earlier events have not been read yet

    # ── requests from before this run ───────────────────────────────────────────────────────────────────────────

    async def read_earlier(self) -> dict[int, RetryRequest]:
        """Return the requests that were still open when this run started. Return {} if the gateway does not respond in time."""
        try:
            async with asyncio.timeout(health.RESTART_S):
                return await self._read_pending()
        except TimeoutError:
            return {}

    async def accept_earlier(self, requests: Mapping[int, RetryRequest]) -> set[int]:
        """Reopen the rollouts that can be retried, and return the positions of their requests.

        This must happen before finished rollouts are counted.
        """
        accepted = set()
        for seq, request in requests.items():
            if request.rollout in self._results.state.finished and not self._find_objection(request):
                await self._results.write_reopened(request.rollout, request.attempt)
                self._note_retry(request.rollout)
                accepted.add(seq)
        return accepted

    async def reply_earlier(self, requests: Mapping[int, RetryRequest], accepted: set[int]) -> None:
        """Reply to the requests that were still open when this run started."""
        for seq, request in requests.items():
            is_accepted = seq in accepted
            await self._reply(
                seq, request.accept() if is_accepted else RetryReply(False, self._find_objection(request))
            )

    # ── requests while it runs ──────────────────────────────────────────────────────────────────────────────────

    async def listen(self) -> None:
        """Handle requests as they arrive, until cancelled."""
        batch = self._results.batch
        while True:
            try:
                await self._gateway.announce(batch_stream(batch), "note", {"batch": batch, "listens": True})
                if self._last is None:
                    for seq, request in (await self._read_pending()).items():
                        self._consider(seq, request)
                async for event in self._gateway.events(batch_stream(batch), self._last or 0):
                    self._last = event.seq
                    if (new := retry_requests.parse_request(event)) is not None:
                        self._consider(event.seq, new)
            except TurngateError as error:
                log.debug("could not read retry requests: %s", error.message)
            await asyncio.sleep(_RECONNECT_S)

    async def _read_pending(self) -> dict[int, RetryRequest]:
        pending, self._last = await retry_requests.read_pending(self._gateway, self._results.batch)
        return pending

    def _consider(self, seq: int, request: RetryRequest) -> None:
        """Decide on a request in a background task, because its attempt may take a while to end. The batch waits for the decision."""
        self._schedule.hold()
        task = asyncio.create_task(self._answer(seq, request))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, seq: int, request: RetryRequest) -> None:
        """Decide on a request once its attempt is settled, and reply.

        The attempt may still be running, because the web UI shows it as ended slightly before its end is in the ledger. A cancelled
        attempt is shown as ended while the agent is still being killed.
        """
        rollout, attempt = request.rollout, request.attempt
        try:
            if not await self._schedule.wait_until_settled(rollout, attempt, _REPLY_S):
                not_yet = f"attempt {attempt} has not ended yet; the decision will appear in the batch's events"
                await self._reply(seq, RetryReply(None, not_yet))
                await self._schedule.wait_until_settled(rollout, attempt, None)
            async with self._deciding:
                reply = await self._decide(request)
        except LedgerError as error:
            self._stop.stop(error.message)
            return
        finally:
            await self._schedule.release()
        await self._reply(seq, reply)

    async def _decide(self, request: RetryRequest) -> RetryReply:
        """Decide on a request. If it is accepted, reopen the rollout. If this run is ending, leave the decision to a later run."""
        if self._schedule.is_running(request.rollout, request.attempt):
            return _ENDING
        if objection := self._find_objection(request):
            return RetryReply(False, objection)
        if not self._schedule.accepts_more:
            return _ENDING
        await run_to_completion(self._run_again(self._results.state.finished[request.rollout]))
        return request.accept()

    async def _run_again(self, finished: FinishedRollout) -> None:
        self._schedule.exclude(finished.rollout)
        await self._results.reopen(finished)
        task = next(task for task in self._plan.tasks if task.id == finished.task)
        self._schedule.add_retry(RolloutItem(finished.rollout, task, finished.round, finished.index))
        self._note_retry(finished.rollout)
        await self._schedule.notify()

    def _find_objection(self, request: RetryRequest) -> str:
        """Return why a rollout cannot be retried, or an empty string if it can."""
        state = self._results.state
        unrecorded = state.unrecorded.get(request.rollout)
        finished = unrecorded.finished if unrecorded is not None else state.finished.get(request.rollout)
        if finished is None:
            started = request.rollout in state.attempts
            return (
                "the rollout is not finished; it is running or will be retried anyway"
                if started
                else "the rollout has not started, or is not part of this batch"
            )
        if finished.kind not in _RETRYABLE:
            return f"the rollout already has an outcome: {finished.kind}"
        last = finished.attempt
        return "" if last == request.attempt else f"the rollout's last attempt was {last}, not {request.attempt}"

    def _note_retry(self, rollout: str) -> None:
        self._results.note(f"retrying {rollout} on request")

    async def _reply(self, seq: int, reply: RetryReply) -> None:
        await retry_requests.send_reply(self._gateway, self._results.batch, seq, reply)
