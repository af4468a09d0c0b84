"""Rollouts as a service: start, watch, abort and finalize them.

    async with Rollouts(config) as rollouts:
        rollout = rollouts.start(RolloutRequest(model_key="vllm://Qwen3-8B", instruction="…", test_script="…"))
        page = await rollouts.events(rollout, wait_s=20)
        result = await rollouts.finalize(rollout)

A rollout belongs to the service, not to its caller, so it continues when the caller disconnects. A rollout that fails raises no
exception: its result describes the failure. States, events and results survive a restart. A rollout that had not ended when the process was
killed is reported as lost, unless its result or grade was recorded.

    runner          the work of a rollout, up to its outcome
    event_log       the events of active rollouts
    finalization    the results of rollouts
    history         rollouts that have ended
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import get_args

import msgspec

from turngate.agents.spec import AgentSpec
from turngate.client.gateway import GatewayClient, RequestRejected
from turngate.common.aio import run_to_completion
from turngate.common.safe_text import make_encodable
from turngate.engines.base import Engine
from turngate.errors import BadRequest, Busy, NotFound, Stopping
from turngate.rollout.outcome import Outcome, Status
from turngate.sandboxes import get_backend as make_backend
from turngate.sandboxes.base import Backend
from turngate.service import conversation, final_state, report
from turngate.service.active_rollout import ActiveRollout
from turngate.service.agents import Agents
from turngate.service.catalog import Catalog, EndpointChoice, EndpointView
from turngate.service.config import ServiceConfig
from turngate.service.event_log import RolloutEventLog
from turngate.service.finalization import Finalizer
from turngate.service.gateways import Gateways
from turngate.service.history import RolloutHistory
from turngate.service.planning import build_task
from turngate.service.request import AnyRequest, RolloutRequest
from turngate.service.result import (
    ConversationMessage,
    EventPage,
    MessagePage,
    RolloutList,
    RolloutResult,
    RolloutState,
)
from turngate.service.runner import RolloutRunner
from turngate.service.storage import ServiceStorage
from turngate.views.trace import parse_trace as read_trace

STATES = ("queued", "running", *get_args(Status))
# Inside the class `Rollouts`, its method `list` hides the builtin.
EndpointViews = list[EndpointView]
Names = list[str]
Conversation = list[ConversationMessage]


class _Parts(msgspec.Struct, frozen=True):
    """The components of the service that exist only while it is open."""

    storage: ServiceStorage
    events: RolloutEventLog
    history: RolloutHistory
    gateways: Gateways
    runner: RolloutRunner
    finalizer: Finalizer


class Rollouts(AbstractAsyncContextManager["Rollouts"]):
    """The rollout service. Use it as an async context manager.

    `backend` replaces the configured sandbox backend. `engines` maps catalog keys to engines that run in this process.
    """

    def __init__(
        self, config: ServiceConfig, *, backend: Backend | None = None, engines: Mapping[str, Engine] | None = None
    ) -> None:
        self.config = config.check()
        self._catalog = Catalog(config.endpoints, config.allowed_hosts)
        self._agents = Agents(config)
        self._backend = backend or make_backend(config.sandbox)
        self._engines = dict(engines or {})
        self._folder = Path(config.data).absolute() / "service"
        self._active: dict[str, ActiveRollout] = {}
        self._open_parts: _Parts | None = None
        self._closing = False
        self._newest_id = 0

    async def __aenter__(self) -> Rollouts:
        await self._backend.check()
        await self._backend.sweep()
        storage = await asyncio.to_thread(ServiceStorage, self._folder)
        async with AsyncExitStack() as stack:
            stack.callback(storage.close)
            history = RolloutHistory(self.config, storage)
            await history.load()
            stack.pop_all()
        events = RolloutEventLog(storage)
        gateways = Gateways(self.config, self._engines, history.cancel_orphans)
        runner = RolloutRunner(
            self.config,
            backend=self._backend,
            agents=self._agents,
            gateways=gateways,
            storage=storage,
            events=events,
        )
        finalizer = Finalizer(self.config, storage, events, history)
        self._open_parts = _Parts(storage, events, history, gateways, runner, finalizer)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await run_to_completion(self._close())

    async def _close(self) -> None:
        """Abort all rollouts, wait until they have ended, and release all resources."""
        self._closing = True
        parts = self._open_parts
        if parts is not None:
            await asyncio.gather(*(self.abort(rollout, "the service is stopping") for rollout in list(self._active)))
            await parts.runner.wait()
            await self._flush()
            parts.history.log_unwritten()
        await self._agents.close()
        if parts is not None:
            await parts.gateways.close()
            parts.storage.close()

    @property
    def _parts(self) -> _Parts:
        assert self._open_parts is not None, "use Rollouts as a context manager"
        return self._open_parts

    # ── verbs ───────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, request: AnyRequest) -> str:
        """Start a rollout, and return its id at once.

        Raise `BadRequest` if an argument is invalid, `Busy` if the queue is full, and `Stopping` if the service is stopping.
        """
        if self._closing:
            raise Stopping("the service is stopping")
        request = request.check()
        choice = self._catalog.choose(request.model_key, request.mode, request.thinking, request.endpoint_url)
        agent = self._agents.find(request.agent)
        self._check_timeout(request.agent_timeout_s)
        if choice.mode == "direct":
            _check_dialect(agent, choice)
        self._check_capacity(request.size())
        storage, rollout = self._parts.storage, self._new_id()
        task = build_task(request, self.config, storage.inputs_folder(rollout))
        self._agents.check(agent, task.instruction)
        task_id = (request.task_id if isinstance(request, RolloutRequest) else "") or task.id
        active = ActiveRollout(rollout, request, choice, agent, task, task_id)
        storage.save_state(active.state, choice.gateway_name)
        self._active[rollout] = active
        facts = {"task": task_id, "agent": agent.name, "model_key": choice.endpoint.key}
        self._parts.events.append(active, "queued", facts)
        self._parts.runner.start(active, self._finish)
        return rollout

    async def run(self, request: AnyRequest, *, abort_if_cancelled: bool = False) -> RolloutResult:
        """Start a rollout, and wait for its result. Cancelling this call stops the rollout only if `abort_if_cancelled` is set."""
        rollout = self.start(request)
        del request  # it may contain megabytes of files
        try:
            return await self.finalize(rollout)
        except asyncio.CancelledError:
            if abort_if_cancelled:
                await run_to_completion(self.abort(rollout, "its caller was cancelled"))
            raise

    def state(self, rollout: str) -> RolloutState:
        """Return the current or final state of a rollout."""
        active = self._active.get(rollout)
        return active.state if active is not None else self._parts.history.find(rollout)

    async def messages(self, rollout: str, after: int = 0, limit: int = 100) -> MessagePage:
        """Return the messages after a cursor, from all branches. Each message contains its branch and the role of its turn."""
        _check_range("after", after, 0, None)
        _check_range("limit", limit, 1, 1000)
        active = self._active.get(rollout)
        if active is None:
            messages = await self._parts.history.read_messages(rollout)
        else:
            messages = await _read_conversation(active)
        page, clamped = conversation.paginate(messages, after, limit, self.config.clamp)
        cursor = page[-1].cursor if page else after
        return MessagePage(
            rollout_id=rollout,
            messages=page,
            cursor=cursor,
            over=active is None and cursor >= len(messages),
            clamped=clamped,
        )

    async def events(self, rollout: str, after: int = 0, limit: int = 200, wait_s: float = 0) -> EventPage:
        """Return the events after a cursor, oldest first. If there are none, wait up to `wait_s` seconds for one."""
        _check_range("after", after, 0, None)
        _check_range("limit", limit, 1, 1000)
        _check_range("wait_s", wait_s, 0, 600)
        deadline = time.monotonic() + wait_s
        while True:
            active = self._active.get(rollout)
            newest = active.cursor if active is not None else self._parts.history.find(rollout).cursor
            page = self._parts.storage.read_events(rollout, after, limit)
            cursor = page[-1].cursor if page else after
            is_over = active is None and cursor >= newest
            remaining_s = deadline - time.monotonic()
            if page or is_over or remaining_s <= 0 or active is None:
                return EventPage(rollout_id=rollout, events=page, cursor=cursor, over=is_over)
            with suppress(TimeoutError):
                await asyncio.wait_for(active.changed.wait(), remaining_s)

    async def abort(self, rollout: str, reason: str = "") -> RolloutState:
        """Stop a rollout at any stage, and return its final state once its agent and sandbox are gone.

        A rollout that has ended is left unchanged.
        """
        active = self._active.get(rollout)
        if active is None:
            return self._parts.history.find(rollout)
        if active.abort_reason is None and active.work is not None and not active.work.done():
            active.abort_reason = make_encodable(reason[:1000])
            self._parts.events.append(active, "abort", {"reason": active.abort_reason})
            active.work.cancel()
        await active.ended.wait()
        return self.state(rollout)

    async def finalize(self, rollout: str, wait_s: float | None = None) -> RolloutResult:
        """Wait until the rollout, including any grading, has ended, and return its result.

        If that takes longer than `wait_s` seconds, return the progress so far, with `done` false. This method can be called repeatedly.
        """
        if wait_s is not None:
            _check_range("wait_s", wait_s, 0, None)
        active = self._active.get(rollout)
        if active is not None:
            try:
                await asyncio.wait_for(active.ended.wait(), wait_s)
            except TimeoutError:
                if rollout in self._active:
                    return report.build_unfinished_result(self.state(rollout))
        return await self._parts.history.read_result(rollout)

    def list(self, status: str = "", limit: int = 50, before: str = "") -> RolloutList:
        """List rollouts, newest first.

        `status` selects the rollouts with that status; the value `done` selects all that have ended. `before` is the id of a rollout, and
        selects only older rollouts.
        """
        known = (*STATES, "done")
        if status and status not in known:
            raise BadRequest(f"status must be one of {', '.join(known)}, not {status[:80]!r}", param="status")
        _check_range("limit", limit, 1, 500)
        active = [rollout.state for rollout in self._active.values()]
        states = sorted((*active, *self._parts.history.states), key=lambda state: state.rollout_id, reverse=True)
        matching = [
            state
            for state in states
            if (not status or state.status == status or (status == "done" and state.done))
            and (not before or state.rollout_id < before)
        ]
        running = sum(state.status == "running" for state in active)
        return RolloutList(
            rollouts=matching[:limit], more=len(matching) > limit, running=running, queued=len(active) - running
        )

    def catalog(self) -> EndpointViews:
        """Return the descriptions of the endpoints that callers may use."""
        return self._catalog.show()

    def agents(self) -> Names:
        """Return the names of the agents that callers may use, with the default agent first."""
        return self._agents.names

    @asynccontextmanager
    async def gateway(self, rollout: str) -> AsyncIterator[GatewayClient]:
        """Connect to the gateway that recorded a rollout, to read the rollout's trace and rows. Start the gateway if necessary.

        Raise `NotFound` if the rollout has no session, or if its gateway cannot be opened again.
        """
        active = self._active.get(rollout)
        if active is not None and active.connection is not None:
            yield active.connection.client
            return
        state = self.state(rollout)
        if not state.session:
            raise NotFound(f"rollout {rollout} has no session, so no gateway has recorded it", param="rollout_id")
        choice = self._catalog.choose(state.model_key, state.mode)
        if self._parts.history.gateway_of(rollout) != choice.gateway_name:
            raise NotFound(
                f"rollout {rollout} used an endpoint_url, so its gateway cannot be opened again; use the rollout's result",
                param="rollout_id",
            )
        async with self._parts.gateways.connect(choice) as connection:
            yield connection.client

    def artifacts_folder(self, rollout: str) -> Path:
        """Return the local folder with the agent's files (stdout, stderr, home/, work/). Only code on this machine can read it."""
        self.state(rollout)
        return self._parts.storage.artifacts_folder(rollout)

    # ── limits and ids ──────────────────────────────────────────────────────────────────────────────────────────

    def _check_timeout(self, timeout_s: float) -> None:
        if timeout_s > self.config.most_agent_timeout_s:
            raise BadRequest(
                f"agent_timeout_s must be at most {self.config.most_agent_timeout_s:g} on this server, not {timeout_s:g}",
                param="agent_timeout_s",
            )

    def _check_capacity(self, size: int) -> None:
        if len(self._active) >= self.config.running + self.config.queued:
            raise Busy(
                f"the queue is full (running: {self.config.running}, waiting: {self.config.queued}); try again when a rollout finishes"
            )
        held = sum(active.input_bytes for active in self._active.values())
        if size and held + size > self.config.queued_bytes:
            raise Busy(
                f"the inputs of this rollout ({size:,} bytes) do not fit in the queue: those of active rollouts already use {held:,} of "
                f"{self.config.queued_bytes:,} bytes; send smaller inputs, or try again when a rollout finishes"
            )

    def _new_id(self) -> str:
        """Create an id for a rollout. Later ids sort after earlier ones."""
        self._newest_id = max(self._newest_id + 1, int(time.time() * 1000))
        return f"{self._newest_id:012x}{secrets.token_hex(6)}"

    # ── the end of a rollout ────────────────────────────────────────────────────────────────────────────────────

    async def _finish(self, active: ActiveRollout, work: asyncio.Task[Outcome]) -> None:
        """Store the result of a rollout, and move the rollout to the history. If the result cannot be built, store a minimal one."""
        failed_stage, active.stage = active.stage, "result"
        finalizer = self._parts.finalizer
        finishing = asyncio.create_task(finalizer.finish(active, work, failed_stage))
        await asyncio.wait([finishing])
        if (error := finishing.exception()) is None:
            state, ended_at = finishing.result()
        else:
            state, ended_at = await finalizer.finish_after_error(active, error)
        try:
            self._parts.events.append(active, "ended", final_state.build_end_event_data(state), at=ended_at)
        finally:
            state = msgspec.structs.replace(state, cursor=active.cursor)
            self._parts.history.add(state, active.choice.gateway_name)
            del self._active[active.id]
            active.ended.set()
            active.notify()
        await self._parts.history.delete_oldest()  # frees disk space for results that are waiting to be written
        await self._flush()

    async def _flush(self) -> None:
        """Write the results that could not be written before, and delete the unused folders of gateways for callers' own endpoints."""
        await self._parts.history.flush()
        in_use = {active.choice.gateway_name for active in self._active.values()}
        await self._parts.gateways.delete_unused(self._parts.history.gateways | in_use)


async def _read_conversation(active: ActiveRollout) -> Conversation:
    """Return the conversation of an active rollout so far. It is cached until the gateway's next event."""
    if active.connection is None or not active.is_recorded:
        return []
    seq = active.seq
    if active.messages[0] != seq:
        try:
            trace = await active.connection.client.trace(active.id)
        except RequestRejected as rejection:
            if rejection.answered != 404:
                raise
            return []
        messages = await asyncio.to_thread(lambda: conversation.build_messages(read_trace(trace)))
        active.messages = seq, messages
    return active.messages[1]


def _check_dialect(agent: AgentSpec, choice: EndpointChoice) -> None:
    """Raise `BadRequest` if the endpoint does not support the agent's dialect, because direct mode does not translate between dialects."""
    spoken = choice.endpoint.kind.speaks
    if agent.dialect != "any" and agent.dialect not in spoken:
        raise BadRequest(
            f"mode cannot be 'direct', which does not translate between dialects: {agent.name} uses {agent.dialect}, but "
            f"{choice.endpoint.key} supports only {', '.join(spoken)}; use observe mode or a different agent",
            param="mode",
        )


def _check_range(name: str, value: float, least: float, most: float | None) -> None:
    if not least <= value <= (math.inf if most is None else most):
        bound = f"at least {least:g}" if most is None else f"between {least:g} and {most:g}"
        raise BadRequest(f"{name} must be {bound}, not {value}", param=name)
