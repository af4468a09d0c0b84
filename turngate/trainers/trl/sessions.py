"""OpenEnv sessions for TRL's `HarnessRolloutWorker`. Each session is one rollout of an agent through the gateway.

    config = SessionsConfig(gateway=url, agent="pi", sandbox="docker", tasks="tasks/", model="policy", folder="rollouts")
    factory = functools.partial(TurngateSessions, config)
    worker = HarnessRolloutWorker(harness_session_factory=factory, dataset=Dataset.from_list(prompts(config)), …)

TRL runs the factory in a separate process, so the config is plain data. The reward is the host's grade (`verify`), and the tokens are those
of the recorded trace (`fetch_training_trace`). There is no feed, so a killed run starts over. Prefer `worker.py` unless you need OpenEnv.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from openenv.core.harness import ResourceSession, ResourceSessionFactory, ToolResult, TrainingTrace, VerifyResult

from turngate import tasks
from turngate.agents.install import ensure_installed
from turngate.agents.installation import Installation
from turngate.agents.spec import AgentSpec, find_agent
from turngate.client.gateway import GatewayClient
from turngate.client.keys import read_admin_key
from turngate.client.protocol import DecodedTrace
from turngate.client.retry import retry_while_unreachable
from turngate.common.loop_thread import LoopThread
from turngate.errors import ConfigError, TurngateError
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.outcome import Outcome
from turngate.rollout.plan import DEFAULT_TIMEOUT_S
from turngate.rollout.rollout import Rollout
from turngate.rollout.spec import EndPolicy, RolloutSpec
from turngate.sandboxes import get_backend
from turngate.sandboxes.base import Backend, Network
from turngate.tasks.task import Task
from turngate.types import STALE, Json, Sampling
from turngate.views.training_trace import training_trace

log = logging.getLogger("turngate")
_KNOWN = tuple(field.name for field in msgspec.structs.fields(Sampling))
_OFF = {"top_k": -1}  # values with which TRL turns a setting off


class SessionsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of all sessions, as plain data that can be sent to another process. The admin key is read from `TURNGATE_ADMIN_KEY`."""

    gateway: str
    agent: str
    tasks: str  # a folder or a file of rows, as for `turngate batch`
    model: str
    folder: str  # folder for the agents' files
    sandbox: str = "bubblewrap"
    image: str = ""
    network: Network = "none"
    timeout_s: float | None = None  # None: the task's time limit, or half an hour
    session: Mapping[str, Json] = {}  # settings of each session, such as limits and policy
    options: Mapping[str, str] = {}  # options of the agent
    policy: EndPolicy = EndPolicy()
    group: str = "trl"  # prefix of group names
    public_url: str = ""
    tunnel: str = ""


def prompts(config: SessionsConfig) -> list[dict[str, Json]]:
    """Return the rows of a dataset for TRL, one per task. `TurngateSessions.create` finds the task of a row by the task's instruction."""
    tasks_by_text = _read_by_instruction(config)
    return [{"prompt": [{"role": "user", "content": text}], "task": task.id} for text, task in tasks_by_text.items()]


class TurngateSession(ResourceSession):  # type: ignore[misc]
    """One rollout, which starts when the session is created."""

    def __init__(self, task: Task, rollout: Rollout, running: asyncio.Task[Outcome], owner: TurngateSessions) -> None:
        self._task = task
        self._rollout = rollout
        self._running = running
        self._owner = owner
        self._closing = threading.Lock()
        self._closed = False

    @property
    def outcome(self) -> Outcome:
        """The outcome of the rollout so far."""
        return self._rollout.outcome

    def initial_messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._task.instruction}]

    def list_tools(self) -> list[Any]:
        """Return an empty list, because the agent brings its own tools."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(error=f"{name} cannot be called: the agent runs its own tools in its sandbox")

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Wait until the agent has ended and its work is graded. Return the agent's exit code, or -1 if it was stopped.

        Raise `TimeoutError` if the agent exceeds its time limit or this call takes longer than `timeout_s`. The trace can then still be
        fetched. Any other exception means that the rollout cannot be trained on, and TRL leaves it out of its group.
        """
        outcome = self._owner.wait_for(self._running, timeout_s)
        if outcome.kind in ("infrastructure fault", "invalid task") or outcome.status in ("error", "cancelled"):
            why = outcome.fault.message if outcome.fault is not None else outcome.grade.message if outcome.grade else ""
            name = f"session {outcome.session}" if outcome.session else f"rollout {outcome.rollout}"
            stop = "its policy version became too old to train on" if outcome.stop == STALE else outcome.stop
            raise TurngateError(f"{name}: {outcome.kind or outcome.status}: {why or stop}")
        if outcome.exclusion:
            raise TurngateError(f"the rollout of session {outcome.session} cannot be trained on: {outcome.exclusion}")
        for warning in outcome.warnings:
            log.warning("session %s: %s", outcome.session, warning)
        if outcome.status == "timed out":
            raise TimeoutError(f"session {outcome.session}: the agent timed out")
        return -1 if outcome.exit_code is None else outcome.exit_code

    def fetch_training_trace(self) -> TrainingTrace:
        """Return a trace that contains every turn once, with a mask of the trained tokens.

        A rollout without model calls has a trace without turns.
        """
        if not self.outcome.session:
            return TrainingTrace(turns=[])
        return TrainingTrace.model_validate(training_trace(self._owner.trace(self.outcome.session)))

    def verify(self, transcript: list[Any], final_state: Any | None = None) -> VerifyResult:
        """Return the host's grade, regardless of what the agent reports. An unknown reward is None."""
        outcome = self.outcome
        resolved = None if outcome.grade is None else outcome.grade.resolved
        metrics = {"turns": outcome.turns, "sampled_tokens": outcome.sampled_tokens, "status": outcome.status}
        artifacts = {"session": outcome.session, "kind": outcome.kind, "resolved": resolved, "seconds": outcome.seconds}
        return VerifyResult(env_reward=outcome.reward, done=True, metrics=metrics, artifacts=artifacts)

    def close(self) -> None:
        """End the rollout and wait for its cleanup. Thread-safe, and safe to repeat."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._owner.end_rollout(self._running)


class TurngateSessions(ResourceSessionFactory):  # type: ignore[misc]
    """Creates sessions. Its event loop and its connection to the gateway stay open while any session is open."""

    def __init__(self, config: SessionsConfig, *, sampling: Mapping[str, float] | None = None) -> None:
        """Create a factory.

        `sampling` contains the trainer's sampling settings, which apply to all sessions. A setting is ignored if it is turned off, if the
        gateway does not know it, or if `config.session["sampling"]` also contains it.
        """
        self.config = config
        self._tasks = _read_by_instruction(config)
        self._sampling = _translate_sampling(sampling or {})
        self._spec: AgentSpec = find_agent(config.agent).spec
        self._installed: Installation = ensure_installed(self._spec)
        self._backend: Backend = get_backend(config.sandbox)
        self._key = read_admin_key()
        self._thread = LoopThread("turngate-sessions")
        self._lock = threading.Lock()
        self._open = 0
        self._gateway: GatewayClient | None = None
        self._connector: GatewayConnector | None = None
        self._connection = AsyncExitStack()  # closes the gateway client and the connector

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> TurngateSession:
        """Start a rollout. `task` is the prompt of a row from `prompts`, or only the prompt's text. `seed` is TRL's group number.

        If the gateway is unreachable, retry for a while. If this call failed at once, TRL would keep requesting new sessions.
        """
        known = self._find_task(task)
        group = f"{self.config.group}.{known.id}" + ("" if seed is None else f"@{seed}")
        spec = self._build_spec(known, group, episode_id or "")
        with self._lock:
            if not self._open:
                self._start()
            self._open += 1
            gateway, connector = self._gateway, self._connector
        assert gateway is not None
        assert connector is not None
        try:
            self._thread.run(retry_while_unreachable(gateway.check))
            rollout = Rollout(spec, gateway, connector)
            running = self._thread.run(_start_rollout(rollout))
        except BaseException:
            self._release()
            raise
        return TurngateSession(known, rollout, running, self)

    def trace(self, session: str) -> DecodedTrace:
        gateway = self._gateway
        assert gateway is not None, "a session is open"
        return self._thread.run(retry_while_unreachable(lambda: gateway.trace(session)))

    def wait_for(self, running: asyncio.Task[Outcome], timeout_s: float | None) -> Outcome:
        if not self._thread.run(_wait_done(running, timeout_s)):
            raise TimeoutError(f"the rollout did not finish within {timeout_s:g} s")
        if running.cancelled():
            raise TurngateError("the rollout was cancelled")
        return running.result()

    def end_rollout(self, running: asyncio.Task[Outcome]) -> None:
        """End a session's rollout. Called once per session."""
        self._thread.run(_cancel_rollout(running))
        self._release()

    def _start(self) -> None:
        self._thread.start()
        try:
            self._thread.run(self._connect())
        except BaseException:
            self._thread.stop()
            raise

    def _release(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                try:
                    self._thread.run(self._connection.aclose())
                finally:
                    self._thread.stop()

    def _find_task(self, task: Any) -> Task:
        instruction = task if isinstance(task, str) else task[-1]["content"]
        if instruction not in self._tasks:
            raise ConfigError(
                f"tasks: no task in {self.config.tasks} has the instruction {instruction[:80]!r}; build the rows of the dataset with "
                "the function `prompts`",
                param="tasks",
            )
        return self._tasks[instruction]

    def _build_spec(self, task: Task, group: str, rollout: str) -> RolloutSpec:
        config = self.config
        session = {**config.session, "sampling": {**self._sampling, **config.session.get("sampling", {})}}
        return RolloutSpec(
            task=task,
            agent=self._spec,
            installed=self._installed,
            backend=self._backend,
            model=config.model,
            timeout_s=config.timeout_s or task.timeout_s or DEFAULT_TIMEOUT_S,
            image=config.image,
            network=config.network,
            session=session,
            options=config.options,
            folder=Path(config.folder),
            keep_work=False,
            policy=config.policy,
            rollout=rollout,
            group=group,
        )

    async def _connect(self) -> None:
        async with AsyncExitStack() as stack:
            self._gateway = await stack.enter_async_context(GatewayClient(self.config.gateway, self._key))
            self._connector = await stack.enter_async_context(
                GatewayConnector(self._gateway.url, self.config.public_url, self.config.tunnel)
            )
            self._connection = stack.pop_all()


async def _start_rollout(rollout: Rollout) -> asyncio.Task[Outcome]:
    return asyncio.create_task(rollout.run())


async def _wait_done(running: asyncio.Task[Outcome], timeout_s: float | None) -> bool:
    done, _ = await asyncio.wait({running}, timeout=timeout_s)
    return bool(done)


async def _cancel_rollout(running: asyncio.Task[Outcome]) -> None:
    """Cancel a rollout and wait for its cleanup."""
    running.cancel()
    await asyncio.wait({running})
    if not running.cancelled():
        running.exception()  # already raised to the waiting caller


def _read_by_instruction(config: SessionsConfig) -> dict[str, Task]:
    by_instruction: dict[str, Task] = {}
    for task in tasks.read_tasks(config.tasks):
        if task.instruction in by_instruction:
            other = by_instruction[task.instruction].id
            raise ConfigError(
                f"tasks: {task.id!r} and {other!r} have the same instruction, so TRL cannot tell them apart; change one of them",
                param="tasks",
            )
        by_instruction[task.instruction] = task
    return by_instruction


def _translate_sampling(sampling: Mapping[str, float]) -> dict[str, Json]:
    """Translate TRL's sampling settings to those of a session. Leave out settings that are turned off or unknown to the gateway."""
    return {name: value for name, value in sampling.items() if name in _KNOWN and value != _OFF.get(name)}
