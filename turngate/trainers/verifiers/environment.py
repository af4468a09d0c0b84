"""A verifiers environment with Turngate's tasks, agents and sandboxes.

    taskset   tasks in any format that `turngate batch` reads: Harbor folders, SWE rows, JSONL, a function …
    harness   one Turngate rollout through a running gateway; its turns become the trace's message graph
    env       the taskset and the harness, with one connection to the gateway for all rollouts

verifiers' own runtime is an empty folder, which is not used. The agent runs in Turngate's sandbox, and its model calls go to the gateway
instead of verifiers' server. The reward is the host's grade. If there is no grade (invalid task, infrastructure fault), the trace has an
error whose type shows where the fault occurred, and `rewards["grade"]` is null. See `examples/verifiers` for a packaged environment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import verifiers.v1 as vf
from pydantic import Field, model_validator

from turngate.agents.install import ensure_installed
from turngate.agents.launch import ModelLimits
from turngate.agents.spec import find_agent
from turngate.client.gateway import GatewayClient
from turngate.client.keys import read_admin_key
from turngate.common.aio import run_to_completion
from turngate.errors import Boundary, TurngateError
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.outcome import Outcome
from turngate.rollout.rollout import Rollout
from turngate.rollout.sampling import parse_sampling
from turngate.rollout.spec import EndAction, EndPolicy, RolloutSpec
from turngate.sandboxes import get_backend
from turngate.sandboxes.base import Network
from turngate.tasks import Task, read_tasks
from turngate.trainers.verifiers.gateway import gateway_url
from turngate.trainers.verifiers.graft import graft, turns_from_view
from turngate.types import STALE, Json, Sampling
from turngate.views.trace import parse_trace as read_view

log = logging.getLogger("turngate")
GRADE = "grade"  # name of the only reward
_FETCH_S = 60.0
# The verifiers exception for each boundary.
_FAULTS: Mapping[Boundary, type[Exception]] = {
    "engine": vf.ProviderError,
    "sandbox": vf.SandboxError,
    "agent": vf.HarnessError,
    "task": vf.TaskError,
}
# The verifiers stop condition for each session limit. All of them count as truncated.
_LIMITS = {"turns": "max_turns", "sampled_tokens": "max_output_tokens", "context_tokens": "max_total_tokens"}


# ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class TurngateData(vf.TaskData):
    """The location of a set of tasks, and the id of one of them, so that a worker can load that task."""

    tasks: str
    task: str


class TurngateTask(vf.Task[TurngateData]):
    @property
    def key(self) -> str:
        return str(self.data.task)

    async def score(self, trace: vf.Trace, runtime: vf.Runtime | None = None) -> None:
        """Record the host's grade, unless scoring is deferred. An unknown reward stays None."""
        await super().score(trace, runtime)
        if self.scoring_deferred:
            return
        reward = trace.info.get("turngate", {}).get("reward")
        trace.rewards.setdefault(GRADE, None)
        if reward is not None:
            trace.record_reward(GRADE, reward)


class TurngateTasksetConfig(vf.TasksetConfig):
    tasks: str = ""
    """Location of the tasks: a folder, a file, hf://org/name or module:function, as for `turngate batch --tasks`."""


class TurngateTaskset(vf.Taskset[TurngateTask, TurngateTasksetConfig]):
    def load(self) -> Iterator[TurngateTask]:
        if not self.config.tasks:
            raise ValueError("taskset.tasks is not set; set it to the location of the tasks")
        where = _absolute(self.config.tasks)
        for task in read_tasks(where):
            data = TurngateData(id=task.id, name=task.id, prompt=task.instruction, tasks=where, task=task.id)
            yield TurngateTask(data, self.config.task)


def _absolute(where: str) -> str:
    """Return the absolute form of an existing path, because workers may have a different working directory.

    Return any other location unchanged.
    """
    return str(Path(where).absolute()) if Path(where).exists() else where


@lru_cache(maxsize=1024)
def find_task(where: str, task: str) -> Task:
    return next(iter(read_tasks(where, only=[task])))


# ── one rollout ─────────────────────────────────────────────────────────────────────────────────────────────────────


class TurngateHarnessConfig(vf.HarnessConfig):
    gateway: str = ""
    """URL of the gateway. Defaults to $TURNGATE_GATEWAY. The admin key is read from $TURNGATE_ADMIN_KEY."""
    agent: str = "mini-swe-agent"
    """A name from `turngate agents`, or the path of an agent's TOML file."""
    sandbox: str = "bubblewrap"
    """One of local, bubblewrap, docker, e2b, huggingface."""
    image: str = ""
    network: Network = "none"
    timeout_s: float | None = Field(None, gt=0)
    """Time limit of the agent. Defaults to the task's limit, or half an hour."""
    options: dict[str, str] = Field(default_factory=dict)
    """Options of the agent, as for `turngate run --set`."""
    context_tokens: int | None = Field(None, gt=0)
    on_timeout: EndAction = "grade"
    on_failure: EndAction = "grade"
    on_limit: EndAction = "grade"
    on_lost: Literal["exclude", "zero"] = "zero"
    on_refused: Literal["exclude", "train"] = "exclude"
    """What to do with a rollout if a model call was refused and the agent did not repeat it successfully."""
    sampling: Literal["neutral", "agent"] = "neutral"
    """`neutral`: temperature 1, unless the run or the agent's file sets another. `agent`, for evaluations: the run's settings, and
    otherwise those that the agent requests.
    """
    out: Path = Path("turngate-rollouts")
    """Folder for the agents' files."""
    keep_work: bool = False
    public_url: str = ""
    """URL at which remote sandboxes can reach the gateway."""
    tunnel: str = ""
    """Instead of `public_url`, a command that opens a tunnel to the gateway and prints the tunnel's URL.

    `TurngateEnv` runs it once for all rollouts.
    """


class SharedConnections(msgspec.Struct, frozen=True):
    """Connections that all rollouts of an environment share."""

    gateway: GatewayClient
    connector: GatewayConnector


_shared_connections: ContextVar[SharedConnections | None] = ContextVar("turngate_ground", default=None)


@asynccontextmanager
async def _connect(config: TurngateHarnessConfig) -> AsyncIterator[SharedConnections]:
    try:
        async with (
            GatewayClient(gateway_url(config), read_admin_key()) as gateway,
            GatewayConnector(gateway.url, config.public_url, config.tunnel) as connector,
        ):
            await gateway.check()
            yield SharedConnections(gateway, connector)
    except TurngateError as error:
        raise vf.InterceptionError(error.message) from error


class TurngateHarness(vf.Harness[TurngateHarnessConfig]):
    """A harness that runs one Turngate rollout, from sandbox to grade."""

    EXECUTES_CODE: ClassVar[bool] = False  # the agent does not run in verifiers' runtime
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        if not isinstance(trace.task.data, TurngateData):
            raise vf.TaskError("Turngate's harness runs only Turngate's tasks; pass `--env.taskset.id turngate-env`")
        trace.rewards.setdefault(GRADE, None)  # unknown until graded
        async with AsyncExitStack() as stack:
            connections = _shared_connections.get()
            if connections is None:
                connections = await stack.enter_async_context(_connect(self.config))
            _, prompt = self.resolve_text_prompt(data)  # the run may have changed the prompt
            return await self._run_rollout(connections, ctx, trace, trace.task.data, prompt or "")

    async def _run_rollout(
        self, connections: SharedConnections, ctx: vf.ModelContext, trace: vf.Trace, data: TurngateData, prompt: str
    ) -> vf.ProgramResult:
        try:
            spec = await asyncio.to_thread(self._build_spec, ctx, trace, data, prompt)
            await spec.backend.check()
        except TurngateError as error:
            raise _fault(error.boundary, error.message) from error
        rollout = Rollout(spec, connections.gateway, connections.connector, session=trace.id)
        try:
            outcome = await rollout.run()
        except asyncio.CancelledError:  # the run is ending: record the turns so far
            try:
                await run_to_completion(_record_turns(connections.gateway, trace, rollout.outcome))
            except vf.InterceptionError as error:
                log.warning("%s", error)
            raise
        await _record_turns(connections.gateway, trace, outcome)
        _conclude(trace, outcome)
        return vf.ProgramResult(exit_code=0, stdout=outcome.collected.stdout, stderr=outcome.collected.stderr)

    def _build_spec(self, ctx: vf.ModelContext, trace: vf.Trace, data: TurngateData, prompt: str) -> RolloutSpec:
        config = self.config
        task = msgspec.structs.replace(find_task(data.tasks, data.task), instruction=prompt)
        spec = find_agent(config.agent).spec
        return RolloutSpec(
            task=task,
            agent=spec,
            installed=ensure_installed(spec, lambda line: None),
            backend=get_backend(config.sandbox),
            model=ctx.model,
            timeout_s=config.timeout_s or task.timeout_s or 1800.0,
            image=config.image,
            network=config.network,
            env=config.resolved_env,
            session=_build_session(ctx, trace, config),
            model_limits=ModelLimits()
            if config.context_tokens is None
            else ModelLimits(context_tokens=config.context_tokens),
            options=config.options,
            folder=config.out,
            keep_work=config.keep_work,
            policy=EndPolicy(
                timed_out=config.on_timeout, failed=config.on_failure, limit=config.on_limit, lost=config.on_lost
            ),
        )


def _build_session(ctx: vf.ModelContext, trace: vf.Trace, config: TurngateHarnessConfig) -> dict[str, Json]:
    """Build the session's settings from the run's sampling settings and limits."""
    sampling = ctx.sampling.model_dump(exclude_none=True)
    known = {field.name for field in msgspec.structs.fields(Sampling)}
    agent = trace.agent.config
    limits = {
        "turns": agent.max_turns,
        "sampled_tokens": agent.max_output_tokens,
        "context_tokens": agent.max_total_tokens,
    }
    return {
        "sampling": {name: value for name, value in sampling.items() if name in known},
        "limits": {name: value for name, value in limits.items() if value is not None},
        "metadata": {"verifiers": trace.id},
        "policy": {"refused": config.on_refused == "train"},
        **parse_sampling(config.sampling),
        **({"max_tokens": sampling["max_tokens"]} if "max_tokens" in sampling else {}),
    }


async def _record_turns(gateway: GatewayClient, trace: vf.Trace, outcome: Outcome) -> None:
    """Add the recorded turns and a summary of the rollout to the verifiers trace."""
    trace.info["turngate"] = {
        "session": outcome.session,
        "gateway": gateway.url,
        "status": outcome.status,
        "class": outcome.kind,
        "reward": outcome.reward,
        "agent": f"{outcome.agent} {outcome.version}".strip(),
        "sandbox": outcome.sandbox,
        "turns": outcome.turns,
        "sampled_tokens": outcome.sampled_tokens,
        "rows": outcome.rows,
        "seconds": dict(outcome.seconds),
        "notes": list(outcome.notes),
        "warnings": outcome.warnings,
    }
    if not outcome.session:
        return
    try:
        async with asyncio.timeout(_FETCH_S):
            view = await gateway.trace(outcome.session)
    except TurngateError as error:
        raise vf.InterceptionError(f"cannot fetch the trace of session {outcome.session}: {error.message}") from error
    except TimeoutError as error:
        raise vf.InterceptionError(
            f"cannot fetch the trace of session {outcome.session}: no answer within {_FETCH_S:g} s"
        ) from error
    parsed = read_view(view)
    trace.info["turngate"]["untrained"] = {str(turn.id): turn.untrained for turn in parsed.turns if turn.untrained}
    graft(trace, turns_from_view(parsed))


def _conclude(trace: vf.Trace, outcome: Outcome) -> None:
    """Record in the trace how the rollout ended, in verifiers' terms. Raise an error if the rollout must not be trained on.

    A missing reward must never count as 0.
    """
    if outcome.fault is not None:
        raise _fault(outcome.fault.boundary, f"{outcome.fault.stage}: {outcome.fault.message}")
    if outcome.kind in ("invalid task", "infrastructure fault"):
        message = outcome.grade.message if outcome.grade is not None else ""
        raise _fault("task" if outcome.kind == "invalid task" else "sandbox", f"{outcome.kind}: {message}")
    if outcome.status == "cancelled":
        stop = "its policy version became too old to train on" if outcome.stop == STALE else outcome.stop
        raise vf.HarnessError(f"the rollout was cancelled: {stop}")
    if outcome.kind is not None and outcome.reward is None:
        why = outcome.grade.message if outcome.grade is not None else ""
        # An agent that failed before its first turn is always excluded.
        settings = "; the harness settings on_timeout, on_failure, on_limit and on_lost decide what is excluded"
        hint = settings if outcome.turns else ""
        raise vf.HarnessError(f"the rollout is excluded because it has no reward: {why or outcome.status}{hint}")
    if outcome.exclusion:
        raise vf.HarnessError(f"the rollout is excluded: {outcome.exclusion}")
    if outcome.status == "timed out" or outcome.stop == "seconds":
        trace.record_timeout("agent")
    elif outcome.status == "limit":
        trace.stop(_LIMITS.get(outcome.stop, "max_total_tokens"))
    elif outcome.status == "failed":
        trace.stop("agent_failed")


def _fault(boundary: Boundary, message: str) -> Exception:
    return _FAULTS.get(boundary, vf.InterceptionError)(message)


# ── the environment ─────────────────────────────────────────────────────────────────────────────────────────────────


class TurngateEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    """The only agent. Its harness sets the agent program, sandbox and gateway."""

    @model_validator(mode="before")
    @classmethod
    def _own_harness(cls, data: Any) -> Any:
        """Make the taskset's id the default id of the harness, so that the harness's settings can be passed without an id."""
        if not isinstance(data, dict) or not isinstance(data.get("taskset"), dict) or not data["taskset"].get("id"):
            return data
        agent = data.get("agent") or {}
        if not isinstance(agent, dict) or not isinstance(agent.get("harness") or {}, dict):
            return data
        harness = {"id": data["taskset"]["id"], **(agent.get("harness") or {})}
        return {**data, "agent": {**agent, "harness": harness}}


class TurngateEnv(vf.Env[TurngateEnvConfig]):
    """An environment with one agent per task, and one connection to the gateway for all tasks."""

    def __init__(self, config: TurngateEnvConfig) -> None:
        super().__init__(config)
        self._stack = AsyncExitStack()
        self._shared: SharedConnections | None = None

    async def start(self) -> None:
        harness: Any = self._agent_harness(self.config.agent)
        if isinstance(harness, TurngateHarnessConfig):
            self._shared = await self._stack.enter_async_context(_connect(harness))

    async def stop(self) -> None:
        self._shared = None
        await self._stack.aclose()

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        token = _shared_connections.set(self._shared)
        try:
            await agents.agent.run(task)
        finally:
            _shared_connections.reset(token)
