"""A rollout that is not over: what is known of it while it runs. `Rollouts` owns these; its state is what callers see of one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

from turngate.agents.spec import AgentSpec
from turngate.engines.scripted import MADE_UP
from turngate.rollout.outcome import Outcome, RolloutProgress
from turngate.rollout.rollout import Rollout
from turngate.service.catalog import Choice
from turngate.service.gateways import Reached
from turngate.service.request import AnyAsked
from turngate.service.result import RolloutState, Said
from turngate.tasks.task import Task


class Live:
    """A rollout that is not over."""

    def __init__(
        self, rollout: str, asked: AnyAsked, choice: Choice, agent: AgentSpec, task: Task, task_id: str
    ) -> None:
        self.id = rollout
        self.asked = asked
        self.choice = choice
        self.agent = agent
        self.task = task
        self.task_id = task_id
        self.size = asked.size()  # of what its caller gave
        self.laid: asyncio.Task[None] | None = None  # on disk
        self.started = time.time()
        self.began = time.monotonic()
        self.seconds: dict[str, float] = {}  # of what comes before the rollout itself
        self.model = choice.endpoint.served
        self.stage = "queued"
        self.running = False
        self.progress = RolloutProgress()
        self.rollout: Rollout | None = None
        self.reached: Reached | None = None
        self.stack = AsyncExitStack()  # what it holds open
        self.following: asyncio.Task[None] | None = None
        self.cursor = 0
        self.seq = 0  # of the newest event that came from the gateway
        self.aborted: str | None = None  # why, once somebody did
        self.notes = [MADE_UP] if choice.endpoint.scheme == "scripted" else list[str]()
        self.announced = asyncio.Event()  # its gateway knows of it
        self.changed = asyncio.Event()  # set, and replaced, when there is something new
        self.over = asyncio.Event()
        self.work: asyncio.Task[Outcome] | None = None
        self.said: tuple[int, list[Said]] = (0, [])  # as of an event's number

    @property
    def recorded(self) -> bool:
        """Whether there is a session at a gateway."""
        return self.choice.mode != "direct" and bool(self.progress.session)

    def state(self) -> RolloutState:
        return RolloutState(
            rollout_id=self.id,
            task_id=self.task_id,
            agent=self.agent.name,
            model_key=self.choice.endpoint.key,
            model=self.model,
            mode=self.choice.mode,
            status="running" if self.running else "queued",
            stage=self.stage,
            turns=self.progress.turns,
            sampled_tokens=self.progress.sampled_tokens,
            wall_s=self.wall_s(),
            session=self.progress.session if self.recorded else "",
            cursor=self.cursor,
            started=self.started,
            gateway=self.reached.client.url if self.reached is not None and self.choice.mode == "gate" else "",
        )

    def wall_s(self) -> float:
        return round(time.monotonic() - self.began, 3)

    def watch(self, progress: RolloutProgress) -> None:
        """Told by the rollout itself."""
        self.progress = progress
        self.stage = "result" if progress.stage == "done" else progress.stage
        self.announced.set()

    def wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """A stage of the service's own, before the rollout itself."""
        self.stage = stage
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = round(time.monotonic() - began, 3)
