"""One rollout, stage by stage.

    start   sandbox → files → setup
    run     session → relay → launch → agent → seal → collect → clean
    grade   grade → record

    sandbox   make the place to run in, with the agent's installation
    files     the task's files
    setup     the task's own script
    session   open one at the gateway: from here on there is a trace
    relay     give the agent its way to the gateway, and nowhere else
    launch    write the agent's settings, and see that its program is there
    agent     run it as a background job until it ends, its time is up, its session met a limit or was ended, or somebody cancels
    seal      no more turns
    collect   what it printed, its own transcript, its work
    clean     everything is stopped and removed, whatever happened before
    grade     the host decides, in a fresh sandbox that no agent has touched
    record    the gateway keeps the outcome beside the trace

Each stage has a time limit, and a failure says whose fault it was. Whatever happens, the trace that was recorded stays. An agent is
never run twice on one trace; only the grading is tried again. Called by `turngate run`, `turngate batch` and `turngate agents check`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from turngate.agents.host_tools import add_tool_commands, describe_tools
from turngate.agents.launch import Launch, plan_launch, resolve_signals
from turngate.client.gateway import GatewayClient, GatewayUnreachable, OpenedSession, RequestRejected
from turngate.common.aio import run_to_completion
from turngate.common.safe_text import make_encodable
from turngate.errors import (
    AgentError,
    Boundary,
    ContextOverflow,
    EngineRejected,
    EngineTimeout,
    SandboxError,
    SandboxGone,
    TaskError,
    TurngateError,
)
from turngate.rollout.classify import graded, lost, recorded, without_grading
from turngate.rollout.collect import collect
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.outcome import Fault, Outcome, PhaseGate, ProgressCallback, RolloutProgress, Stage
from turngate.rollout.spec import RolloutSpec
from turngate.rollout.stage_events import StageEvents
from turngate.rollout.transcript_diff import compare_transcript
from turngate.sandboxes.base import Job, Mount, Sandbox, SandboxSpec
from turngate.tasks import staging
from turngate.tasks.grading.types import Grade, GradingEnvironment, Work
from turngate.tasks.grading.work import collect_work, needs_git
from turngate.telemetry.logs import REDACTED, log_context, redact
from turngate.telemetry.spans import Span, current_tracer
from turngate.types import STALE, Json
from turngate.types import Limits as SessionLimits

log = logging.getLogger(__name__)
# Seconds. The agent's own time is the rollout's to say.
_LIMITS: Mapping[Stage, float] = {
    "sandbox": 600,
    "files": 300,
    "session": 30,
    "relay": 120,
    "launch": 120,
    "seal": 60,
    "collect": 300,
    "clean": 120,
    "record": 60,
}
# Whose fault it is where a stage takes longer than that; the sandbox's in all others.
_SLOW: Mapping[str, type[TurngateError]] = {"setup": TaskError, "session": TurngateError, "seal": TurngateError}
_SPARE_S = 15.0  # that a stage has beyond what is done in it, to end that properly
INSTALLED = "/opt/turngate"  # where an agent's program is seen in a sandbox
_AFTER_LIMIT_S = 30.0  # for an agent to end by itself when its session has
SILENT_SHARE = 0.5  # of an agent's time: an engine that said nothing for longer is why it ran out
GIVEN_UP_S = 60.0  # an agent that did not wait so long for its engine gave up too early
_BACK_S = 40.0  # for a gateway that is being started again
_END_S = 10.0  # for the gateway to end the session of a rollout that went wrong
_SUM_S = 120.0  # to count the rows of a long trace
_TOLD = 2000  # characters of a text in an event
_FIRST: Stage = "sandbox"
_SECRET = 6  # characters that a secret has at least
_SECRETS = re.compile("(?i)key|token|secret|passw|credential")  # in the names of variables
_SESSION_LIMITS = tuple(field.name for field in msgspec.structs.fields(SessionLimits))
_THERE = 'command -v -- "$1" >/dev/null'
_PACKED = b"version"
_PACK = 'PATH="/usr/bin:/bin:$PATH"; exec tar -cf - -C /proc version 2>/dev/null'  # any tar can, and it needs no disk


class Rollout:
    """Runs one `Order`. Made for one use."""

    def __init__(
        self,
        order: RolloutSpec,
        gateway: GatewayClient,
        connector: GatewayConnector,
        watch: ProgressCallback = lambda progress: None,
        *,
        gate: PhaseGate = lambda phase: nullcontext(),
        on_sandbox_ready: Callable[[str], None] = lambda workdir: None,
        session: str = "",
    ) -> None:
        """`gate` bounds how many are in a phase at once; `on_sandbox_ready` is told the working folder when there is one; `session` is the
        id that the session will have, where the caller wants to know it before."""
        self._order = order
        self._gateway = gateway
        self._connector = connector
        self._watch = watch
        self._gate = gate
        self._on_sandbox_ready = on_sandbox_ready
        self._session = session or uuid.uuid4().hex
        self._key = ""  # the session's, once it is open
        self._work: Work | None = None
        self._announcer = StageEvents(gateway, self._session)
        self.progress = RolloutProgress(started=time.time())
        self.outcome = Outcome(
            rollout=order.rollout or self._session,
            group=order.group or order.task.id,
            attempt=order.attempt,
            task=order.task.id,
            agent=order.agent.name,
            version=order.agent.install.version,
            sandbox=order.backend.name,
            model=order.model,
        )
        self._ending = self._ended = False  # the session, by us
        self._ran_s = 0.0  # the agent
        self._fault_at: Stage | None = None
        self._complete = False  # all there is to know is known: being cancelled changes nothing about it
        # The installation as the sandbox sees it.
        self._installed, self._pairs = (
            order.installed.seen_at(INSTALLED)
            if order.backend.relocates
            else (order.installed, tuple((folder, folder) for folder in order.installed.mounts))
        )
        self._over = asyncio.Event()  # the session: a limit was met, or somebody ended it
        self._span: Span | None = None  # of the rollout, and of the agent's run while there is one
        self._run_span: Span | None = None

    async def run(self) -> Outcome:
        """To the end. Cancelling it is a way to end it: everything is cleaned up before the cancellation goes on."""
        outcome, spans = self.outcome, current_tracer()
        if spans is not None:
            known = (outcome.rollout, outcome.group, outcome.task, outcome.agent, outcome.sandbox, outcome.attempt)
            self._span = spans.start_rollout(*known)
        with log_context(self._session, {"rollout": outcome.rollout, "group": outcome.group}):
            try:
                async with self._announcer:
                    return await self._run()
            finally:
                self._sum_up_spans()
                log.info(
                    "ended: %s, %s, reward %s, %d turns", outcome.status, outcome.kind, outcome.reward, outcome.turns
                )

    def _sum_up_spans(self) -> None:
        if self._span is None:
            return
        outcome = self.outcome
        self._span.set_attributes(
            {
                "turngate.status": outcome.status,
                "turngate.class": outcome.kind,
                "turngate.reward": outcome.reward,
                "turngate.turns": outcome.turns,
                "gen_ai.usage.output_tokens": outcome.sampled_tokens,
                "gen_ai.conversation.id": outcome.session or None,
            }
        )
        if outcome.fault is not None:
            self._span.set_error(outcome.fault.boundary)
        self._span.end()

    async def _run(self) -> Outcome:
        try:
            await self._agent_phases()
        except asyncio.CancelledError:
            await self._cancelled()
            raise
        except TurngateError as error:
            if _being_cancelled():  # and something else went wrong on the way out
                self._note(error.message)
                await self._cancelled()
                raise asyncio.CancelledError from error
            self._failed(error)
        try:
            await self._summed_up(_SUM_S)
            await self._judged()
        except asyncio.CancelledError:
            if self._to_be_graded:  # without its grade it is not complete, and whoever goes on with it starts anew
                self.outcome.status, self.outcome.kind = "cancelled", None
            raise
        finally:
            await run_to_completion(asyncio.to_thread(self._discard_work))
        await self._recorded()
        self._told("done")
        return self.outcome

    async def _cancelled(self) -> None:
        if not self._complete or self._to_be_graded:
            self.outcome.status = "cancelled"
        await self._summed_up(_END_S)
        await run_to_completion(asyncio.to_thread(self._discard_work))
        self._told("done")

    async def _agent_phases(self) -> None:
        """Start and run. What they made is removed when this ends, so that nothing of the agent is there when its work is graded."""
        async with AsyncExitStack() as stack:
            async with self._gate("start"):
                sandbox = await self._started(stack)
            async with self._gate("run"):
                with self._running():
                    await self._ran(stack, sandbox)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """The agent's run as a span of its own, under which the gateway puts the turns."""
        if self._span is None:
            yield
            return
        agent = self._order.agent
        facts = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": "turngate",
            "gen_ai.agent.name": agent.name,
            "gen_ai.conversation.id": self._session,
            "gen_ai.request.model": self._order.model,
            "turngate.agent.version": agent.install.version,
        }
        self._run_span = self._span.start_child(f"invoke_agent {agent.name}", facts)
        try:
            yield
        finally:
            self._run_span.end()
            self._run_span = None

    async def _started(self, stack: AsyncExitStack) -> Sandbox:
        order = self._order
        async with self._stage("sandbox"):
            spec = self._spec()
            self.outcome.not_enforced = order.backend.not_enforced(spec)
            sandbox = await order.backend.create(spec)
        stack.push_async_callback(self._clean, sandbox)
        self._on_sandbox_ready(sandbox.workdir)
        async with self._stage("files"):
            await staging.upload_files(sandbox, order.task)
        async with self._stage("setup", order.task.setup_timeout_s + _SPARE_S):
            await staging.run_setup(sandbox, order.task)
        return sandbox

    async def _ran(self, stack: AsyncExitStack, sandbox: Sandbox) -> None:
        order = self._order
        async with self._stage("session"):
            opened = await self._open(stack)
        await stack.enter_async_context(self._followed(opened.id))
        async with self._stage("relay"):
            way = await stack.enter_async_context(
                self._connector.connect(sandbox, python=self._installed.python, node=self._installed.node)
            )
        async with self._stage("launch"):
            launch = self._launch(sandbox, way.base_url, opened)
            for file in launch.files:
                await sandbox.write(file.path, file.data, mode=file.mode)
            await self._check(sandbox, launch)
        try:
            async with self._stage("agent", order.timeout_s + _AFTER_LIMIT_S + 90):
                await self._run_agent(sandbox, launch)
        finally:
            self.outcome.calls = way.generations
        unsealed = await self._sealed()
        async with self._stage("collect"):
            await self._collected(sandbox, launch)
            if unsealed is None:
                await self._compare(opened.id)
        if unsealed is not None:
            raise unsealed
        self._complete = True

    async def _collected(self, sandbox: Sandbox, launch: Launch) -> None:
        """What it left. Its output and logs may be missing; without its work there is nothing to grade."""
        folder = self._kept
        collected = await collect(sandbox, launch, folder, self._hide)
        collected = msgspec.structs.replace(
            collected, stdout=self._without_secrets(collected.stdout), stderr=self._without_secrets(collected.stderr)
        )
        self.outcome.collected = collected
        if not (self._order.keep_work or self._to_be_graded):
            return
        try:
            async with asyncio.timeout(_LIMITS["collect"] / 2):
                self._work = await collect_work(
                    sandbox, folder / "work", git=needs_git(self._order.task), answers=await self._answers()
                )
        except TimeoutError:
            missing = f"work: it took longer than {_LIMITS['collect'] / 2:.0f} s to copy"
        except SandboxError as error:
            missing = f"work: {make_encodable(error.message)}"
            if sandbox.shared is not None and (isinstance(error, SandboxGone) or await _broken(sandbox)):
                self._work = Work(
                    folder=folder / "work", lost="the agent broke its own sandbox: " + make_encodable(error.message)
                )
        else:
            lost = (self._work.lost,) if self._work.lost else ()
            left = tuple(f"work: {line}" for line in (*lost, *self._work.left_out))
            self.outcome.collected = msgspec.structs.replace(
                collected, work=self._order.keep_work and not lost, missing=(*collected.missing, *left)
            )
            return
        self.outcome.collected = msgspec.structs.replace(collected, missing=(*collected.missing, missing))

    async def _answers(self) -> list[dict[str, object]]:
        """What the agent told the host by its tools, in order."""
        if not self._order.task.tools:
            return []
        calls = await self._gateway.tool_calls(self._session)
        return [{"tool": call["tool"], "arguments": call["arguments"]} for call in calls]

    @property
    def _kept(self) -> Path:
        """Where what it left is kept."""
        return self._order.folder / self._session

    @property
    def _to_be_graded(self) -> bool:
        return self._order.grade and self._order.task.grader is not None

    def _discard_work(self) -> None:
        if not self._order.keep_work:
            shutil.rmtree(self._kept / "work", ignore_errors=True)

    # ── what the host decides ───────────────────────────────────────────────────────────────────────────────────

    async def _judged(self) -> None:
        """The class and the reward. A rollout that somebody cancelled has neither."""
        outcome, order = self.outcome, self._order
        if outcome.status == "cancelled":
            return
        found = without_grading(outcome, order.policy)
        if found is None and self._to_be_graded:
            found = await self._graded()
        elif outcome.fault is None and not self._to_be_graded:
            return  # nobody was asked
        assert found is not None
        found = msgspec.structs.replace(
            found, log=self._without_secrets(found.log), message=self._without_secrets(found.message)
        )
        outcome.grade, outcome.kind, outcome.reward = found, found.kind, found.reward

    def _without_secrets(self, text: str) -> str:
        """The end of a log goes where others look at it. An agent may print all that it has."""
        for secret in self._secrets():
            text = text.replace(secret, REDACTED)
        return redact(text)

    def _hide(self, data: bytes) -> bytes:
        """The same for what is kept: nothing but what is known to be a secret is taken out."""
        for secret in self._secrets():
            data = data.replace(secret.encode("utf-8", "surrogatepass"), REDACTED.encode())
        return data

    def _secrets(self) -> list[str]:
        """What the agent had: its session's, and those of the variables that it was given."""
        given = (value for name, value in self._order.env.items() if _SECRETS.search(name))
        return [value for value in (self._key, *given) if len(value) >= _SECRET]

    async def _graded(self) -> Grade:
        order = self._order
        if self._work is None:
            why = "; ".join(self.outcome.collected.missing) or "it was not taken"
            return Grade(kind="infrastructure fault", message=f"there is no work to grade: {why}")
        if self._work.lost:
            return lost(self._work, order.policy)
        ground = GradingEnvironment(
            backend=order.backend, image=order.image, resources=order.resources, log=self._kept / "grade.log"
        )
        began = time.monotonic()
        async with self._gate("grade"):
            self._told("grade")
            span = None if self._span is None else self._span.start_child("stage grade", {"turngate.stage": "grade"})
            try:
                return await graded(order.task, self._work, ground)
            finally:
                self._spent("grade", began)
                if span is not None:
                    span.end()

    async def _recorded(self) -> None:
        """At the gateway, beside the trace. Where it is gone, the outcome is still the caller's, who may record it later."""
        outcome = self.outcome
        if not outcome.session or outcome.kind is None:
            return
        if outcome.kind == "infrastructure fault" and not self._ended:
            return  # it counts for nobody, and the gateway is most likely the reason
        outcome.unrecorded = "its runner was stopped before the gateway had it"
        try:
            async with self._stage("record"):
                await self._put_down(outcome)
            outcome.unrecorded = ""
        except TurngateError as error:
            outcome.unrecorded = error.message
            self._note(f"the outcome could not be recorded at the gateway: {error.message}")

    async def _put_down(self, outcome: Outcome) -> None:
        """A gateway that is being started again is waited for."""
        deadline = time.monotonic() + _BACK_S
        while True:
            try:
                if not self._ended:
                    await self._gateway.seal(outcome.session, "error")
                    self._ended = True
                return await self._gateway.record(outcome.session, recorded(outcome))
            except GatewayUnreachable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.5)

    async def _sealed(self) -> TurngateError | None:
        """No more turns. Where the gateway is gone, that is told when what the agent left has been saved."""
        try:
            async with self._stage("seal"):
                await self._end_session()
        except TurngateError as error:
            self._fault_at = "seal"
            return error
        return None

    def _spec(self) -> SandboxSpec:
        order = self._order
        needed = staging.build_sandbox_spec(order.task, order.backend, image=order.image, resources=order.resources)
        return msgspec.structs.replace(
            needed,
            network=order.network,
            reachable=self._connector.hosts,
            mounts=tuple(Mount(source, target) for source, target in self._pairs),
            env={**needed.env, **order.env},
            # Twice: one that is warm may wait for as long as somebody else's agent has.
            life_s=2 * order.timeout_s + order.task.setup_timeout_s + sum(_LIMITS.values()),
            labels={**needed.labels, "agent": order.agent.name},
        )

    async def _open(self, stack: AsyncExitStack) -> OpenedSession:
        """Under an id of our own: where we are cancelled before the answer comes, there is a session to end all the same."""
        stack.push_async_callback(self._end_whatever_happened)
        parent = "" if self._run_span is None else self._run_span.traceparent
        opened = await self._gateway.open(self._settings(), self._session, parent)
        self._key = opened.key
        self._session = self.outcome.session = self.progress.session = opened.id
        return opened

    def _settings(self) -> dict[str, Json]:
        order = self._order
        metadata = {
            "task": order.task.id,
            "agent": order.agent.name,
            "agent_version": order.agent.install.version,
            "sandbox": order.backend.name,
            "group": self.outcome.group,
            **({"rollout": order.rollout, "attempt": order.attempt} if order.rollout else {}),
        }
        given = dict(order.session)
        return {
            "model": order.model,
            "signals": msgspec.to_builtins(resolve_signals(order.agent.signals, order.model)),
            **({"tools": msgspec.to_builtins(order.task.tools)} if order.task.tools else {}),
            **given,
            "metadata": {**metadata, **given.get("metadata", {})},
        }

    def _launch(self, sandbox: Sandbox, base_url: str, opened: OpenedSession) -> Launch:
        order = self._order
        planned = plan_launch(
            order.agent,
            self._installed,
            base_url=base_url,
            api_key=opened.key,
            model=order.model,
            prompt=describe_tools(order.task.instruction, order.task.tools),
            home=sandbox.home,
            workdir=sandbox.workdir,
            limits=order.model_limits,
            options=order.options,
        )
        return add_tool_commands(planned, order.task.tools, base_url=base_url, api_key=opened.key, home=sandbox.home)

    async def _check(self, sandbox: Sandbox, launch: Launch) -> None:
        """An agent that is said to be in the image has to be there, and so has whatever runs it."""
        name = self._order.agent.name
        there = await sandbox.exec(["/bin/sh", "-c", _THERE, "sh", launch.program], env=launch.env, timeout_s=60)
        if there.exit_code:
            raise AgentError(
                f"{name}: command: there is no {launch.program} in the {self._order.backend.name} sandbox; "
                "install it there, or choose another --sandbox or --image",
                param="command",
            )
        if launch.check:
            result = await sandbox.exec(launch.check, env=launch.env, timeout_s=60)
            if result.exit_code:
                said = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-300:]
                raise AgentError(
                    f"{name}: install.check: ended with exit code {result.exit_code}: {said or 'it said nothing'}",
                    param="install.check",
                )

    async def _run_agent(self, sandbox: Sandbox, launch: Launch) -> None:
        """Start it, and wait for whatever ends it first."""
        job = await sandbox.start(
            launch.command, env=launch.env, cwd=launch.cwd, stdout=launch.stdout, stderr=launch.stderr
        )
        began = time.monotonic()
        ended = asyncio.create_task(job.wait())
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({ended, over}, timeout=self._order.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self.outcome.stop in _SESSION_LIMITS:
                # The agent was told that its session is over; most of them end now.
                await asyncio.wait({ended}, timeout=_AFTER_LIMIT_S)
            self._ran_s = time.monotonic() - began
            self._judge(ended if ended.done() else None)
        finally:
            over.cancel()
            await self._killed(job, ended)

    def _judge(self, ended: asyncio.Task[int] | None) -> None:
        self.outcome.exit_code = None if ended is None else ended.result()
        if self.outcome.stop in _SESSION_LIMITS:
            self.outcome.status = "limit"
        elif ended is not None:
            self.outcome.status = "finished" if ended.result() == 0 else "failed"
        else:
            self.outcome.status = "cancelled" if self._over.is_set() else "timed out"

    async def _killed(self, job: Job, ended: asyncio.Task[int]) -> None:
        """Nothing of the agent runs on, not even what it left behind when it ended."""
        try:
            await run_to_completion(job.kill())
        except TurngateError as error:
            self._note(f"the agent could not be ended: {error.message}")
        ended.cancel()
        with suppress(asyncio.CancelledError, TurngateError):
            await ended

    @asynccontextmanager
    async def _followed(self, session: str) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._follow(session))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            if not watching.cancelled() and (error := watching.exception()) is not None:
                self._note(f"progress could not be followed to the end: {error!r}")

    async def _follow(self, session: str) -> None:
        """Count turns, and notice as it comes that the session is over."""
        async for event in self._gateway.events(session):
            kind, data = event["kind"], event["data"]
            if kind == "turn":
                self.progress.turns += 1
                self.progress.sampled_tokens += data["sampled_tokens"]
                self._watch(self.progress)
            elif kind == "limit":
                self.outcome.stop = data["limit"]
                self._over.set()
            elif kind in ("sealed", "cancelled", "deleted") and not self._ending:
                stale = data.get("stop") == STALE
                self.outcome.stop = STALE if stale else f"the session was {kind} at the gateway"
                self._over.set()

    async def _end_session(self) -> None:
        """A gateway that is being started again will have the session as it left it, so it is waited for."""
        self._ending = True
        deadline = time.monotonic() + _BACK_S
        while True:
            try:
                # Asked before it is sealed: how the last call failed is known to a live session only.
                live = await self._gateway.show(self._session)
                shown = await self._gateway.seal(self._session, self._why())
                break
            except GatewayUnreachable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.5)
        self._ended = True
        if shown["stop"] == STALE:  # however its agent took that
            self.outcome.status, self.outcome.stop = "cancelled", STALE
        if self.outcome.status not in ("finished", "failed", "timed out"):
            return
        # The agent may have ended before we were told that it had met a limit.
        if shown["stop"] in _SESSION_LIMITS:
            self.outcome.status, self.outcome.stop = "limit", shown["stop"]
        elif (error := live["last_error"]) is not None:
            self._blame(error["boundary"], error["kind"], error["message"], shown["turns"])
        else:
            self._blame_silence(live.get("unheard_s", 0.0))  # a gateway that runs already may be older

    def _blame_silence(self, unheard_s: float) -> None:
        """An engine that went silent took the agent's time, and no error says so. One that is slow is heard as its tokens come."""
        outcome, ran = self.outcome, self._ran_s
        silent = unheard_s > SILENT_SHARE * ran
        if (outcome.status == "timed out" and silent) or (
            outcome.status == "failed" and silent and unheard_s > GIVEN_UP_S
        ):
            said = f"the engine went silent: nothing came from it for {unheard_s:.0f} of the {ran:.0f} s that the agent ran"
            outcome.status, outcome.fault = "error", Fault("agent", EngineTimeout.boundary, said)

    def _blame(self, boundary: Boundary, kind: str, message: str, turns: int) -> None:
        """Its last call was not answered, and then it ended: not by its own doing, but for a prompt that no longer fitted."""
        if kind == ContextOverflow.kind:
            self.outcome.status, self.outcome.stop = "limit", kind
        elif kind == EngineRejected.kind and max(turns, self.progress.turns):
            self._note(
                f"the engine refused the agent's last call: {make_encodable(message)}"
            )  # others it did not: it is what was asked
        else:
            self.outcome.status = "error"
            self.outcome.fault = Fault("agent", boundary, self._without_secrets(message))

    def _why(self) -> str:
        """What the session is closed with; a limit that it met stays there as the reason."""
        return "" if self.outcome.status in ("finished", "limit") else self.outcome.status

    async def _end_whatever_happened(self) -> None:
        """The session of a rollout that did not come as far as `seal`."""
        if self._ended:
            return
        self._ending = True
        end = self._gateway.cancel if _being_cancelled() else partial(self._gateway.seal, stop="error")
        await run_to_completion(self._ended_anyway(end))

    async def _ended_anyway(self, end: Callable[[str], Awaitable[Json]]) -> None:
        try:
            async with asyncio.timeout(_END_S):
                await end(self._session)
                self._ended = True
        except TimeoutError:
            self._note(f"the session could not be ended: the gateway did not answer for {_END_S:.0f} s")
        except RequestRejected as refused:
            if refused.answered != 404:  # it was never opened
                self._note(f"the session could not be ended: {refused.message}")
        except TurngateError as error:
            self._note(f"the session could not be ended: {error.message}")

    async def _clean(self, sandbox: Sandbox) -> None:
        """What cannot be cleaned up is told, but does not change how the rollout went."""
        try:
            async with self._stage("clean"):
                await sandbox.stop()
        except TurngateError as error:
            self._note(f"the sandbox could not be removed: {error.message}")

    async def _compare(self, session: str) -> None:
        """The agent's own transcript against the trace."""
        transcript = self._order.agent.transcript
        if transcript is None:
            return
        trace = await self._gateway.trace(session)
        try:
            turns, found = await asyncio.to_thread(compare_transcript, transcript, self._order.folder / session, trace)
        except AgentError as error:
            self._note(error.message)
            return
        self.outcome.collected = msgspec.structs.replace(
            self.outcome.collected, differences=tuple(map(make_encodable, found)), transcript_turns=turns
        )

    def _note(self, text: str) -> None:
        self.outcome.notes = (*self.outcome.notes, self._without_secrets(make_encodable(text)))

    async def _summed_up(self, limit_s: float) -> None:
        """What the gateway has recorded, as far as it can still be asked."""
        if self.outcome.session:
            self.outcome.turns, self.outcome.sampled_tokens = self.progress.turns, self.progress.sampled_tokens
            try:
                async with asyncio.timeout(limit_s):
                    shown = await self._gateway.show(self.outcome.session)
                    self.outcome.turns, self.outcome.sampled_tokens = shown["turns"], shown["sampled_tokens"]
                    self.outcome.roles, self.outcome.stop = shown["roles"] or {}, self.outcome.stop or shown["stop"]
                    self.outcome.rows = len(await self._gateway.samples(self.outcome.session))
            except (TurngateError, TimeoutError) as error:
                self._note(f"the gateway could not be asked what it has recorded: {error}")

    def _failed(self, error: TurngateError) -> None:
        self.outcome.status = "error"
        message = self._without_secrets(make_encodable(error.message))
        self.outcome.fault = Fault(self._fault_at or "clean", error.boundary, message)

    @asynccontextmanager
    async def _stage(self, stage: Stage, limit_s: float | None = None) -> AsyncIterator[None]:
        self._told(stage)
        began = time.monotonic()
        limit = limit_s or _LIMITS[stage]
        outer = self._run_span or self._span
        span = None if outer is None else outer.start_child(f"stage {stage}", {"turngate.stage": stage})
        try:
            async with asyncio.timeout(limit):
                yield
        except TimeoutError:
            self._fault_at = self._fault_at or stage
            slow = _SLOW.get(stage, SandboxError)
            if span is not None:
                span.set_error(slow.kind)
            raise slow(f"stage {stage} took longer than {limit:.0f} s") from None
        except TurngateError as error:
            self._fault_at = self._fault_at or stage
            if span is not None:
                span.set_error(error.kind)
            raise
        finally:
            self._spent(stage, began)
            if span is not None:
                span.end()

    def _told(self, stage: Stage | Literal["done"]) -> None:
        self.progress.stage = stage
        log.info("stage %s", stage)
        self._watch(self.progress)
        self._announcer.say("stage", self._facts(stage))

    def _facts(self, stage: Stage | Literal["done"]) -> dict[str, Json]:
        """What followers of the stream are told. The end has the outcome; they are the host's, so it may."""
        outcome = self.outcome
        begun = {"stage": stage, "rollout": outcome.rollout, "attempt": outcome.attempt}
        if stage == _FIRST:  # before there is a session that would say so
            about = {"task": outcome.task, "group": outcome.group, "agent": outcome.agent, "model": outcome.model}
            about |= {"batch": str(self._order.session.get("metadata", {}).get("batch", ""))}
            return {**begun, **{name: value[:_TOLD] for name, value in about.items()}}
        if stage != "done":
            return begun
        told = {**begun, "status": outcome.status, "class": outcome.kind, "reward": outcome.reward}
        if (fault := outcome.fault) is not None:  # there may be no session whose outcome would say so
            told["fault"] = {"stage": fault.stage, "boundary": fault.boundary}
            told["message"] = fault.message[:_TOLD]
        return told

    def _spent(self, stage: Stage, began: float) -> None:
        spent = self.outcome.seconds.get(stage, 0.0) + time.monotonic() - began
        self.outcome.seconds = {**self.outcome.seconds, stage: round(spent, 3)}


async def _broken(sandbox: Sandbox) -> bool:
    """Whether what packs folders in there does so no more, though it did when the task was laid out: then the agent did away with it.
    A sandbox that does not answer is another matter, and nobody's to blame here."""
    try:
        done = await sandbox.exec(["/bin/sh", "-c", _PACK], cwd="/", timeout_s=60)
    except SandboxError:
        return False
    return not done.timed_out and not done.stdout.startswith(_PACKED)


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
