"""Finish a rollout: read its trace, build and store its result, and release its resources."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from turngate.client.gateway import GatewayClient
from turngate.errors import TurngateError
from turngate.rollout.outcome import Outcome
from turngate.service import conversation, final_state, report
from turngate.service.active_rollout import ActiveRollout
from turngate.service.config import ServiceConfig
from turngate.service.event_log import RolloutEventLog
from turngate.service.history import RolloutHistory
from turngate.service.planning import initial_files
from turngate.service.result import ConversationMessage, RolloutResult, RolloutState
from turngate.service.storage import ServiceStorage
from turngate.views.trace import TraceView
from turngate.views.trace import parse_trace as read_trace

log = logging.getLogger("turngate")
_TRACE_S = 60.0
T = TypeVar("T")


class Finalizer:
    """Builds and stores the result of a rollout whose work has ended. If an optional step fails, a note is added and the grade is kept."""

    def __init__(
        self, config: ServiceConfig, storage: ServiceStorage, events: RolloutEventLog, history: RolloutHistory
    ) -> None:
        self._config = config
        self._storage = storage
        self._events = events
        self._history = history

    async def finish(
        self, active: ActiveRollout, work: asyncio.Task[Outcome], failed_stage: str
    ) -> tuple[RolloutState, float]:
        """Build and store the result. Return the final state, and the Unix time at which the rollout ended."""
        view, messages = await self._read_recording(active)
        await self._release(active)
        state = final_state.from_work(active, work, failed_stage)
        outcome = active.outcome
        result = await self._build_result(active, state, outcome, view)
        state, ended_at = msgspec.structs.replace(state, wall_s=active.wall_s), time.time()
        seconds = {"queued": state.wall_s, **active.seconds, **(outcome.seconds if outcome is not None else {})}
        is_aborted = active.abort_reason is not None and state.status == "cancelled"
        stop = f"aborted: {active.abort_reason}".removesuffix(": ") if is_aborted else result.stop
        result = msgspec.structs.replace(result, wall_s=state.wall_s, seconds=seconds, stop=stop)
        await self._history.save_result(result, messages)
        await asyncio.to_thread(self._storage.delete_inputs, active.id)
        if not self._config.keep_work:
            await asyncio.to_thread(self._storage.delete_work, active.id)
        return state, ended_at

    async def finish_after_error(self, active: ActiveRollout, error: BaseException) -> tuple[RolloutState, float]:
        """Store a minimal result after `finish` has failed. Return the final state, and the current Unix time."""
        state = final_state.from_broken_report(active, error)
        result = report.build_minimal_result(state, active.outcome, active.notes)
        await self._release(active)
        await self._history.save_result(result, [])
        await asyncio.to_thread(self._storage.delete_inputs, active.id)
        return state, time.time()

    async def _read_recording(self, active: ActiveRollout) -> tuple[TraceView | None, list[ConversationMessage]]:
        """Store the rollout's last events. Return its trace and its conversation, or None and an empty list if no trace can be read.

        In direct mode, there is no gateway, and therefore no trace and no further event.
        """
        if active.following is not None:
            await _cancel(active.following, active.id)
        if active.connection is None or active.choice.mode == "direct":
            return None, []
        client, outcome = active.connection.client, active.outcome
        await _attempt(active, "the last events could not be read", self._events.drain(active, client), None)
        if outcome is None or not outcome.session:
            return None, []
        missing = "the trace, which contains the turns, could not be read"
        view = await _attempt(active, missing, _read_view(active, client), None)
        if view is None:
            return None, []
        build = asyncio.to_thread(conversation.build_messages, view)
        return view, await _attempt(active, "the conversation could not be built", build, [])

    async def _release(self, active: ActiveRollout) -> None:
        """Wait until the rollout's inputs are written, which an abort does not interrupt, and close the rollout's connections."""
        writing = active.writing_inputs
        if writing is not None and not writing.done():
            await asyncio.wait([writing])
        if writing is not None and (error := writing.exception()) is not None:
            log.warning("rollout %s: %s", active.id, error)
        await _attempt(active, "closing the rollout's connections failed", active.stack.aclose(), None)

    async def _build_result(
        self, active: ActiveRollout, state: RolloutState, outcome: Outcome | None, view: TraceView | None
    ) -> RolloutResult:
        """Build the full result. If that fails, build it without turns. If that also fails, build a minimal result."""
        for shown, missing in (
            (view, "the result was built without the turns"),
            (None, "the result was built without the files"),
        ):
            build = asyncio.to_thread(self._report, active, state, outcome, shown)
            result = await _attempt(active, missing, build, None)
            if result is not None:
                return result
        return report.build_minimal_result(state, outcome, active.notes)

    def _report(
        self, active: ActiveRollout, state: RolloutState, outcome: Outcome | None, view: TraceView | None
    ) -> RolloutResult:
        """Build the result, without turns if `view` is None. This blocks, so call it in a thread."""
        folder = self._storage.artifacts_folder(active.id)
        before = initial_files(active.request, self._storage.inputs_folder(active.id))
        return report.build_result(state, outcome, view, folder, self._config.clamp, active.notes, before)


async def _read_view(active: ActiveRollout, client: GatewayClient) -> TraceView:
    async with asyncio.timeout(_TRACE_S):
        return await asyncio.to_thread(read_trace, await client.trace(active.id))


async def _attempt(active: ActiveRollout, missing: str, work: Coroutine[Any, Any, T], default: T) -> T:
    """Run an optional step of the finalization. If it fails, add a note that starts with `missing`, and return `default`."""
    task = asyncio.create_task(work)
    await asyncio.wait([task])
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, TurngateError | TimeoutError):
        active.notes.append(f"{missing}: {str(error) or 'it took too long'}")
    else:
        log.error("rollout %s: %s", active.id, missing, exc_info=error)
        active.notes.append(f"{missing}: internal error in Turngate ({type(error).__name__})")
    return default


async def _cancel(task: asyncio.Task[None], rollout: str) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("rollout %s: could not follow the gateway's events", rollout, exc_info=error)
