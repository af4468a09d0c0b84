"""`TurngateWorker`, a rollout worker for TRL's `AsyncGRPOTrainer`.

    worker = TurngateWorker(WorkerConfig(gateway=url, feed="swe", choices=FeedConfig(n=8, max_staleness=4), plan=plan))
    trainer = CheckpointedTrainer(model, args=…, train_dataset=…, rollout_worker=worker)

The worker follows a feed and converts each delivery to TRL's rows. With a `plan`, it also runs the rollouts that fill the feed, in its own
event loop. Without one, another process runs them (`turngate batch --rounds …`). In both cases the rows are fetched from the gateway, so
the trainer uses exactly what is stored. TRL calls `start` and `stop` once each. After `stop`, no thread, sandbox or open session remains.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from turngate.client.feed import Delivery, Feed, FeedConfig
from turngate.client.gateway import GatewayClient
from turngate.client.keys import read_admin_key
from turngate.client.retry import retry_while_unreachable
from turngate.common.loop_thread import LoopThread
from turngate.errors import ConfigError, TurngateError
from turngate.rollout.batch import Batch
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.ledger import FinishedRollout
from turngate.rollout.plan import BatchPlan
from turngate.trainers.trl.rows import DropReason, RowBuffer, RowName, Weighting, build_items
from turngate.trainers.trl.throttle import DeliveryThrottle
from turngate.types import SAMPLING_MASK

STATE = "turngate.json"  # in TRL's checkpoint; written first
LAST = "trainer_state.json"  # in TRL's checkpoint; written last
_BEAT_S = 1.0
_WAIT_S = 2.0  # per request for a delivery; also the maximum delay in noticing a stop or the end of the plan
_MIN_UNREWARDED = 20  # consecutive rollouts without a reward before a plan fails
_ONE_RUN = "the worker was stopped, and a worker serves only one run; create a new worker and trainer, and pass `checkpoint` to resume"
_METRICS = 4096  # capacity of the queue for TRL's log; further metrics are dropped
Metric = float | tuple[float, float]  # a tuple is a rate in TRL's format: sum and count
Positive = Annotated[int, msgspec.Meta(ge=1)]


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a worker, such as the source of its rows and how far it may run ahead of the trainer."""

    gateway: str  # URL
    feed: str
    choices: FeedConfig  # group size, advantages, staleness, truncated rollouts; empty `groups` means the plan's groups
    plan: BatchPlan | None = None  # the rollouts to run; None: another process fills the feed
    ahead: Positive = 2  # maximum number of started groups with rows that the trainer has not taken
    rows_ahead: Positive = 256  # the next delivery is requested only while fewer rows are waiting
    longest_row: Positive | None = None  # in tokens; longer rows are left out and counted in a metric
    # The trainer and every session of the plan must use the same temperature, so that log-probabilities are comparable.
    temperature: float = 1.0
    weigh: Weighting = "tokens"  # whether all trained tokens or all rollouts of a group have the same weight
    adapter: str = ""  # if TRL publishes LoRA adapters (such as "trl-policy-v7"): the name before "-v"
    public_url: str = ""  # URL at which remote sandboxes can reach the gateway
    tunnel: str = ""

    def __post_init__(self) -> None:
        if self.plan is not None and self.plan.n != self.choices.n:
            raise ConfigError(
                f"plan.n is {self.plan.n}, but choices.n (the group size of the feed) is {self.choices.n}; make them equal",
                param="plan",
            )
        if self.plan is not None and self.choices.groups and not f"{self.plan.name}.".startswith(self.choices.groups):
            names = f"group names start with {self.plan.name + '.'!r}" if self.plan.name else "plan has no name"
            raise ConfigError(
                f"plan: the {names}, but the feed accepts only groups whose names start with {self.choices.groups!r}; "
                "leave `choices.groups` empty, or give the plan a `name` that matches this prefix",
                param="plan",
            )
        if SAMPLING_MASK in (self.choices.side or ()):
            raise ConfigError(
                "choices.side must not contain sampling_mask: TRL computes log-probabilities over all ids, so turns with top-p, top-k or "
                "min-p would be trained with wrong ratios; remove sampling_mask",
                param="choices",
            )
        pinned = None if self.plan is None else self.plan.session.get("sampling", {}).get("temperature")
        if pinned is not None and pinned != self.temperature:
            raise ConfigError(
                f"temperature is {self.temperature:g} in the worker, but {pinned:g} in the plan's sessions; make them equal",
                param="temperature",
            )
        for name in ("ahead", "rows_ahead", "longest_row"):  # msgspec does not check structs that Python code creates
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name!r} must be at least 1, not {value}", param=name)

    def with_defaults(self) -> WorkerConfig:
        """Return the settings. If there is a plan and `choices.groups` is empty, restrict the feed to the plan's groups.

        A plan without a name is then named after the feed.
        """
        if self.plan is None or self.choices.groups:
            return self
        plan = self.plan
        if not plan.name:
            plan = msgspec.structs.replace(plan, name=self.feed.replace(":", "-")[:64])
        choices = msgspec.structs.replace(self.choices, groups=f"{plan.name}.")
        return msgspec.structs.replace(self, plan=plan, choices=choices)


class FeedState(msgspec.Struct, frozen=True, kw_only=True):
    """The position in the feed, as stored in a checkpoint."""

    feed: str
    mark: str = ""  # identifies the feed; a recreated feed with the same name has a different mark
    delivery: int  # all deliveries up to this number are trained or dropped
    rows: dict[int, list[RowName]] = {}  # trained rows of later deliveries


class TurngateWorker:
    """A rollout worker for one run of a trainer.

    `admin_key` is the gateway's admin key, by default read from `TURNGATE_ADMIN_KEY`. `checkpoint` is a checkpoint folder of a
    `CheckpointedTrainer` to resume from. Without it, the worker starts after the committed deliveries.
    """

    def __init__(self, config: WorkerConfig, *, admin_key: str = "", checkpoint: Path | None = None) -> None:
        self.config = config = config.with_defaults()
        self.checkpoint = checkpoint
        self._key = admin_key or read_admin_key()
        self._from = None if checkpoint is None else _load_state(checkpoint, config.feed)
        self._thread = LoopThread("turngate-worker")
        self._gateway: GatewayClient | None = None
        self._feed: Feed | None = None
        self._work: concurrent.futures.Future[None] | None = None
        self._mark = "" if self._from is None else self._from.mark  # identifies the feed
        self._stopped = False  # True once the worker was started and stopped
        self._throttle: DeliveryThrottle | None = None
        self._base: int | None = None  # the gateway's version that corresponds to TRL's version 0
        self._seen = 0.0  # when the event loop last ran
        self._room = asyncio.Event()  # set when the trainer takes a row or a delivery arrives
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ran_out = ""  # why there will be no more deliveries
        self._dry = False  # True once all deliveries are read and no more will follow
        self.rollout_buffer = RowBuffer(self._on_taken, self._on_dropped)
        self.rollout_buffer.bound = config.choices.max_staleness
        self.metrics_queue: queue.Queue[dict[str, Metric]] = queue.Queue(_METRICS)

    # ── called by TRL ───────────────────────────────────────────────────────────────────────────────────────────

    def update_model_version(self, model_version: int) -> None:
        """Set the policy version of the gateway's next turns. TRL also calls this before `start`."""
        self._check_not_over()
        self._thread.start()
        self._thread.run(self._raise_version(model_version))
        self.rollout_buffer.version = model_version

    def start(self) -> None:
        """Start the worker, and return when the feed is open. Raise an error if the feed or the gateway is misconfigured."""
        self._check_not_over()
        if self._work is not None:
            return
        self._thread.start()
        self._thread.run(self._open_feed())
        self._seen = time.monotonic()
        self._work = self._thread.spawn(self._run_tasks())

    def stop(self) -> None:
        """Stop all agents, remove their sandboxes, and close their sessions. Safe to repeat."""
        if not self._thread.is_running:
            return
        self._stopped = self._stopped or self._work is not None
        try:
            self._thread.run(self._close())
        finally:
            self._thread.stop()
            self._work = self._gateway = self._feed = None
            self.rollout_buffer.discard()

    def check_health(self, stale_after_s: float) -> None:
        """Raise `RuntimeError` if the worker cannot deliver more rows. TRL calls this when no row arrives."""
        work = self._work
        if work is None:
            raise RuntimeError(
                f"the rollout worker is not running: {_ONE_RUN if self._stopped else 'it was not started'}"
            )
        if work.done():
            error = None if work.cancelled() else work.exception()
            raise RuntimeError(f"the rollout worker has failed: {_describe_error(error)}") from error
        silent = time.monotonic() - self._seen
        if silent > stale_after_s:
            raise RuntimeError(
                f"the rollout worker has not responded for {silent:.0f} s; its event loop may be blocked"
            )
        if self._dry and not self.rollout_buffer.qsize():
            raise RuntimeError(f"the rollout worker has no more rows: {self._ran_out}")

    def _check_not_over(self) -> None:
        """Raise `ConfigError` if the worker was stopped after a run.

        The worker cannot know whether a second trainer's weights were already trained on the rows of the first run.
        """
        if self._stopped:
            raise ConfigError(f"rollout_worker: {_ONE_RUN}", param="rollout_worker")

    # ── called by `CheckpointedTrainer` ─────────────────────────────────────────────────────────────────────────

    def state(self) -> FeedState:
        delivery, rows = self.rollout_buffer.state()
        return FeedState(feed=self.config.feed, mark=self._mark, delivery=delivery, rows=rows)

    def commit(self, delivery: int) -> None:
        """Commit all deliveries up to number `delivery`. A checkpoint that covers them must already be on disk."""
        feed = self._feed
        if feed is not None and delivery > feed.committed:
            self._thread.run(retry_while_unreachable(lambda: feed.commit(delivery)))

    # ── in the event loop ───────────────────────────────────────────────────────────────────────────────────────

    async def _client(self) -> GatewayClient:
        if self._gateway is None:
            self._loop, self._room = asyncio.get_running_loop(), asyncio.Event()
            self._gateway = await GatewayClient(self.config.gateway, self._key).__aenter__()
        return self._gateway

    async def _raise_version(self, model_version: int) -> None:
        """Raise the gateway's policy version to TRL's version plus `_base`, because TRL's version restarts at 0 in each run."""
        gateway = await self._client()
        now = (await retry_while_unreachable(gateway.fence)).version
        adapter = f"{self.config.adapter}-v{model_version}" if self.config.adapter else None
        if (
            self._base is None
        ):  # the gateway's version already includes full weights that TRL has sent, but not an adapter
            self._base = max(0, now - model_version + (adapter is not None))
        target = self._base + model_version
        if now < target:
            await retry_while_unreachable(lambda: gateway.resume(target, adapter))

    async def _open_feed(self) -> None:
        gateway, config = await self._client(), self.config
        after = None if self._from is None else self._from.delivery
        mark = self._mark
        self._feed = await retry_while_unreachable(
            lambda: Feed.open(gateway, config.feed, config.choices, after=after, mark=mark)
        )
        self._mark = self._feed.mark
        self.rollout_buffer.begin(self._feed.committed if after is None else after)
        if config.plan is not None:
            newest = (await retry_while_unreachable(lambda: gateway.show_feed(config.feed))).newest
            self._throttle = DeliveryThrottle(self, n=config.plan.n, ahead=config.ahead, newest=newest)

    async def _close(self) -> None:
        work = asyncio.all_tasks() - {asyncio.current_task()}
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        if self._gateway is not None:
            await self._gateway.__aexit__(None, None, None)

    async def _run_tasks(self) -> None:
        plan = self.config.plan
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat())
            tasks.create_task(self._follow())
            if plan is not None and self._throttle is not None:
                tasks.create_task(self._run(plan, self._throttle))

    async def _beat(self) -> None:
        while True:
            self._seen = time.monotonic()
            await asyncio.sleep(_BEAT_S)

    async def _follow(self) -> None:
        """Fill the buffer with deliveries, but not far ahead of the trainer, because staleness is checked when a delivery is fetched."""
        assert self._feed is not None
        while True:
            while self.rollout_buffer.qsize() >= self.config.rows_ahead:
                await self.row_taken()
            ended = bool(self._ran_out)
            delivery = await self._feed.next(_WAIT_S)
            if delivery is not None:
                self._add(delivery)
                self._room.set()  # a delivery without rows counts as taken
            elif ended:
                self._dry = True

    def _add(self, delivery: Delivery) -> None:
        config, before = self.config, self._from
        trained = [] if before is None else before.rows.get(delivery.number, [])
        built = build_items(delivery, self._base or 0, weigh=config.weigh, longest=config.longest_row)
        self.rollout_buffer.add(
            delivery.number, tuple(item for item in built.items if item.name not in trained), trained
        )
        if self._throttle is not None:
            self._throttle.record_delivery(delivery.number, delivery.group)
        self._log(_metrics(delivery, built.too_long))

    async def _run(self, plan: BatchPlan, throttle: DeliveryThrottle) -> None:
        """Run the plan's rollouts at the trainer's pace."""
        gateway, config = await self._client(), self.config
        async with GatewayConnector(gateway.url, config.public_url, config.tunnel) as connector:
            sampling = {"temperature": config.temperature, **plan.session.get("sampling", {})}
            pinned = msgspec.structs.replace(plan, session={**plan.session, "sampling": sampling})
            watch = _RewardWatch(plan)

            def on_finished(finished: FinishedRollout) -> None:
                throttle.record_finished(finished)
                watch(finished)

            result = await Batch(pinned, gateway, connector, throttle=throttle, on_finished=on_finished).run()
        progress = f"{len(result.finished)} of {plan.total} rollouts are finished"
        self._ran_out = result.stopped or f"{progress}, and the plan has no more rounds; increase `rounds`"

    @property
    def consumed(self) -> int:
        return self.rollout_buffer.consumed

    async def row_taken(self) -> None:
        """Wait until the trainer takes a row or a delivery arrives, for at most one second."""
        self._room.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_BEAT_S):
                await self._room.wait()

    # ── in the trainer's thread ─────────────────────────────────────────────────────────────────────────────────

    def _on_taken(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, so no task is waiting
                self._loop.call_soon_threadsafe(self._room.set)

    def _on_dropped(self, why: DropReason) -> None:
        self._log({f"sample/dropped_{why}_total": 1.0})

    def _log(self, metrics: dict[str, Metric]) -> None:
        with suppress(queue.Full):  # training must not wait for logging
            self.metrics_queue.put_nowait(metrics)


class NoRewards(TurngateError):
    """Many consecutive rollouts had no reward or no trained tokens, so the plan would run without training anything."""

    kind = "fruitless"


class _RewardWatch:
    """Stops a plan if too many consecutive rollouts have no reward or no trained tokens."""

    def __init__(self, plan: BatchPlan) -> None:
        self._limit = max(_MIN_UNREWARDED, 2 * plan.n * len(plan.tasks))
        self._unusable = 0

    def __call__(self, finished: FinishedRollout) -> None:
        is_usable = finished.reward is not None and finished.trained_tokens != 0
        self._unusable = 0 if is_usable else self._unusable + 1
        if self._unusable >= self._limit:
            lack = "no reward" if finished.reward is None else "no trained tokens"
            why = finished.message if finished.reward is None else "; ".join(finished.warnings)
            raise NoRewards(
                f"none of the last {self._unusable} rollouts can be trained on; {finished.rollout}, the last one, "
                f"has {lack}: {why}"
            )


def _metrics(delivery: Delivery, too_long: int) -> dict[str, Metric]:
    """Compute the metrics of a delivery, under TRL's names where TRL has them. A rate is a tuple of a sum and a count."""
    rollouts = delivery.rollouts
    known = [rolled.reward for rolled in rollouts if rolled.reward is not None]
    trained = [rolled for rolled in rollouts if rolled.advantage is not None]
    return {
        "rollout/reward_mean": (float(sum(known)), float(len(known))),
        "rollout/resolved_mean": (float(sum(bool(rolled.resolved) for rolled in rollouts)), float(len(rollouts))),
        "rollout/turns_mean": (float(sum(rolled.turns for rolled in rollouts)), float(len(rollouts))),
        "rollout/samples_per_rollout": (float(sum(len(rolled.rows) for rolled in trained)), float(len(trained))),
        "completions/mean_length": (float(sum(rolled.sampled_tokens for rolled in rollouts)), float(len(rollouts))),
        "completions/clipped_ratio": (float(sum(rolled.truncated for rolled in rollouts)), float(len(rollouts))),
        "rollout/excluded_total": float(len(rollouts) - len(trained)),
        "rollout/stale_total": float(sum(rolled.excluded.startswith("stale") for rolled in rollouts)),
        "rollout/too_long_rows_total": float(too_long),
        "rollout/delivery_max": float(delivery.number),
    }


def _describe_error(error: BaseException | None) -> str:
    """Describe an error, or the first error of an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "it was stopped" if error is None else f"{type(error).__name__}: {error}"


def _load_state(checkpoint: Path, feed: str) -> FeedState:
    """Load the feed position from a checkpoint. Raise `ConfigError` if the checkpoint is incomplete, unreadable or of a different feed."""
    file = checkpoint / STATE
    if not file.is_file():
        raise ConfigError(
            f"checkpoint: {checkpoint} has no {STATE}, so it is not a checkpoint of a `CheckpointedTrainer`, and the trained rows "
            "are unknown; resume from a checkpoint that has this file, or leave out `checkpoint` to start after the committed deliveries",
            param="checkpoint",
        )
    if not (checkpoint / LAST).is_file():
        raise ConfigError(
            f"checkpoint: {checkpoint} has no {LAST}, so it is incomplete; resume from the previous checkpoint",
            param="checkpoint",
        )
    try:
        state = msgspec.json.decode(file.read_bytes(), type=FeedState)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"checkpoint: {file} cannot be read ({error}); resume from the previous checkpoint", param="checkpoint"
        ) from None
    if state.feed != feed:
        raise ConfigError(
            f"checkpoint: {checkpoint} was trained on feed {state.feed!r}, not on {feed!r}; use a checkpoint of {feed!r}",
            param="checkpoint",
        )
    return state
