"""A queued or running rollout: its progress, its asyncio tasks and its open resources."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager

from turngate.agents.spec import AgentSpec
from turngate.engines.scripted import SYNTHETIC_NOTE
from turngate.rollout.outcome import Outcome, RolloutProgress
from turngate.rollout.rollout import Rollout
from turngate.service.catalog import EndpointChoice
from turngate.service.gateways import GatewayConnection
from turngate.service.request import AnyRequest
from turngate.service.result import ConversationMessage, RolloutState
from turngate.tasks.task import Task


class ActiveRollout:
    """The service's internal record of a queued or running rollout. Callers see only its `state`."""

    def __init__(
        self, rollout: str, request: AnyRequest, choice: EndpointChoice, agent: AgentSpec, task: Task, task_id: str
    ) -> None:
        self.id = rollout
        self.request = request
        self.choice = choice
        self.agent = agent
        self.task = task
        self.task_id = task_id
        self.input_bytes = request.size()
        self.started = time.time()
        self.start_time = time.monotonic()
        self.seconds: dict[str, float] = {}  # durations of the service's own stages, which precede those of the rollout
        self.model = choice.endpoint.served
        self.stage = "queued"
        self.running = False
        self.progress = RolloutProgress()
        self.rollout: Rollout | None = None
        self.connection: GatewayConnection | None = None
        self.stack = AsyncExitStack()  # closed when the rollout has ended
        self.cursor = 0  # cursor of the newest event
        self.seq = 0  # number of the newest event from the gateway
        self.abort_reason: str | None = None  # None if the rollout was not aborted
        self.notes = [SYNTHETIC_NOTE] if choice.endpoint.scheme == "scripted" else list[str]()
        self.messages: tuple[int, list[ConversationMessage]] = (0, [])  # cache, with the `seq` at which it was built
        # Set when the rollout first reports progress. From then on, the gateway may have the session.
        self.announced = asyncio.Event()
        self.changed = asyncio.Event()  # set, and replaced, by every new event
        self.ended = asyncio.Event()
        self.writing_inputs: asyncio.Task[None] | None = None
        self.work: asyncio.Task[Outcome] | None = None
        self.following: asyncio.Task[None] | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether a gateway records a session of this rollout."""
        return self.choice.mode != "direct" and bool(self.progress.session)

    @property
    def outcome(self) -> Outcome | None:
        return self.rollout.outcome if self.rollout is not None else None

    @property
    def wall_s(self) -> float:
        return round(time.monotonic() - self.start_time, 3)

    @property
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
            wall_s=self.wall_s,
            session=self.progress.session if self.is_recorded else "",
            cursor=self.cursor,
            started=self.started,
            gateway=self.connection.client.url if self.connection is not None and self.choice.mode == "gate" else "",
        )

    def on_progress(self, progress: RolloutProgress) -> None:
        self.progress = progress
        self.stage = "result" if progress.stage == "done" else progress.stage
        self.announced.set()

    def notify(self) -> None:
        """Wake all tasks that are waiting for a new event of this rollout."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    @contextmanager
    def time_stage(self, stage: str) -> Iterator[None]:
        """Run the block as one of the service's own stages, and measure its duration."""
        self.stage = stage
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = round(time.monotonic() - start, 3)
