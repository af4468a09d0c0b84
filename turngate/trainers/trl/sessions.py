"""OpenEnv sessions for TRL's own `HarnessRolloutWorker`: each of them is one rollout of a catalogue agent through the gateway.

    config = SessionsConfig(gateway=url, agent="pi", sandbox="docker", tasks="tasks/", model="policy", folder="rollouts")
    made = functools.partial(TurngateSessions, config)
    worker = HarnessRolloutWorker(harness_session_factory=made, dataset=Dataset.from_list(prompts(config)), …)

TRL runs the factory in a process of its own, so all of this is plain data until then. The reward is what the host decided (`verify`), the
tokens are those of the trace (`fetch_training_trace`), and both come from the gateway. `worker.py` is the shorter way where
nothing else of OpenEnv's is wanted: this one has no feed, so a run that is killed begins anew.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from openenv.core.harness import ResourceSession, ResourceSessionFactory, ToolResult, TrainingTrace, VerifyResult

from turngate import tasks
from turngate.agents.install import Installation, ensure_installed
from turngate.agents.spec import AgentSpec, find_agent
from turngate.client.gateway import GatewayClient
from turngate.client.keys import read_admin_key
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
from turngate.trainers.trl.retry import patiently
from turngate.types import Json, Sampling
from turngate.views.training_trace import training_trace

_KNOWN = tuple(field.name for field in msgspec.structs.fields(Sampling))
_OFF = {"top_k": -1}  # how others say that something is off which is 0 here


class SessionsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is run, in words that another process can read. The gateway's admin key is in `TURNGATE_ADMIN_KEY`."""

    gateway: str
    agent: str
    tasks: str  # as `turngate batch` reads them: a folder, or a file of rows
    model: str
    folder: str  # where what agents leave is kept
    sandbox: str = "bubblewrap"
    image: str = ""
    network: Network = "none"
    timeout_s: float | None = None  # None: the task's
    session: Mapping[str, Json] = {}  # limits, policy … of each session
    options: Mapping[str, str] = {}  # of the agent's own
    policy: EndPolicy = EndPolicy()
    group: str = "trl"  # what names of groups begin with
    public_url: str = ""
    tunnel: str = ""


def prompts(config: SessionsConfig) -> list[dict[str, Json]]:
    """The rows of a dataset for TRL: what each task asks for, by which the session finds the task again."""
    found = _by_instruction(config)
    return [{"prompt": [{"role": "user", "content": words}], "task": task.id} for words, task in found.items()]


class TurngateSession(ResourceSession):  # type: ignore[misc]
    """One rollout, which runs from the moment that it was made."""

    def __init__(self, task: Task, rollout: Rollout, running: asyncio.Task[Outcome], owner: TurngateSessions) -> None:
        self._task = task
        self._rollout = rollout
        self._running = running
        self._owner = owner
        self._closing = threading.Lock()
        self._closed = False

    @property
    def outcome(self) -> Outcome:
        """As far as it is known."""
        return self._rollout.outcome

    def initial_messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._task.instruction}]

    def list_tools(self) -> list[Any]:
        """None: the agent brings its own."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(error=f"{name}: the agent runs its own tools, in its sandbox")

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """The agent's exit code, -1 where it did not end by itself. Waits for the grade too.

        `TimeoutError`: the agent's time was up, or `timeout_s`; what was recorded can be fetched all the same. Anything else that is
        raised was not the agent's fault: TRL then leaves the rollout out of its group.
        """
        outcome = self._owner.awaited(self._running, timeout_s)
        if outcome.kind in ("infrastructure fault", "invalid task") or outcome.status in ("error", "cancelled"):
            why = outcome.fault.message if outcome.fault is not None else outcome.grade.message if outcome.grade else ""
            raise TurngateError(f"session {outcome.session}: {outcome.kind or outcome.status}: {why or outcome.stop}")
        if outcome.status == "timed out":
            raise TimeoutError(f"session {outcome.session}: the agent's time was up")
        return -1 if outcome.exit_code is None else outcome.exit_code

    def fetch_training_trace(self) -> TrainingTrace:
        """Every model call once, with its mask. A rollout that never called the model has none, and is trained on nothing."""
        if not self.outcome.session:
            return TrainingTrace(turns=[])
        return TrainingTrace.model_validate(training_trace(self._owner.trace(self.outcome.session)))

    def verify(self, transcript: list[Any], final_state: Any | None = None) -> VerifyResult:
        """What the host decided. Nothing that the agent said is asked, and a reward that is not known is None."""
        outcome = self.outcome
        resolved = None if outcome.grade is None else outcome.grade.resolved
        metrics = {"turns": outcome.turns, "sampled_tokens": outcome.sampled_tokens, "status": outcome.status}
        artifacts = {"session": outcome.session, "kind": outcome.kind, "resolved": resolved, "seconds": outcome.seconds}
        return VerifyResult(env_reward=outcome.reward, done=True, metrics=metrics, artifacts=artifacts)

    def close(self) -> None:
        """Ends what still runs, and waits until nothing of it is left. From any thread, as often as one likes."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._owner.closed(self._running)


class TurngateSessions(ResourceSessionFactory):  # type: ignore[misc]
    """Its loop and its connection are there for as long as one of its sessions is open."""

    def __init__(self, config: SessionsConfig, *, sampling: Mapping[str, float] | None = None) -> None:
        """`sampling`: the trainer's, pinned in every session."""
        self.config = config
        self._tasks = _by_instruction(config)
        self._sampling = _own(sampling or {})
        self._spec: AgentSpec = find_agent(config.agent).spec
        self._installed: Installation = ensure_installed(self._spec)
        self._backend: Backend = get_backend(config.sandbox)
        self._key = read_admin_key()
        self._thread = LoopThread("turngate-sessions")
        self._lock = threading.Lock()
        self._open = 0
        self._gateway: GatewayClient | None = None
        self._connector: GatewayConnector | None = None

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> TurngateSession:
        """`task`: a prompt of `prompts`, or the words of one. `seed`: TRL's number of the group.

        A gateway that is not there is waited for: TRL would ask for the next session at once, and again.
        """
        found = self._found(task)
        group = f"{self.config.group}.{found.id}" + ("" if seed is None else f"@{seed}")
        order = self._order(found, group, episode_id or "")
        with self._lock:
            if not self._open:
                self._thread.start()
                self._thread.run(self._connected())
            self._open += 1
            gateway, connector = self._gateway, self._connector
        assert gateway is not None
        assert connector is not None
        try:
            self._thread.run(patiently(gateway.check))
        except TurngateError:
            self._one_less()
            raise
        rollout = Rollout(order, gateway, connector)
        return TurngateSession(found, rollout, self._thread.run(_begun(rollout)), self)

    def trace(self, session: str) -> Json:
        gateway = self._gateway
        assert gateway is not None, "a session of it is open"
        return self._thread.run(patiently(lambda: gateway.trace(session)))

    def awaited(self, running: asyncio.Task[Outcome], timeout_s: float | None) -> Outcome:
        if not self._thread.run(_over(running, timeout_s)):
            raise TimeoutError(f"the rollout is not done after {timeout_s:g} s")
        if running.cancelled():
            raise TurngateError("the rollout was cancelled")
        return running.result()

    def closed(self, running: asyncio.Task[Outcome]) -> None:
        """By a session, once."""
        self._thread.run(_ended(running))
        self._one_less()

    def _one_less(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._thread.run(self._disconnected())
                self._thread.stop()

    def _found(self, task: Any) -> Task:
        words = task if isinstance(task, str) else task[-1]["content"]
        if words not in self._tasks:
            raise ConfigError(
                f"tasks: none of {self.config.tasks} asks for {words[:80]!r}; make the dataset with `prompts`",
                param="tasks",
            )
        return self._tasks[words]

    def _order(self, task: Task, group: str, rollout: str) -> RolloutSpec:
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

    async def _connected(self) -> None:
        self._gateway = await GatewayClient(self.config.gateway, self._key).__aenter__()
        self._connector = await GatewayConnector(
            self._gateway.url, self.config.public_url, self.config.tunnel
        ).__aenter__()

    async def _disconnected(self) -> None:
        assert self._gateway is not None
        assert self._connector is not None
        await self._connector.__aexit__(None, None, None)
        await self._gateway.__aexit__(None, None, None)


async def _begun(rollout: Rollout) -> asyncio.Task[Outcome]:
    return asyncio.create_task(rollout.run())


async def _over(running: asyncio.Task[Outcome], timeout_s: float | None) -> bool:
    done, _ = await asyncio.wait({running}, timeout=timeout_s)
    return bool(done)


async def _ended(running: asyncio.Task[Outcome]) -> None:
    """When it has cleaned up."""
    running.cancel()
    await asyncio.wait({running})
    if not running.cancelled():
        running.exception()  # whoever waited for it was told


def _by_instruction(config: SessionsConfig) -> dict[str, Task]:
    found: dict[str, Task] = {}
    for task in tasks.read_tasks(config.tasks):
        if task.instruction in found:
            raise ConfigError(
                f"tasks: {task.id!r} and {found[task.instruction].id!r} ask for the same in the same words; TRL could not tell them apart",
                param="tasks",
            )
        found[task.instruction] = task
    return found


def _own(sampling: Mapping[str, float]) -> dict[str, Json]:
    """The trainer's sampling in our words; what is off there is left out here."""
    return {name: value for name, value in sampling.items() if name in _KNOWN and value != _OFF.get(name)}
