"""The service: rollouts that are started, watched, aborted and finalised by whoever is at the other end.

    async with Rollouts(config) as rollouts:
        rollout = rollouts.start(Asked(model_key="vllm://Qwen3-8B", instruction="…", test_script="…"))
        page = await rollouts.events(rollout, wait_s=20)
        result = await rollouts.finalize(rollout)

A rollout belongs to the service, not to who started it: a caller that goes away does not end it. What goes wrong with a task, an agent, an
engine or a sandbox is a result with an `error`; exceptions are for arguments that are wrong and ids that are unknown. States, events
and results are on disk (`books.py`), and there after a restart; what ran when the process was killed is told as lost. MCP, the OpenEnv
environment and the Python API call only this.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, get_args

import msgspec

from turngate.agents.spec import AgentSpec
from turngate.client.gateway import GatewayClient, RequestRejected
from turngate.common.aio import run_to_completion
from turngate.common.safe_text import make_encodable
from turngate.engines.base import Engine
from turngate.errors import BadRequest, Busy, NotFound, Stopping, StoreError, TurngateError
from turngate.rollout.concurrency import Bounds, Concurrency
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.outcome import Outcome, Status
from turngate.rollout.rollout import Rollout
from turngate.sandboxes import get_backend as make_backend
from turngate.sandboxes.base import Backend
from turngate.service import conversation, finalization, report
from turngate.service.active_rollout import Live
from turngate.service.agents import Agents
from turngate.service.catalog import Catalog, Choice, EndpointView
from turngate.service.config import ServiceConfig
from turngate.service.direct_mode import Forwarder, Unrecorded
from turngate.service.gateways import Gateways, Reached
from turngate.service.planning import given, lay, order_of, task_of
from turngate.service.request import AnyAsked, Asked
from turngate.service.result import (
    Event,
    EventPage,
    Listing,
    Messages,
    RolloutResult,
    RolloutState,
    Said,
)
from turngate.service.storage import Books
from turngate.types import Json
from turngate.views.trace import TraceView
from turngate.views.trace import parse_trace as read_trace

log = logging.getLogger("turngate")
_DRAIN_S = 20.0  # for the last events, and for the trace, of a rollout that has ended
STATES = ("queued", "running", *get_args(Status))
Views = list[EndpointView]  # `list` is a verb in there
Names = list[str]
Conversation = list[Said]
T = TypeVar("T")


class Rollouts(AbstractAsyncContextManager["Rollouts"]):
    """`backend`: sandboxes of the caller's own making. `engines`: for endpoints whose engine lives in this process, by key."""

    def __init__(
        self, config: ServiceConfig, *, backend: Backend | None = None, engines: Mapping[str, Engine] | None = None
    ) -> None:
        self.config = config.check()
        self._catalog = Catalog(config.endpoints, config.allowed_hosts)
        self._agents = Agents(config)
        self._backend = backend or make_backend(config.sandbox)
        self._engines = dict(engines or {})
        self._live: dict[str, Live] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._ended: dict[str, RolloutState] = {}  # in the order in which they did
        self._places: dict[str, str] = {}  # of their gateways
        self._lost: dict[str, list[str]] = {}  # sessions that may still be open, by their gateway's place
        self._unwritten: dict[str, tuple[RolloutResult, list[Said]]] = {}  # where the disk was full
        self._catching_up = asyncio.Lock()
        self._folder = Path(config.data).absolute() / "service"
        self._closing = False
        self._newest = 0  # what the newest id begins with
        self._books: Books | None = None
        self._gateways: Gateways | None = None
        self._slots: asyncio.Semaphore | None = None
        self._gates: Concurrency | None = None

    async def __aenter__(self) -> Rollouts:
        await self._backend.check()
        await self._backend.sweep()
        self._books = await asyncio.to_thread(Books, self._folder)
        async with AsyncExitStack() as stack:
            stack.callback(self._books.close)
            await self._taken_up()
            stack.pop_all()
        self._gateways = Gateways(self.config, self._engines, self._opened)
        self._slots = asyncio.Semaphore(self.config.running)
        bounds = Bounds(running=self.config.running, starting=self.config.starting, grading=self.config.grading, warm=0)
        self._gates = Concurrency(bounds)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await run_to_completion(self._close())

    async def _close(self) -> None:
        """Whatever still runs is aborted, and everything is cleaned up."""
        self._closing = True
        await asyncio.gather(*(self.abort(rollout, "the service is being stopped") for rollout in list(self._live)))
        await asyncio.gather(*self._lives)
        if self._books is not None:
            await self._caught_up()
            for rollout in self._unwritten:
                log.error("the result of rollout %s is lost: it could not be written", rollout)
        await self._agents.close()
        if self._gateways is not None:
            await self._gateways.close()
        if self._books is not None:
            self._books.close()

    # ── verbs ───────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, asked: AnyAsked) -> str:
        """Begin a rollout: its id, at once. `BadRequest` names the argument that is wrong; `Busy`: as many wait as may."""
        if self._closing:
            raise Stopping("the service is being stopped")
        asked = asked.check()
        choice = self._catalog.choose(asked.model_key, asked.mode, asked.thinking, asked.endpoint_url)
        agent = self._agents.named(asked.agent)
        if asked.agent_timeout_s > self.config.most_agent_timeout_s:
            raise BadRequest(
                f"agent_timeout_s: {asked.agent_timeout_s:g} is more than this server allows "
                f"({self.config.most_agent_timeout_s:g})",
                param="agent_timeout_s",
            )
        if choice.mode == "direct":
            _speaks(agent, choice)
        most = self.config.running + self.config.queued
        if len(self._live) >= most:
            raise Busy(
                f"the queue is full: {self.config.running} rollouts run and {self.config.queued} wait; try again when one "
                "has ended"
            )
        self._room_for(asked.size())
        rollout = self._new_id()
        task = task_of(asked, self.config, self._store.inputs(rollout))
        self._agents.check(agent, task.instruction)
        task_id = (asked.task_id if isinstance(asked, Asked) else "") or task.id
        live = Live(rollout, asked, choice, agent, task, task_id)
        self._store.put(live.state(), choice.place)
        self._live[rollout] = live
        self._tell(live, "queued", {"task": task_id, "agent": agent.name, "model_key": choice.endpoint.key})
        live.laid = asyncio.create_task(self._laid(live))
        live.work = asyncio.create_task(self._worked(live), name=f"rollout {rollout}")
        life = asyncio.create_task(self._lived(live, live.work), name=f"life of rollout {rollout}")
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)
        return rollout

    def _room_for(self, size: int) -> None:
        held = sum(live.size for live in self._live.values())
        if size and held + size > self.config.queued_bytes:
            raise Busy(
                f"the queue is full: what was given to those that run and wait has {held:,} bytes, and at most "
                f"{self.config.queued_bytes:,} are kept; try again when one has ended"
            )

    def _new_id(self) -> str:
        """Later ones are greater."""
        self._newest = max(self._newest + 1, int(time.time() * 1000))
        return f"{self._newest:012x}{secrets.token_hex(6)}"

    async def run(self, asked: AnyAsked, *, abort_if_cancelled: bool = False) -> RolloutResult:
        """`start`, then `finalize`. Cancelling the caller leaves the rollout alone, unless `abort_if_cancelled`."""
        rollout = self.start(asked)
        del asked  # megabytes of files, maybe
        try:
            return await self.finalize(rollout)
        except asyncio.CancelledError:
            if abort_if_cancelled:
                await run_to_completion(self.abort(rollout, "its caller was cancelled"))
            raise

    def state(self, rollout: str) -> RolloutState:
        """How far it is."""
        live = self._live.get(rollout)
        return live.state() if live is not None else self._known(rollout)

    async def messages(self, rollout: str, after: int = 0, limit: int = 100) -> Messages:
        """The conversation so far, past a cursor: every branch of it, each message with its branch and the role of its turn."""
        _bounded("after", after, 0, None)
        _bounded("limit", limit, 1, 1000)
        live = self._live.get(rollout)
        if live is None:
            self._known(rollout)
            kept = self._unwritten.get(rollout)
            said = kept[1] if kept is not None else await asyncio.to_thread(self._store.messages, rollout)
        else:
            said = await self._said(live)
        found, clamped = conversation.page(said, after, limit, self.config.clamp)
        cursor = found[-1].cursor if found else after
        return Messages(
            rollout_id=rollout,
            messages=found,
            cursor=cursor,
            over=live is None and cursor >= len(said),
            clamped=clamped,
        )

    async def events(self, rollout: str, after: int = 0, limit: int = 200, wait_s: float = 0) -> EventPage:
        """What happened past a cursor, in order; none is lost, and none is told twice. Waits up to `wait_s` for the first."""
        _bounded("after", after, 0, None)
        _bounded("limit", limit, 1, 1000)
        _bounded("wait_s", wait_s, 0, 600)
        deadline = time.monotonic() + wait_s
        while True:
            live = self._live.get(rollout)
            newest = live.cursor if live is not None else self._known(rollout).cursor
            page = self._store.page(rollout, after, limit)
            cursor = page[-1].cursor if page else after
            over = live is None and cursor >= newest
            left = deadline - time.monotonic()
            if page or over or left <= 0 or live is None:
                return EventPage(rollout_id=rollout, events=page, cursor=cursor, over=over)
            with suppress(TimeoutError):
                await asyncio.wait_for(live.changed.wait(), left)

    async def abort(self, rollout: str, reason: str = "") -> RolloutState:
        """End it, at whatever stage: generation, agent and sandbox are gone when this returns. Fine when it has ended already."""
        live = self._live.get(rollout)
        if live is None:
            return self._known(rollout)
        if live.aborted is None and live.work is not None and not live.work.done():
            live.aborted = make_encodable(reason[:1000])
            self._tell(live, "abort", {"reason": live.aborted})
            live.work.cancel()
        await live.over.wait()
        return self.state(rollout)

    async def finalize(self, rollout: str, wait_s: float | None = None) -> RolloutResult:
        """The result, when the rollout has ended and is graded. Past `wait_s` how far it is, with `done` false. As often as one likes."""
        if wait_s is not None:
            _bounded("wait_s", wait_s, 0, None)
        live = self._live.get(rollout)
        if live is not None:
            try:
                await asyncio.wait_for(live.over.wait(), wait_s)
            except TimeoutError:
                return (
                    finalization.unfinished(self.state(rollout))
                    if rollout in self._live
                    else await self._result(rollout)
                )
        return await self._result(rollout)

    def list(self, status: str = "", limit: int = 50, before: str = "") -> Listing:
        """Rollouts, newest first; of one status, or `done`, or all. `before`: those that were started before that one."""
        known = (*STATES, "done")
        if status and status not in known:
            raise BadRequest(f"status: {status[:80]!r} is none of {', '.join(known)}", param="status")
        _bounded("limit", limit, 1, 500)
        live = [one.state() for one in self._live.values()]
        found = sorted((*live, *self._ended.values()), key=lambda one: one.rollout_id, reverse=True)
        wanted = [
            one
            for one in found
            if (not status or one.status == status or (status == "done" and one.done))
            and (not before or one.rollout_id < before)
        ]
        running = sum(one.status == "running" for one in live)
        return Listing(rollouts=wanted[:limit], more=len(wanted) > limit, running=running, queued=len(live) - running)

    def catalog(self) -> Views:
        """The endpoints that there are."""
        return self._catalog.show()

    def agents(self) -> Names:
        """The agents that callers may use, the default first."""
        return self._agents.names

    @asynccontextmanager
    async def gateway(self, rollout: str) -> AsyncIterator[GatewayClient]:
        """The gateway that has its trace, for what is not in a result: whole traces, rows, verdicts. Started again if need be."""
        live = self._live.get(rollout)
        if live is not None and live.reached is not None:
            yield live.reached.client
            return
        state = self.state(rollout)
        if not state.session:
            raise NotFound(f"rollout_id: {rollout} has no session: nothing of it was recorded", param="rollout_id")
        assert self._gateways is not None
        choice = self._catalog.choose(state.model_key, state.mode)
        if self._places.get(rollout) != choice.place:
            raise NotFound(f"rollout_id: the gateway of {rollout} is not in the catalog any more", param="rollout_id")
        async with self._gateways.reached(choice) as reached:
            yield reached.client

    def left(self, rollout: str) -> Path:
        """Where what its agent left is kept (stdout, stderr, home/, work/), for code on this machine."""
        self.state(rollout)
        return self._store.left(rollout)

    # ── one rollout ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _worked(self, live: Live) -> Outcome:
        """Everything that can be aborted. What it opens, `_lived` closes: the last events are read after this."""
        assert self._slots is not None and self._gates is not None
        async with self._slots:
            live.running = True
            live.seconds["queued"] = round(time.monotonic() - live.began, 3)
            self._tell(live, "started", {"waited_s": live.seconds["queued"]})
            with live.timed("gateway"):
                reached = live.reached = await self._reached(live)
                live.model = reached.model
            with live.timed("install"):
                installed = await self._agents.installed(live.agent)
            if live.laid is not None:
                await asyncio.shield(live.laid)
            order = order_of(
                live.id,
                live.asked,
                live.task,
                live.choice,
                self.config,
                backend=self._backend,
                agent=live.agent,
                installed=installed,
                options=self._agents.options(live.agent),
                model=reached.model,
                folder=self._store.folder / "left",
            )
            slot = self._gates.new_slot()
            live.rollout = Rollout(order, reached.client, reached.connector, live.watch, gate=slot, session=live.id)
            live.following = asyncio.create_task(self._followed(live, reached.client))
            try:
                return await live.rollout.run()
            finally:
                slot.leave()

    async def _laid(self, live: Live) -> None:
        """What its caller gave is on disk while it waits, and no longer in memory."""
        await asyncio.to_thread(lay, live.asked, self._store.inputs(live.id))
        live.asked = live.asked.laid()

    async def _reached(self, live: Live) -> Reached:
        assert self._gateways is not None
        if live.choice.mode != "direct":
            return await live.stack.enter_async_context(self._gateways.reached(live.choice))
        forwarder = Forwarder(live.choice.endpoint.urls[0])
        url = await live.stack.enter_async_context(forwarder.open())
        client = Unrecorded(url, forwarder, lambda kind, data: self._tell(live, kind, data))
        connector = GatewayConnector(url, self.config.public_url, self.config.tunnel)
        await live.stack.enter_async_context(client)
        await live.stack.enter_async_context(connector)
        return Reached(client, connector, live.choice.endpoint.served)

    async def _lived(self, live: Live, work: asyncio.Task[Outcome]) -> None:
        """From its start to its result. Nobody cancels this, so that whatever happens there is one."""
        await asyncio.wait([work])
        failed_at, live.stage = live.stage, "result"
        ending = asyncio.create_task(self._finished(live, work, failed_at))
        await asyncio.wait([ending])
        if (error := ending.exception()) is not None:
            await self._ended_anyhow(live, error)
        await self._removed_oldest()  # which may make room
        await self._caught_up()

    async def _finished(self, live: Live, work: asyncio.Task[Outcome], failed_at: str) -> None:
        """Nothing here that is only for showing may cost the outcome."""
        outcome = live.rollout.outcome if live.rollout is not None else None
        view: TraceView | None = None
        said: Conversation = []
        if live.following is not None:
            await _cancelled(live.following)
        if live.reached is not None and live.choice.mode != "direct":
            client = live.reached.client
            await _tried(live, "its gateway could not be asked for the last events", self._drained(live, client), None)
            if outcome is not None and outcome.session:
                missing = "its gateway could not be asked for the trace, which has the turns"
                view = await _tried(live, missing, self._viewed(live, client), None)
            if view is not None:
                told = asyncio.to_thread(conversation.messages, view)
                said = await _tried(live, "the conversation cannot be shown", told, [])
        await self._let_go(live)
        state = finalization.settled(live, work, outcome, failed_at)
        result = await self._reported(live, state, outcome, view)
        state, over_at = msgspec.structs.replace(state, wall_s=live.wall_s()), time.time()
        seconds = {"queued": state.wall_s, **live.seconds, **(outcome.seconds if outcome is not None else {})}
        stop = result.stop if live.aborted is None or state.status != "cancelled" else f"aborted: {live.aborted}"
        result = msgspec.structs.replace(result, wall_s=state.wall_s, seconds=seconds, stop=stop.removesuffix(": "))
        await self._keep(result, said)
        await asyncio.to_thread(self._store.clear_inputs, live.id)
        if not self.config.keep_work:
            await asyncio.to_thread(self._store.clear_work, live.id)
        self._end(live, state, over_at)

    async def _ended_anyhow(self, live: Live, error: BaseException) -> None:
        """Its result could not be made. What its outcome says stands, and nothing of it is left open."""
        state, result = finalization.broken(live, error)
        await self._let_go(live)
        await self._keep(result, [])
        await asyncio.to_thread(self._store.clear_inputs, live.id)
        if live.id in self._live:
            self._end(live, state, time.time())

    async def _let_go(self, live: Live) -> None:
        if live.laid is not None and not live.laid.done():  # it was aborted before
            await asyncio.wait([live.laid])
        if live.laid is not None and (error := live.laid.exception()) is not None:
            log.warning("rollout %s: %s", live.id, error)
        await _tried(live, "what it held open could not all be closed", live.stack.aclose(), None)

    async def _reported(
        self, live: Live, state: RolloutState, outcome: Outcome | None, view: TraceView | None
    ) -> RolloutResult:
        """All that can be shown; or else without the turns; or else the bare facts."""
        for shown, missing in ((view, "its turns cannot be shown"), (None, "what it left cannot be shown")):
            made = asyncio.to_thread(self._report, live, state, outcome, shown)
            result = await _tried(live, missing, made, None)
            if result is not None:
                return result
        return report.bare(state, outcome, live.notes)

    def _report(
        self, live: Live, state: RolloutState, outcome: Outcome | None, view: TraceView | None
    ) -> RolloutResult:
        """In a thread."""
        folder, begun = self._store.left(live.id), given(live.asked, self._store.inputs(live.id))
        return report.ended(state, outcome, view, folder, self.config.clamp, live.notes, begun)

    async def _keep(self, result: RolloutResult, said: Conversation) -> None:
        """On disk; in memory where that is full."""
        try:
            await asyncio.to_thread(self._store.write, result, said)
        except StoreError as error:
            log.error("the result of rollout %s is only in memory: %s", result.rollout_id, error.message)
            self._unwritten[result.rollout_id] = result, said

    def _end(self, live: Live, state: RolloutState, at: float) -> None:
        """The last word about it. `at`: the time of day at which it was over."""
        facts = {"status": state.status, "class": state.kind, "reward": state.reward, "wall_s": state.wall_s}
        self._tell(live, "ended", facts, at=at)
        self._ended[live.id] = msgspec.structs.replace(state, cursor=live.cursor)
        self._places[live.id] = live.choice.place
        with _logged(live.id):
            self._store.put(self._ended[live.id], live.choice.place)
        del self._live[live.id]
        live.over.set()
        live.wake()

    # ── what happens ────────────────────────────────────────────────────────────────────────────────────────────

    def _tell(
        self, live: Live, kind: str, data: dict[str, Json], seq: int | None = None, at: float | None = None
    ) -> None:
        """One more event. It is on disk before anybody is told of it."""
        event = Event(cursor=live.cursor + 1, time=at or time.time(), kind=kind, data=data, seq=seq)
        with _logged(live.id):
            self._store.add(live.id, event)
            live.cursor += 1
            live.seq = seq or live.seq
            live.wake()

    def _took(self, live: Live, event: Json) -> bool:
        """What the gateway told, past what we have. False: it could not be kept, and has to be told again."""
        if event["seq"] > live.seq:
            self._tell(live, event["kind"], event["data"], event["seq"], event["time"])
        return live.seq >= int(event["seq"])

    async def _follow(self, live: Live, client: GatewayClient, *, wait: bool = True) -> None:
        """Its events at the gateway, as they come; or those that there are."""
        while True:
            pause = 0.05  # the gateway does not know the session yet
            async with aclosing(client.events(live.id, live.seq, wait=wait)) as events:
                async for event in events:
                    if not self._took(live, event):
                        pause = 1.0
                        break
                else:
                    if not wait:
                        return
            await asyncio.sleep(pause)

    async def _followed(self, live: Live, client: GatewayClient) -> None:
        if live.choice.mode != "direct":  # there, the stages are told to us
            await live.announced.wait()
            await self._follow(live, client)

    async def _drained(self, live: Live, client: GatewayClient) -> None:
        """What was told in the end, after which there is no more."""
        async with asyncio.timeout(_DRAIN_S):
            await self._follow(live, client, wait=False)

    async def _viewed(self, live: Live, client: GatewayClient) -> TraceView:
        async with asyncio.timeout(_DRAIN_S * 3):
            return await asyncio.to_thread(read_trace, await client.trace(live.id))

    async def _said(self, live: Live) -> Conversation:
        """Made anew when something has happened since."""
        if live.reached is None or not live.recorded:
            return []
        seq = live.seq
        if live.said[0] != seq:
            try:
                trace = await live.reached.client.trace(live.id)
            except RequestRejected as refused:
                if refused.answered != 404:
                    raise
                return []
            said = await asyncio.to_thread(lambda: conversation.messages(read_trace(trace)))
            live.said = seq, said
        return live.said[1]

    # ── what is remembered ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def _store(self) -> Books:
        assert self._books is not None, "use it as a context manager"
        return self._books

    def _known(self, rollout: str) -> RolloutState:
        found = self._ended.get(rollout)
        if found is None:
            raise NotFound(f"rollout_id: there is no rollout {rollout[:80]!r}", param="rollout_id")
        return found

    async def _result(self, rollout: str) -> RolloutResult:
        self._known(rollout)
        if (kept := self._unwritten.get(rollout)) is not None:
            return kept[0]
        found = await asyncio.to_thread(self._store.result, rollout)
        if found is None:
            raise StoreError(f"rollout_id: the result of {rollout} is gone from the disk", param="rollout_id")
        return found

    async def _taken_up(self) -> None:
        """Where the last process left off. What ran then is lost, and told so."""
        for state, place in self._store.states():
            if not state.done:
                state = await self._given_up(state, place)
            self._ended[state.rollout_id] = state
            self._places[state.rollout_id] = place
        await self._removed_oldest()

    async def _given_up(self, state: RolloutState, place: str) -> RolloutState:
        store, rollout = self._store, state.rollout_id
        events = store.page(rollout, 0, -1)
        finished = await asyncio.to_thread(store.result, rollout)
        if finished is not None:  # all but the last line about it was written
            state = finalization.state_of(finished, state)
        else:
            state = finalization.lost(state, events)
            notes = () if state.error is not None else (finalization.UNSHOWN,)
            result = report.ended(state, None, None, store.left(rollout), self.config.clamp, notes)
            await asyncio.to_thread(store.write, result, ())
        if not events or events[-1].kind != "ended":
            facts = {"status": state.status, "class": state.kind, "reward": state.reward, "wall_s": state.wall_s}
            events.append(Event(cursor=len(events) + 1, time=time.time(), kind="ended", data=facts))
            store.add(rollout, events[-1])
        state = msgspec.structs.replace(state, cursor=len(events))
        store.put(state, place)
        await asyncio.to_thread(store.clear_inputs, rollout)
        self._lost.setdefault(place, []).append(rollout)
        return state

    async def _opened(self, place: str, client: GatewayClient) -> None:
        """A gateway was started: sessions that nobody runs any more are ended there."""
        for session in self._lost.pop(place, ()):
            with suppress(TurngateError):
                await client.cancel(session)

    async def _removed_oldest(self) -> None:
        surplus = list(self._ended)[: max(0, len(self._ended) - self.config.keep)]
        if not surplus:
            return
        try:
            self._store.forget(surplus)
        except StoreError as error:  # what is remembered keeps its files; there is a next time
            log.error("the oldest rollouts could not be removed: %s", error.message)
            return
        for rollout in surplus:
            del self._ended[rollout], self._places[rollout]
            self._unwritten.pop(rollout, None)
        for rollout in surplus:
            await asyncio.to_thread(self._store.clear, rollout)

    async def _caught_up(self) -> None:
        """What is only in memory is written down as soon as there is room."""
        async with self._catching_up:
            for rollout, kept in list(self._unwritten.items()):
                try:
                    await asyncio.to_thread(self._store.write, *kept)
                    if (state := self._ended.get(rollout)) is not None:
                        self._store.put(state, self._places[rollout])
                except StoreError:  # it was told when it happened
                    return
                self._unwritten.pop(rollout, None)
            if self._gateways is not None:
                await self._gateways.forget(self._remembered)

    @property
    def _remembered(self) -> set[str]:
        """Places of gateways that a rollout may still be asked about at."""
        return {*self._places.values(), *(live.choice.place for live in self._live.values())}


def _speaks(agent: AgentSpec, choice: Choice) -> None:
    """In direct mode nobody translates between an agent and its endpoint."""
    spoken = choice.endpoint.kind.speaks
    if agent.dialect != "any" and agent.dialect not in spoken:
        raise BadRequest(
            f"mode: {agent.name} speaks {agent.dialect}, and {choice.endpoint.key} {' and '.join(spoken)}; in direct mode nobody "
            "translates: use observe, or another agent",
            param="mode",
        )


def _bounded(name: str, value: float, least: float, most: float | None) -> None:
    if not least <= value <= (math.inf if most is None else most):
        bound = f"at least {least:g}" if most is None else f"between {least:g} and {most:g}"
        raise BadRequest(f"{name}: {value} has to be {bound}", param=name)


@contextmanager
def _logged(rollout: str) -> Iterator[None]:
    """A rollout goes on where the disk does not."""
    try:
        yield
    except StoreError as error:
        log.error("rollout %s: %s", rollout, error.message)


async def _tried(live: Live, missing: str, work: Coroutine[Any, Any, T], instead: T) -> T:
    """What a rollout can do without. Whatever goes wrong with it is a note: agents write what nobody thought of."""
    task = asyncio.create_task(work)
    await asyncio.wait([task])
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, TurngateError | TimeoutError):
        live.notes.append(f"{missing}: {error}".removesuffix(": "))
    else:
        log.error("rollout %s: %s", live.id, missing, exc_info=error)
        live.notes.append(f"{missing}: Turngate itself failed ({type(error).__name__})")
    return instead


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the events of a rollout were not followed to the end", exc_info=error)
