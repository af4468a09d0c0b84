"""Open the session of one rollout at the gateway, follow its events, and make sure that it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from turngate.agents.launch import resolve_signals
from turngate.client.gateway import GatewayClient, RequestRejected
from turngate.client.protocol import DecodedTrace, SessionInfo, ToolCallView, TraceContext, TraceTurn
from turngate.client.retry import retry_while_unreachable
from turngate.common.aio import run_to_completion
from turngate.errors import TurngateError
from turngate.rollout.classify import Ending
from turngate.rollout.outcome import ProgressCallback, RolloutProgress
from turngate.rollout.recording import record_outcome
from turngate.rollout.sampling import resolve_settings
from turngate.rollout.spec import RolloutSpec
from turngate.store.outcomes import RecordedOutcome
from turngate.tasks.grading.types import GradedTurn, RecordedTurns
from turngate.trace.turn_rewards import ToolCallRecord, describe_calls
from turngate.types import RUNNER_LOST, STALE, SUPERSEDED, Json

# Why the gateway cancelled a session, for the message about it.
_STOP_REASONS = {
    SUPERSEDED: ": its attempt was superseded",
    RUNNER_LOST: ": its runner seemed to have ended",
}

RESTART_S = 40.0  # how long to wait for a gateway that is restarting
END_S = 10.0  # how long the gateway may take to end the session of a rollout that failed or was cancelled


class AgentSession:
    """The session of one rollout. It records in `ending` how the session ended."""

    def __init__(
        self,
        gateway: GatewayClient,
        session: str,
        ending: Ending,
        progress: RolloutProgress,
        watch: ProgressCallback,
        note: Callable[[str], None],
    ) -> None:
        self.id = session
        self.key = ""  # empty until the session is open
        self.is_ended = False  # whether this runner has ended the session
        self.over = asyncio.Event()  # set when the session reaches a limit, or when someone else ends it
        self._gateway = gateway
        self._ending = ending
        self._progress = progress
        self._watch = watch
        self._note = note
        self._is_ending = False  # whether this runner is ending the session

    async def open(self, config: dict[str, Json], traceparent: str) -> None:
        """Open the session.

        The session's id is already known, so the session can be ended even if this call is cancelled before the gateway replies.
        """
        opened = await self._gateway.open(config, self.id, traceparent)
        self.id, self.key = opened.id, opened.key
        self._progress.session = opened.id

    @asynccontextmanager
    async def follow(self) -> AsyncIterator[None]:
        """Follow the session's events for the duration of the block."""
        following = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.wait([following])
            if not following.cancelled() and (error := following.exception()) is not None:
                self._note(f"the session's events could not be followed to the end: {error!r}")

    async def _follow(self) -> None:
        """Count turns and sampled tokens, and detect the end of the session."""
        async for event in self._gateway.events(self.id):
            kind, data = event.kind, event.data
            if kind == "turn":
                self._progress.turns += 1
                self._progress.sampled_tokens += data["sampled_tokens"]
                self._watch(self._progress)
            elif kind == "limit":
                self._set_over(data["limit"])
            elif kind in ("sealed", "cancelled", "deleted") and not self._is_ending:
                stop = data.get("stop")
                why = _STOP_REASONS.get(stop or "", "")
                self._set_over(STALE if stop == STALE else f"the session was {kind} at the gateway{why}")

    def _set_over(self, stop: str) -> None:
        self._ending.stop = stop
        self.over.set()

    async def seal(self, stop: str) -> None:
        """Seal the session, so that it allows no more turns. Wait up to `RESTART_S` for a gateway that is restarting."""
        self._is_ending = True

        async def show_and_seal() -> tuple[SessionInfo, SessionInfo]:
            # Read the session before sealing it: only a live session reports its last error.
            return await self._gateway.show(self.id), await self._gateway.seal(self.id, stop)

        live, sealed = await retry_while_unreachable(show_and_seal, limit_s=RESTART_S)
        self.is_ended = True
        ending = self._ending
        ending.sealed_stop = sealed.stop
        ending.turns = max(sealed.turns, self._progress.turns)
        ending.silent_s = live.unheard_s
        if live.last_error is not None:
            ending.last_error = live.last_error

    async def read_turns(self) -> RecordedTurns:
        """Read the session's turns and host tool calls, for a grader that gives rewards to turns."""

        async def read() -> tuple[DecodedTrace, list[ToolCallView]]:
            return await self._gateway.trace(self.id), await self._gateway.tool_calls(self.id)

        trace, calls = await retry_while_unreachable(read, limit_s=RESTART_S)
        return await asyncio.to_thread(list_recorded_turns, trace, calls)

    async def record(self, record: RecordedOutcome) -> str:
        """Record the outcome at the gateway. Return why it does not count, or an empty string if it does."""
        return await record_outcome(self._gateway, self.id, record, wait_s=RESTART_S, is_sealed=self.is_ended)

    async def end(self, *, cancelled: bool) -> None:
        """End the session if it has not been sealed: cancel it if the rollout was cancelled, otherwise seal it."""
        if self.is_ended:
            return
        self._is_ending = True
        end = self._gateway.cancel if cancelled else partial(self._gateway.seal, stop="error")
        await run_to_completion(self._end(end))

    async def _end(self, end: Callable[[str], Awaitable[object]]) -> None:
        try:
            async with asyncio.timeout(END_S):
                await end(self.id)
                self.is_ended = True
        except TimeoutError:
            self._note(f"the session could not be ended: the gateway did not respond within {END_S:.0f} s")
        except RequestRejected as refused:
            if refused.answered != 404:  # 404: the session was never opened
                self._note(f"the session could not be ended: {refused.message}")
        except TurngateError as error:
            self._note(f"the session could not be ended: {error.message}")


def list_recorded_turns(trace: DecodedTrace, calls: Sequence[ToolCallView]) -> RecordedTurns:
    """Convert a trace and the host tool calls to the records that graders see."""
    previous = {node.id: node.parent for node in trace.nodes if isinstance(node, TraceContext)}
    turns = []
    for node in trace.nodes:
        if isinstance(node, TraceTurn):
            message = node.decode_message()
            turns.append(
                GradedTurn(
                    id=node.id,
                    previous=previous[node.parent],
                    started=node.started,
                    ended=node.ended,
                    tokens=len(node.ids),
                    calls=describe_calls(message),
                    role=node.role,
                    message=message,
                )
            )
    return RecordedTurns(tuple(turns), tuple(ToolCallRecord(call.call, call.tool, call.time) for call in calls))


def build_session_config(spec: RolloutSpec, group: str) -> dict[str, Json]:
    """Build the settings with which the session is opened.

    The settings in `spec.session` take precedence, except that `purpose` is always `train` unless `bias` is `record`.
    """
    attempt = {"rollout": spec.rollout, "attempt": spec.attempt} if spec.rollout else {}
    metadata = {
        "task": spec.task.id,
        **({"task_kind": spec.task.kind} if spec.task.kind else {}),
        "agent": spec.agent.name,
        "agent_version": spec.agent.install.version,
        "sandbox": spec.backend.name,
        "group": group,
        **attempt,
    }
    overrides = dict(spec.session)
    return {
        "model": spec.model,
        "signals": msgspec.to_builtins(resolve_signals(spec.agent.signals, spec.model)),
        **attempt,
        **({"tools": msgspec.to_builtins(spec.task.tools)} if spec.task.tools else {}),
        **overrides,
        **resolve_settings(overrides, spec.agent.sampling, spec.endpoint_sampling),
        "metadata": {**metadata, **overrides.get("metadata", {})},
    }
