"""Run one rollout, stage by stage.

    start   sandbox → files → setup
    run     session → relay → launch → agent → seal → collect → clean
    grade   grade → record

    sandbox   create the sandbox, with the agent's installation
    files     upload the task's files
    setup     run the task's setup script
    session   open a session at the gateway, which starts the trace
    relay     connect the sandbox to the gateway
    launch    write the agent's settings, and check that its program is installed
    agent     run the agent in the background until it exits, it times out, its session ends, or the rollout is cancelled
    seal      seal the session, so that the trace gets no more turns
    collect   copy the agent's output, transcript and work
    clean     stop and remove the sandbox, even after a failure
    grade     let the host grade the work; the grader's commands run in a fresh sandbox
    record    store the outcome at the gateway, which already has the trace

Each stage except `grade` has a time limit, and each grader has its own. If a stage fails, `classify.py` decides what is at fault. The
recorded trace is always kept. An agent never runs twice on the same trace, but grading may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path

import msgspec

from turngate.agents.launch import Launch, plan_preload
from turngate.agents.spec import write_description
from turngate.client.gateway import GatewayClient
from turngate.common.aio import run_to_completion
from turngate.common.safe_text import make_encodable
from turngate.errors import AgentError, TurngateError
from turngate.rollout.agent_run import GRACE_S, build_launch, check_program, explain_unstarted, run_agent
from turngate.rollout.classify import Classification, Ending, classify
from turngate.rollout.collect import collect
from turngate.rollout.connection import Connection, GatewayConnector
from turngate.rollout.grading import GradeCache, grade_with_retries
from turngate.rollout.outcome import GRADE_LOG, Fault, Outcome, PhaseGate, ProgressCallback, RolloutProgress
from turngate.rollout.recording import build_record
from turngate.rollout.redaction import Redactor
from turngate.rollout.session import AgentSession, build_session_config
from turngate.rollout.spec import RolloutSpec
from turngate.rollout.stage_events import StageEvents
from turngate.rollout.stages import LIMITS_S, Stages
from turngate.rollout.transcript_diff import compare_transcript, list_delivered_turns
from turngate.rollout.work import copy_work
from turngate.sandboxes.base import Mount, Sandbox, SandboxSpec
from turngate.tasks import staging
from turngate.tasks.grading.types import Grade, GradingEnvironment, Work
from turngate.tasks.host_env import find_host_values
from turngate.telemetry.logs import log_context

log = logging.getLogger(__name__)
INSTALL_FOLDER = "/opt/turngate"  # path of an agent's installation inside a sandbox
_SPARE_S = 15.0  # extra time for a stage to stop a script that has reached its own time limit
_KILL_S = 90.0  # extra time to kill an agent
_COUNT_S = 120.0  # time to count the rows of a long trace
_QUICK_COUNT_S = 10.0  # time to count the rows of a cancelled rollout


class Rollout:
    """Runs the rollout of one `RolloutSpec`, once."""

    def __init__(
        self,
        spec: RolloutSpec,
        gateway: GatewayClient,
        connector: GatewayConnector,
        watch: ProgressCallback = lambda progress: None,
        *,
        gate: PhaseGate = lambda phase: nullcontext(),
        on_sandbox_ready: Callable[[str], None] = lambda workdir: None,
        session: str = "",
        grades: GradeCache | None = None,
    ) -> None:
        """Prepare a rollout.

        `gate` limits how many rollouts are in each phase at the same time. `on_sandbox_ready` is called with the working folder in the
        sandbox. `session` is the session's id; by default, a new id is generated. `grades` has the grades of earlier rollouts, for specs
        with `reuse_grades`.
        """
        self._spec = spec
        self._gateway = gateway
        self._connector = connector
        self._gate = gate
        self._on_sandbox_ready = on_sandbox_ready
        self._grades = grades if spec.reuse_grades else None
        self._work: Work | None = None
        self._redactor = Redactor(spec.env, find_host_values(spec.task))
        self._ending = Ending(graded=spec.is_graded)
        self.progress = RolloutProgress(started=time.time())
        session = session or uuid.uuid4().hex
        self.outcome = Outcome(
            rollout=spec.rollout or session,
            group=spec.group or spec.task.id,
            attempt=spec.attempt,
            task=spec.task.id,
            agent=spec.agent.name,
            version=spec.agent.install.version,
            sandbox=spec.backend.name,
            model=spec.model,
        )
        self._session = AgentSession(gateway, session, self._ending, self.progress, watch, self._note)
        self._events = StageEvents(gateway, session, str(spec.session.get("metadata", {}).get("batch", "")))
        self._stages = Stages(self.outcome, self.progress, watch, self._events)
        # The installation with its paths inside the sandbox.
        installed = spec.installed.use_host_python() if spec.backend.has_host_programs else spec.installed
        self._installed, self._mounts = (
            installed.relocate(INSTALL_FOLDER)
            if spec.backend.relocates
            else (installed, tuple((folder, folder) for folder in installed.mounts))
        )

    @property
    def verdict(self) -> Classification:
        """The classification of the rollout so far."""
        return classify(self._ending, self._spec.policy)

    async def run(self) -> Outcome:
        """Run the rollout to completion. If cancelled, clean up before the cancellation propagates."""
        outcome = self.outcome
        context = log_context(self._session.id, {"rollout": outcome.rollout, "group": outcome.group})
        with self._stages.trace_rollout(), context:
            try:
                async with self._events:
                    return await self._run()
            finally:
                log.info(
                    "rollout ended: status %s, class %s, reward %s, turns %d",
                    outcome.status,
                    outcome.kind,
                    outcome.reward,
                    outcome.turns,
                )

    async def _run(self) -> Outcome:
        """Run all stages. The agent's sandbox is removed before the work is graded."""
        async with self._record_faults(), AsyncExitStack() as cleanup:
            async with self._gate("start"):
                sandbox = await self._create_sandbox(cleanup)
                await self._upload_files(sandbox)
                await self._set_up_task(sandbox)
            async with self._gate("run"):
                with self._stages.trace_agent(self._session.id):
                    await self._open_session(cleanup)
                    connection = await self._connect(cleanup, sandbox)
                    launch = await self._prepare_launch(sandbox, connection)
                    await self._run_agent(sandbox, launch, connection)
                    unsealed = await self._seal_session()
                    await self._collect(sandbox, launch, unsealed)
        await self._grade()
        await self._record()
        self._stages.announce("done")
        return self.outcome

    def fail(self, error: Exception) -> None:
        """Record an unexpected exception as a fault of Turngate. This overrides any earlier classification."""
        fault = Fault(
            "clean", "gateway", f"unexpected error in Turngate: {error!r}; report it with the traceback in the log"
        )
        self._ending.fault, self._ending.cancelled = fault, False
        self._update_outcome()

    # ── start ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _create_sandbox(self, cleanup: AsyncExitStack) -> Sandbox:
        async with self._stages.enter("sandbox"):
            sandbox_spec = self._build_sandbox_spec()
            self.outcome.not_enforced = self._spec.backend.not_enforced(sandbox_spec)
            sandbox = await self._spec.backend.create(sandbox_spec)
        cleanup.push_async_callback(self._remove_sandbox, sandbox)
        self._on_sandbox_ready(sandbox.workdir)
        return sandbox

    def _build_sandbox_spec(self) -> SandboxSpec:
        spec = self._spec
        base = staging.build_sandbox_spec(spec.task, spec.backend, image=spec.image, resources=spec.resources)
        return msgspec.structs.replace(
            base,
            network=spec.network,
            reachable=self._connector.hosts,
            mounts=tuple(Mount(source, target) for source, target in self._mounts),
            env={**base.env, **spec.env},
            folders=(*base.folders, *spec.folders),
            # Twice the timeout, because a warm sandbox may have to wait until another agent is done.
            life_s=2 * spec.timeout_s + spec.task.setup_timeout_s + sum(LIMITS_S.values()),
            labels={**base.labels, "agent": spec.agent.name},
            preload=plan_preload(spec.agent, self._installed),
        )

    async def _upload_files(self, sandbox: Sandbox) -> None:
        async with self._stages.enter("files"):
            await staging.upload_files(sandbox, self._spec.task)

    async def _set_up_task(self, sandbox: Sandbox) -> None:
        async with self._stages.enter("setup", self._spec.task.setup_timeout_s + _SPARE_S):
            await staging.run_setup(sandbox, self._spec.task)

    # ── run ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _open_session(self, cleanup: AsyncExitStack) -> None:
        async with self._stages.enter("session"):
            cleanup.push_async_callback(self._end_session)
            await self._session.open(build_session_config(self._spec, self.outcome.group), self._stages.traceparent)
            self._redactor.add(self._session.key)
            self.outcome.session = self._session.id
        await cleanup.enter_async_context(self._session.follow())

    async def _connect(self, cleanup: AsyncExitStack, sandbox: Sandbox) -> Connection:
        async with self._stages.enter("relay"):
            return await cleanup.enter_async_context(
                self._connector.connect(sandbox, python=self._installed.python, node=self._installed.node)
            )

    async def _prepare_launch(self, sandbox: Sandbox, connection: Connection) -> Launch:
        async with self._stages.enter("launch"):
            launch = build_launch(self._spec, self._installed, sandbox, connection.base_url, self._session.key)
            for file in launch.files:
                await sandbox.write(file.path, file.data, mode=file.mode)
            await check_program(self._spec, sandbox, launch)
            return launch

    async def _run_agent(self, sandbox: Sandbox, launch: Launch, connection: Connection) -> None:
        timeout_s = self._spec.timeout_s
        try:
            async with self._stages.enter("agent", timeout_s + GRACE_S + _KILL_S):
                await run_agent(
                    sandbox,
                    launch,
                    timeout_s=timeout_s,
                    session_over=self._session.over,
                    ending=self._ending,
                    note=self._note,
                )
        finally:
            self.outcome.calls = connection.generations

    async def _seal_session(self) -> TurngateError | None:
        """Seal the session, so that it allows no more turns.

        An error is returned, not raised, so that the caller can save the agent's files first.
        """
        status = self._update_outcome().status
        try:
            async with self._stages.enter("seal"):
                await self._session.seal("" if status in ("finished", "limit") else status)
        except TurngateError as error:
            return error
        if (failed_call := self._ending.last_error) is not None:
            message = self._redactor.redact_text(make_encodable(failed_call.message))
            self._ending.last_error = msgspec.structs.replace(failed_call, message=message)
        if note := self._update_outcome().note:
            self._note(note)
        return None

    async def _collect(self, sandbox: Sandbox, launch: Launch, unsealed: TurngateError | None) -> None:
        """Copy the agent's output, logs and work. Afterwards, raise `unsealed` if the session could not be sealed."""
        async with self._stages.enter("collect"):
            collected = await collect(sandbox, launch, self._folder, self._redactor.redact_bytes)
            self.outcome.collected = msgspec.structs.replace(
                collected,
                stdout=self._redactor.redact_text(collected.stdout),
                stderr=self._redactor.redact_text(collected.stderr),
            )
            try:
                await asyncio.to_thread(write_description, self._spec.agent, self._folder)
            except AgentError as error:
                self._note(error.message)
            await self._copy_work(sandbox)
            if unsealed is None:
                await self._compare_transcript()
        if unsealed is not None:
            raise unsealed
        self._ending.complete = True

    async def _copy_work(self, sandbox: Sandbox) -> None:
        spec, collected = self._spec, self.outcome.collected
        if not (spec.keep_work or spec.is_graded):
            return
        copy = await copy_work(
            sandbox, self._folder / "work", spec.task, self._read_answers, limit_s=LIMITS_S["collect"] / 2
        )
        self._work = (
            None if copy.work is None else msgspec.structs.replace(copy.work, read_turns=self._session.read_turns)
        )
        self.outcome.collected = msgspec.structs.replace(
            collected, work=spec.keep_work and copy.is_gradable, missing=(*collected.missing, *copy.missing)
        )

    async def _read_answers(self) -> list[dict[str, object]]:
        """Return the agent's calls to host tools, oldest first."""
        if not self._spec.task.tools:
            return []
        calls = await self._gateway.tool_calls(self._session.id)
        return [{"call": call.call, "tool": call.tool, "arguments": call.arguments} for call in calls]

    async def _compare_transcript(self) -> None:
        """Compare the agent's own transcript, if it writes one, with the trace."""
        transcript = self._spec.agent.transcript
        if transcript is None:
            return
        trace = await self._gateway.trace(self._session.id)
        try:
            turns, differences = await asyncio.to_thread(
                lambda: compare_transcript(transcript, self._folder, list_delivered_turns(trace), trace.stop)
            )
        except AgentError as error:
            self._note(error.message)
            return
        self.outcome.collected = msgspec.structs.replace(
            self.outcome.collected, differences=tuple(map(make_encodable, differences)), transcript_turns=turns
        )

    # ── clean up ────────────────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def _record_faults(self) -> AsyncIterator[None]:
        """Record an error in the block as the rollout's fault. If the rollout is cancelled, finish it and propagate the cancellation."""
        try:
            yield
        except asyncio.CancelledError:
            await self._finish_cancelled()
            raise
        except TurngateError as error:
            if _is_being_cancelled():  # the rollout was cancelled, and then the cleanup failed
                self._note(error.message)
                await self._finish_cancelled()
                raise asyncio.CancelledError from error
            message = self._redactor.redact_text(make_encodable(error.message))
            self._ending.fault = Fault(self._stages.failed or "clean", error.boundary, message)
            self._update_outcome()

    async def _finish_cancelled(self) -> None:
        self._ending.cancelled = True
        self._update_outcome()
        await self._count_turns(_QUICK_COUNT_S)
        await run_to_completion(asyncio.to_thread(self._discard_work))
        self._stages.announce("done")

    async def _end_session(self) -> None:
        await self._session.end(cancelled=_is_being_cancelled())

    async def _remove_sandbox(self, sandbox: Sandbox) -> None:
        """Remove the sandbox. If that fails, add a note to the outcome, but do not fail the rollout."""
        try:
            async with self._stages.enter("clean"):
                await sandbox.stop()
        except TurngateError as error:
            self._note(f"the sandbox could not be removed: {error.message}")

    def _discard_work(self) -> None:
        if not self._spec.keep_work:
            shutil.rmtree(self._folder / "work", ignore_errors=True)

    # ── grade ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _grade(self) -> None:
        """Grade the work to determine the class and the reward. If grading is cancelled, so is the rollout, and it has no reward."""
        try:
            await self._count_turns(_COUNT_S)
            await self._grade_work()
        except asyncio.CancelledError:
            if self._spec.is_graded:  # the rollout is incomplete without its grade, and will run again
                self._ending.cancelled, self._ending.grade = True, None
                self._update_outcome()
            raise
        finally:
            await run_to_completion(asyncio.to_thread(self._discard_work))

    async def _count_turns(self, limit_s: float) -> None:
        """Ask the gateway how many turns, tokens and rows it has recorded.

        If the gateway does not report the turns and tokens, take them from its events. If it does not report the rows, their number stays
        unknown.
        """
        outcome = self.outcome
        if not outcome.session:
            return
        outcome.turns, outcome.sampled_tokens = self.progress.turns, self.progress.sampled_tokens
        try:
            async with asyncio.timeout(limit_s):
                shown = await self._gateway.show(outcome.session)
                outcome.turns, outcome.sampled_tokens = shown.turns, shown.sampled_tokens
                outcome.roles, self._ending.stop = shown.roles or {}, self.verdict.stop or shown.stop
                outcome.training, outcome.refused = shown.training, shown.refused
                if not shown.turns:
                    outcome.training = explain_unstarted(shown.training, self._ending.exit_code, self._spec.backend)
                outcome.rows = len(await self._gateway.samples(outcome.session, masks=True))
        except TimeoutError:
            self._note(f"the session could not be read from the gateway: no reply within {limit_s:.0f} s")
        except TurngateError as error:
            self._note(f"the session could not be read from the gateway: {error.message}")
        self._ending.turns = outcome.turns
        self._update_outcome()

    async def _grade_work(self) -> None:
        spec, ending = self._spec, self._ending
        if self._work is None:
            ending.work_missing = "; ".join(self.outcome.collected.missing) or "the work was not copied"
        else:
            ending.work_lost = self._work.lost
        if self._update_outcome().kind is not None:
            return
        assert self._work is not None
        environment = GradingEnvironment(
            backend=spec.backend, image=spec.image, resources=spec.resources, log=self._folder / GRADE_LOG
        )
        work, began = self._work, time.monotonic()

        async def grade() -> Grade:
            async with self._gate("grade"), self._stages.enter("grade", since=began):
                return await grade_with_retries(spec.task, work, environment)

        if self._grades is None:
            ending.grade = await grade()
        else:
            names = {"group": self.outcome.group, "rollout": self.outcome.rollout}
            ending.grade = await self._grades.grade(spec.task, work, environment, **names, grade=grade)
        self._update_outcome()

    async def _record(self) -> None:
        """Record the outcome at the gateway. If that fails, set `outcome.unrecorded`, so that the caller can record it later."""
        outcome, session = self.outcome, self._session
        if not outcome.session or outcome.kind is None:
            return
        if outcome.kind == "infrastructure fault" and not session.is_ended:
            return  # groups exclude infrastructure faults, and the gateway is probably down
        outcome.unrecorded = "the runner was stopped before the gateway recorded the outcome"
        try:
            async with self._stages.enter("record"):
                outcome.excluded = await session.record(build_record(outcome))
            outcome.unrecorded = ""
            if outcome.excluded:
                self._note(f"the outcome does not count: {outcome.excluded}")
        except TurngateError as error:
            outcome.unrecorded = error.message
            self._note(f"the outcome could not be recorded at the gateway: {error.message}")

    # ── outcome ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _update_outcome(self) -> Classification:
        """Classify the rollout from the facts known so far, update the outcome, and return the classification."""
        outcome, verdict = self.outcome, self.verdict
        grade = verdict.grade
        if grade is not None:
            redact = self._redactor.redact_text
            parts = tuple(msgspec.structs.replace(part, message=redact(part.message)) for part in grade.parts)
            grade = msgspec.structs.replace(grade, log=redact(grade.log), message=redact(grade.message), parts=parts)
        outcome.status, outcome.stop, outcome.fault = verdict.status, verdict.stop, verdict.fault
        outcome.exit_code = self._ending.exit_code
        outcome.grade, outcome.reward = grade, verdict.reward
        outcome.kind = None if grade is None else grade.kind
        return verdict

    def _note(self, text: str) -> None:
        self.outcome.notes = (*self.outcome.notes, self._redactor.redact_text(make_encodable(text)))

    @property
    def _folder(self) -> Path:
        """The folder on this host for the agent's files."""
        return self._spec.folder / self._session.id


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
