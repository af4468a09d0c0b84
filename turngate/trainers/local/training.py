"""A whole training run in one process: gateway, in-process engine, agents in their sandboxes, trainer. Called by `turngate train` and by
the demo.

    runner (a batch whose tasks come round) → agents → gateway → engine
          ▲ pace                                  └→ feed → trainer → new weights for the engine
          └─────────────────────────────────────────────────┘

The runner is never further ahead of the trainer than `ahead` groups, so with as many as make an update every rollout is sampled with
the newest weights. Everything is durable: killed at any moment, the same call on the same folder goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import msgspec

from turngate.client.feed import Feed, FeedConfig, OtherFeed
from turngate.client.gateway import GatewayClient, RequestRejected
from turngate.common.aio import run_to_completion
from turngate.config import ServeConfig
from turngate.engines.base import Chunk, Generate
from turngate.engines.local import LocalEngine
from turngate.errors import ConfigError, Conflict, TurngateError
from turngate.rollout.batch import BatchResult, run_batch
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.plan import BatchPlan
from turngate.rollout.progress import BatchProgress
from turngate.rollout.throttle import TrainerThrottle
from turngate.server.run import run_embedded
from turngate.trainers.local.checkpoint import State
from turngate.trainers.local.grpo import Settings, Step, Trainer

FEED = "grpo"
_LOOK_S = 0.5
NAME = "train"  # of a batch that has none: the feed takes its groups and no others


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """How much of what. Where it lies and who runs is the batch's."""

    batch: BatchPlan  # tasks, agent, n; its `rounds` follow from the steps
    steps: int
    settings: Settings = Settings()
    feed: FeedConfig | None = (
        None  # None: groups of the batch's n, normalised; those of the batch, where `groups` says nothing
    )
    ahead: int | None = None  # groups that agents may be ahead of the trainer; None: those of one update
    every: int = 1  # steps between checkpoints

    def __post_init__(self) -> None:
        for name in ("steps", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} must be at least 1", param=name)
        if self.batch.n == 1 and self.feed_config().advantage != "none":
            raise ConfigError("n: a group of one has nobody to be compared with; give at least 2", param="n")
        for task in self.batch.tasks:
            if task.grader is None:
                raise ConfigError(f"tasks: {task.id!r} has no grader, so nothing can be learnt from it", param="tasks")

    def plan(self) -> BatchPlan:
        """Tasks come round until there are groups enough."""
        groups = self.steps * self.settings.groups
        return msgspec.structs.replace(self.batch, rounds=-(-groups // len(self.batch.tasks)), name=self._name)

    def feed_config(self) -> FeedConfig:
        config = self.feed or FeedConfig(n=self.batch.n)
        return config if config.groups else msgspec.structs.replace(config, groups=f"{self._name}.")

    @property
    def _name(self) -> str:
        return self.batch.name or NAME


class TrainingCallbacks(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to tell what while it goes on."""

    rollouts: Callable[[BatchProgress], None] = lambda tally: None
    step: Callable[[Step, Shares], None] = lambda step, shares: None
    note: Callable[[str], None] = lambda text: None


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Where the seconds of a step went. Agents are what is left: their processes, sandboxes and graders, and waiting for a core."""

    whole: float
    training: float
    sampling: float  # seconds in which at least one call was being sampled
    turngate: float  # seconds of a core that gateway, runner and feed used themselves

    @property
    def agents(self) -> float:
        return max(0.0, self.whole - self.training - self.sampling - self.turngate)


class Clocked(LocalEngine):
    """The in-process engine, and for how long somebody waited for it."""

    busy_s = 0.0
    _calls = 0
    _since = 0.0

    @asynccontextmanager
    async def _timed(self, request: Generate) -> AsyncIterator[AsyncIterator[Chunk]]:
        if not self._calls:
            self._since = time.monotonic()
        self._calls += 1
        try:
            async with super().generate(request) as chunks:
                yield chunks
        finally:
            self._calls -= 1
            if not self._calls:
                self.busy_s += time.monotonic() - self._since

    def generate(self, request: Generate) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:  # type: ignore[override]
        return self._timed(request)


class Place(msgspec.Struct, frozen=True):
    """Everything that a run of agents needs, for as long as it is open."""

    engine: Clocked
    gateway: GatewayClient
    connector: GatewayConnector


@asynccontextmanager
async def opened(config: ServeConfig, engine: Clocked) -> AsyncIterator[Place]:
    """A gateway of our own around the engine."""
    async with (
        run_embedded(config, engine=engine) as address,
        GatewayClient(address.url, address.admin_key) as gateway,
        GatewayConnector(gateway.url) as connector,
    ):
        yield Place(engine, gateway, connector)


async def evaluate(
    place: Place, plan: BatchPlan, watch: Callable[[BatchProgress], None] = lambda tally: None
) -> BatchResult:
    """Rollouts that nobody is trained on: the plan has another name than that of the training, so no feed takes their groups."""
    result = await run_batch(plan, place.gateway, place.connector, watch)
    if result.stopped:
        raise TurngateError(f"the evaluation stopped: {result.stopped}")
    return result


async def train(
    place: Place, goal: Goal, folder: Path, source: str | Path, told: TrainingCallbacks = TrainingCallbacks()
) -> list[Step]:
    """To the last step. The feed stays, so that more steps may be asked for later."""
    clock = _Clock(place.engine)
    pace: TrainerThrottle | None = None

    def watched(step: Step) -> None:
        if pace is not None and step.step < goal.steps:  # after the last one nobody needs more
            pace.mark_trained(step.last)
        told.step(step, clock.lap(step))

    trainer = Trainer(
        place.engine,
        place.gateway,
        goal.settings,
        folder=folder / "checkpoints",
        source=source,
        every=goal.every,
        watch=watched,
    )
    await trainer.restore()
    if trainer.state.step >= goal.steps:
        return trainer.steps
    pace = TrainerThrottle(goal.ahead or goal.settings.groups, trained=trainer.state.number)
    rate = goal.settings.learning_rate
    if trainer.earlier_rate not in (None, rate):
        told.note(
            f"learning rate {rate:g} from step {trainer.state.step + 1} on; the checkpoint was made with {trainer.earlier_rate:g}"
        )
    async with await _feed(place.gateway, goal.feed_config(), trainer.state) as feed:
        running = asyncio.create_task(
            run_batch(goal.plan(), place.gateway, place.connector, told.rollouts, throttle=pace), name="agents"
        )
        training = asyncio.create_task(trainer.run(feed, goal.steps), name="trainer")
        try:
            done, _ = await asyncio.wait({running, training}, return_when=asyncio.FIRST_COMPLETED)
            if running in done:
                result = running.result()
                if result.stopped:
                    raise TurngateError(f"the agents' batch stopped: {result.stopped}")
                await _enough(place.gateway, trainer, training, goal)
            await training
        finally:
            for task in (running, training):
                task.cancel()
            await run_to_completion(_ended(running, training, trainer, feed))
    return trainer.steps


async def _feed(gateway: GatewayClient, config: FeedConfig, state: State) -> Feed:
    try:
        return await Feed.open(gateway, FEED, config, after=state.number, mark=state.mark)
    except OtherFeed:
        raise ConfigError(
            f"data: this data folder has not recorded the {state.step} steps of the checkpoint; give the --data that they were made with, "
            "or choose another --out folder",
            param="data",
        ) from None
    except RequestRejected as error:
        if error.answered != Conflict.status:
            raise
        known = msgspec.structs.asdict((await gateway.show_feed(FEED)).config)
        asked = msgspec.structs.asdict(config)
        changed = "; ".join(
            f"{name}: was {known[name]}, is now {asked[name]}" for name in asked if known[name] != asked[name]
        )
        raise ConfigError(
            f"{changed}; the data folder has recorded another training run: go on as it was, or choose another --out folder (and --data)",
            param="data",
        ) from None


async def _ended(
    running: asyncio.Task[BatchResult], training: asyncio.Task[list[Step]], trainer: Trainer, feed: Feed
) -> None:
    """Whatever ended it: what was learnt is kept."""
    await asyncio.gather(running, training, return_exceptions=True)
    with suppress(TurngateError):  # then the one before is gone on from
        await trainer.save(feed)


async def _enough(gateway: GatewayClient, trainer: Trainer, training: asyncio.Task[list[Step]], goal: Goal) -> None:
    """All agents have ended. Where too few groups came of them, whoever trains would wait for more for ever."""
    newest = (await gateway.show_feed(FEED)).newest
    per_step = goal.settings.groups
    missing = (goal.steps - trainer.state.step) * per_step - (newest - trainer.state.number)
    while missing > 0 and not training.done():
        if newest - trainer.state.number < per_step:  # it has trained all that there is
            raise TurngateError(
                f"the agents' rollouts have ended after {trainer.state.step} of {goal.steps} steps: {missing} groups had no rollout "
                "that was graded; their outcomes are in the folder of the run"
            )
        await asyncio.wait({training}, timeout=_LOOK_S)


class _Clock:
    """What each step took of the time."""

    def __init__(self, engine: Clocked) -> None:
        self._engine = engine
        self._at, self._busy, self._own = time.monotonic(), engine.busy_s, time.thread_time()

    def lap(self, step: Step) -> Shares:
        at, busy, own = time.monotonic(), self._engine.busy_s, time.thread_time()
        shares = Shares(
            whole=at - self._at,
            training=step.seconds["train"],
            sampling=busy - self._busy,
            turngate=own - self._own,
        )
        self._at, self._busy, self._own = at, busy, own
        return shares
