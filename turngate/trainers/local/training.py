"""Run the gateway, the in-process engine, the runner and the trainer in one process.

    runner (a batch that repeats its tasks) → agents → gateway → engine
          ▲ throttle                              └→ feed → trainer → new weights for the engine
          └─────────────────────────────────────────────────┘

The runner is at most `ahead` groups ahead of the trainer. If `ahead` equals the number of groups per update, every rollout is sampled with
the newest weights. All state is durable: after a crash, calling `train` again with the same folder resumes training.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

import msgspec

from turngate.client.feed import Feed, FeedConfig, FeedForm, OtherFeed
from turngate.client.gateway import GatewayClient, RequestRejected
from turngate.client.protocol import PauseMode
from turngate.common.aio import run_to_completion
from turngate.config import ServeConfig
from turngate.engines.base import Chunk, Generate
from turngate.engines.local import LocalEngine
from turngate.errors import ConfigError, Conflict, NotFound, TurngateError
from turngate.rollout.batch import BatchResult, run_batch
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.executor import AttemptExecutor
from turngate.rollout.plan import BatchPlan
from turngate.rollout.progress import BatchProgress
from turngate.rollout.throttle import Throttle, TrainerThrottle, no_throttle
from turngate.server.run import run_embedded
from turngate.trainers.local.checkpoint import TrainerState
from turngate.trainers.local.grpo import GrpoSettings, Step, Trainer
from turngate.types import SAMPLING_MASK, TRUNCATIONS

FEED = "grpo"
_POLL_S = 0.5
DEFAULT_NAME = "train"  # name of an unnamed batch, so that the feed can accept only its groups


class TrainingGoal(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks to train on, the number of steps, and the settings."""

    batch: BatchPlan  # tasks, agent, n; `rounds` is computed from the steps
    steps: int
    settings: GrpoSettings = GrpoSettings()
    # None: groups of `batch.n` rollouts, with normalized advantages. If `feed.groups` is empty, the feed accepts the batch's groups.
    feed: FeedConfig | None = None
    feed_name: str = FEED
    ahead: int | None = None  # how many groups the agents may be ahead of the trainer; None: the groups of one update
    every: int = 1  # steps between checkpoints

    def __post_init__(self) -> None:
        for name in ("steps", "every", "ahead"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name!r} must be at least 1, not {value}", param=name)
        if self.ahead is not None and self.ahead < self.settings.groups:
            raise ConfigError(
                f"'ahead' must be at least 'settings.groups' ({self.settings.groups}), not {self.ahead}, because an update needs that many "
                f"groups; set 'ahead' to {self.settings.groups} or more, or leave it out",
                param="ahead",
            )
        if self.batch.n == 1 and self.feed_config().advantage != "none":
            raise ConfigError("n must be at least 2, because advantages compare the rollouts of a group", param="n")
        if self.settings.advantages == "turn" and not self.feed_config().credit:
            raise ConfigError(
                "'advantages' is 'turn', but the feed does not deliver turn advantages; set 'feed' to a FeedConfig with "
                "credit=TurnCredit()",
                param="advantages",
            )
        if self.settings.teacher_kl:
            raise ConfigError(
                "teacher_kl must be 0 in a TrainingGoal, because its feed has no teacher; to use a teacher, open a feed with one, and pass "
                "that feed to Trainer.run (docs/training.md)",
                param="teacher_kl",
            )
        for task in self.batch.tasks:
            if task.grader is None:
                raise ConfigError(
                    f"tasks: {task.id!r} has no grader, so it cannot be trained on; add a grader or remove the task",
                    param="tasks",
                )

    def plan(self) -> BatchPlan:
        """Return the batch plan with enough rounds for all steps."""
        groups = self.steps * self.settings.groups
        return msgspec.structs.replace(self.batch, rounds=-(-groups // len(self.batch.tasks)), name=self._name)

    def feed_config(self) -> FeedConfig:
        config = self.feed or FeedConfig(n=self.batch.n, side=self._list_side())
        return config if config.groups else msgspec.structs.replace(config, groups=f"{self._name}.")

    def _list_side(self) -> tuple[str, ...] | msgspec.UnsetType:
        """Return the side data that the trainer needs: sampling masks, if the sessions use top-p, top-k or min-p."""
        sampling = (self.batch.session or {}).get("sampling") or {}
        return (SAMPLING_MASK,) if any(name in sampling for name in TRUNCATIONS) else msgspec.UNSET

    @property
    def _name(self) -> str:
        return self.batch.name or DEFAULT_NAME


class TrainingCallbacks(msgspec.Struct, frozen=True, kw_only=True):
    """Functions called as training proceeds."""

    rollouts: Callable[[BatchProgress], None] = lambda progress: None
    step: Callable[[Step, StepTime], None] = lambda step, shares: None
    note: Callable[[str], None] = lambda text: None


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """The duration of a step in seconds, by activity.

    `agents` is the remaining time: agent processes, sandboxes, graders, and waiting for a CPU core.
    """

    whole: float
    training: float
    sampling: float  # time during which at least one call was being sampled
    turngate: float  # CPU time of the gateway, the runner and the feed

    @property
    def agents(self) -> float:
        return max(0.0, self.whole - self.training - self.sampling - self.turngate)


class TimedEngine(LocalEngine):
    """An in-process engine that measures how long it is busy answering calls."""

    _busy_s = 0.0  # without the calls in progress
    _calls = 0
    _since = 0.0

    def measure_busy(self, now: float) -> float:
        """Return the seconds during which at least one call was in progress, up to `now` on the monotonic clock."""
        return self._busy_s + (max(0.0, now - self._since) if self._calls else 0.0)

    @asynccontextmanager
    async def _time_call(self, request: Generate) -> AsyncIterator[AsyncIterator[Chunk]]:
        if not self._calls:
            self._since = time.monotonic()
        self._calls += 1
        try:
            async with super().generate(request) as chunks:
                yield chunks
        finally:
            if self._calls == 1:
                self._busy_s = self.measure_busy(time.monotonic())
            self._calls -= 1

    def generate(self, request: Generate) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:  # type: ignore[override]
        return self._time_call(request)


@asynccontextmanager
async def run_here(plan: BatchPlan) -> AsyncIterator[None]:
    """Yield None instead of an executor, so that the rollouts of a plan run in this process."""
    yield None


class TrainingEnvironment(msgspec.Struct, frozen=True):
    """The engine, gateway client, connector and executors that rollouts use."""

    engine: TimedEngine
    gateway: GatewayClient
    connector: GatewayConnector
    open_executor: Callable[[BatchPlan], AbstractAsyncContextManager[AttemptExecutor | None]] = run_here
    pause_mode: PauseMode = "hold"  # for weight updates

    async def run_batch(
        self, plan: BatchPlan, watch: Callable[[BatchProgress], None], throttle: Throttle = no_throttle
    ) -> BatchResult:
        async with self.open_executor(plan) as executor:
            return await run_batch(plan, self.gateway, self.connector, watch, throttle=throttle, executor=executor)


@asynccontextmanager
async def open_environment(config: ServeConfig, engine: TimedEngine) -> AsyncIterator[TrainingEnvironment]:
    """Start a gateway with `engine`, and connect to it."""
    async with (
        run_embedded(config, engine=engine) as address,
        GatewayClient(address.url, address.admin_key) as gateway,
        GatewayConnector(gateway.url) as connector,
    ):
        yield TrainingEnvironment(engine, gateway, connector)


async def evaluate(
    environment: TrainingEnvironment, plan: BatchPlan, watch: Callable[[BatchProgress], None] = lambda progress: None
) -> BatchResult:
    """Run the rollouts of a plan without training on them.

    The plan's name must differ from the training plan's name; otherwise the feed would accept the groups of this plan.
    """
    result = await environment.run_batch(plan, watch)
    if result.stopped:
        raise TurngateError(f"the evaluation stopped: {result.stopped}")
    return result


async def train(
    environment: TrainingEnvironment,
    goal: TrainingGoal,
    folder: Path,
    source: str | Path,
    callbacks: TrainingCallbacks = TrainingCallbacks(),
) -> list[Step]:
    """Train until `goal.steps` steps are done, and return all steps. The feed is kept, so that a later call can add steps."""
    clock = _StepClock(environment.engine)
    throttle: TrainerThrottle | None = None

    def on_step(step: Step) -> None:
        if throttle is not None and step.step < goal.steps:  # no more groups are needed after the last step
            throttle.mark_trained(step.last)
        callbacks.step(step, clock.lap(step))

    trainer = Trainer(
        environment.engine,
        environment.gateway,
        goal.settings,
        folder=folder / "checkpoints",
        source=source,
        every=goal.every,
        watch=on_step,
        pause_mode=environment.pause_mode,
    )
    await trainer.restore()
    if trainer.state.step >= goal.steps:
        return trainer.steps
    throttle = TrainerThrottle(goal.ahead or goal.settings.groups, trained=trainer.state.number)
    rate = goal.settings.learning_rate
    if trainer.earlier_rate not in (None, rate):
        callbacks.note(
            f"the learning rate is {rate:g} from step {trainer.state.step + 1} on; the checkpoint used {trainer.earlier_rate:g}"
        )
    async with await _open_feed(environment.gateway, goal, trainer.state, callbacks.note) as feed:
        agents = environment.run_batch(goal.plan(), callbacks.rollouts, throttle)
        running = asyncio.create_task(agents, name="agents")
        training = asyncio.create_task(trainer.run(feed, goal.steps), name="trainer")
        try:
            done, _ = await asyncio.wait({running, training}, return_when=asyncio.FIRST_COMPLETED)
            if running in done:
                result = running.result()
                if result.stopped:
                    raise TurngateError(f"the batch of rollouts stopped: {result.stopped}")
                await _wait_for_groups(environment.gateway, trainer, training, goal)
            await training
        finally:
            for task in (running, training):
                task.cancel()
            await run_to_completion(_finish(running, training, trainer, feed))
    return trainer.steps


async def _open_feed(
    gateway: GatewayClient, goal: TrainingGoal, state: TrainerState, note: Callable[[str], None]
) -> Feed:
    config = goal.feed_config()
    form: FeedForm = "tree" if goal.settings.prefix_tree else "rows"
    if goal.feed is None and await _is_without_masks(gateway, goal.feed_name, config):
        config = msgspec.structs.replace(config, side=msgspec.UNSET)
        note(
            "the feed of this run was created without sampling masks, so turns with top-p, top-k or min-p are still not trained; "
            "to train such turns, start a new run with another --out folder"
        )
    try:
        return await Feed.open(gateway, goal.feed_name, config, after=state.number, mark=state.mark, form=form)
    except OtherFeed:
        raise ConfigError(
            f"data: the checkpoint is at step {state.step}, but its run is not recorded in this store; "
            "pass the --data of that run, or choose another --out folder",
            param="data",
        ) from None
    except RequestRejected as error:
        if error.answered != Conflict.status:
            raise
        if error.param == "after":
            raise ConfigError(
                f"data: {error.message.removeprefix('gateway: ')}. In trainer.json in the checkpoint of step "
                f"{state.step}, set 'number' to this value of 'after', and 'mark' to this mark",
                param="data",
            ) from None
        old = msgspec.structs.asdict((await gateway.show_feed(goal.feed_name)).config)
        new = msgspec.structs.asdict(config)
        changes = "; ".join(f"{name} was {old[name]} and is now {new[name]}" for name in new if old[name] != new[name])
        raise ConfigError(
            f"data: a training run with different settings is recorded in this store ({changes}); use that run's settings, "
            "or choose another --out folder (and, if you pass --data, another --data)",
            param="data",
        ) from None


async def _is_without_masks(gateway: GatewayClient, name: str, config: FeedConfig) -> bool:
    """Return whether the feed already exists and differs from `config` only in that it delivers no side data."""
    if config.side is msgspec.UNSET:
        return False
    try:
        existing = (await gateway.show_feed(name)).config
    except RequestRejected as error:
        if error.answered != NotFound.status:
            raise
        return False
    return existing == msgspec.structs.replace(config, side=msgspec.UNSET)


async def _finish(
    running: asyncio.Task[BatchResult], training: asyncio.Task[list[Step]], trainer: Trainer, feed: Feed
) -> None:
    """Wait for the agents and the training to end, and write a checkpoint even if training failed."""
    await asyncio.gather(running, training, return_exceptions=True)
    with suppress(TurngateError):  # the previous checkpoint remains
        await trainer.save(feed)


async def _wait_for_groups(
    gateway: GatewayClient, trainer: Trainer, training: asyncio.Task[list[Step]], goal: TrainingGoal
) -> None:
    """After all agents have ended, check that the feed has enough groups for the remaining steps.

    If it does not, wait until too few groups are left for another step, then raise an error.
    """
    newest = (await gateway.show_feed(goal.feed_name)).newest
    per_step = goal.settings.groups
    missing = (goal.steps - trainer.state.step) * per_step - (newest - trainer.state.number)
    while missing > 0 and not training.done():
        if newest - trainer.state.number < per_step:  # not enough groups for another step
            raise TurngateError(
                f"training stopped after {trainer.state.step} of {goal.steps} steps: all agents have ended, but the feed received too "
                f"few groups for the remaining steps (missing groups: {missing}); see the outcomes in the run folder"
            )
        await asyncio.wait({training}, timeout=_POLL_S)


class _StepClock:
    """Measures the duration of each step, by activity."""

    def __init__(self, engine: TimedEngine) -> None:
        self._engine = engine
        self._at, self._own = time.monotonic(), time.thread_time()
        self._busy = engine.measure_busy(self._at)

    def lap(self, step: Step) -> StepTime:
        at, own = time.monotonic(), time.thread_time()
        busy = self._engine.measure_busy(at)
        shares = StepTime(
            whole=at - self._at,
            training=step.seconds["train"],
            sampling=busy - self._busy,
            turngate=own - self._own,
        )
        self._at, self._busy, self._own = at, busy, own
        return shares
