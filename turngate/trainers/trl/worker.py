"""`TurngateWorker`: what TRL's `AsyncGRPOTrainer` takes for its rollout worker.

    worker = TurngateWorker(WorkerConfig(gateway=url, feed="swe", choices=FeedConfig(n=8, max_staleness=4), plan=plan))
    trainer = CheckpointedTrainer(model, args=…, train_dataset=…, rollout_worker=worker)

It follows a feed, and turns each delivery into TRL's rows. With a `plan` it also runs the rollouts that fill the feed, in an event
loop of its own; without one somebody else does (`turngate batch --rounds …`, on this machine or another). Either way the rows come
from the gateway, so that what is trained is what is stored. `start` and `stop` are TRL's, once each; after `stop` no thread, sandbox or
open session is left.
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
from turngate.common.loop_thread import LoopThread
from turngate.errors import ConfigError, TurngateError
from turngate.rollout.batch import Batch
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.ledger import FinishedRollout
from turngate.rollout.plan import BatchPlan
from turngate.trainers.trl.retry import patiently
from turngate.trainers.trl.rows import Buffer, Dropped, RowName, Weigh, items
from turngate.trainers.trl.throttle import Pace

STATE = "turngate.json"  # in a checkpoint of TRL's, before anything else of it
LAST = "trainer_state.json"  # of what a checkpoint needs, this is written last
_BEAT_S = 1.0
_WAIT_S = (
    2.0  # that one question for a delivery waits: no longer than it may take to see that the plan is done, or to stop
)
_FEWEST_BARREN = 20  # rollouts in a row without a reward, before a plan is given up
_OVER = "it was stopped, and is for one run; for another one make a worker and a trainer anew, with its `checkpoint`"
_METRICS = 4096  # that wait to be logged; more are dropped
Metric = float | tuple[float, float]  # a tuple: a rate, as TRL has it
Positive = Annotated[int, msgspec.Meta(ge=1)]


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the rows come from, and how far ahead of the trainer."""

    gateway: str  # its URL
    feed: str
    choices: FeedConfig  # group size, advantages, staleness, what becomes of rollouts that were cut short; `groups`: left empty, the plan's
    plan: BatchPlan | None = None  # what to run; None: somebody else runs it
    ahead: Positive = 2  # groups that may have begun and of which the trainer has not taken every row
    rows_ahead: Positive = 256  # rows that may wait for the trainer, before the next delivery is asked for
    longest_row: Positive | None = None  # tokens that the trainer has memory for; longer rows are left out, and counted
    temperature: float = (
        1.0  # the trainer's, pinned in every session of the plan: its log-probabilities are compared with theirs
    )
    weigh: Weigh = "tokens"  # what counts the same: each trained token, or each rollout of a group
    adapter: str = ""  # where TRL publishes LoRA adapters (as "trl-policy-v7"), the name before the "-v"
    public_url: str = ""  # how remote sandboxes get to the gateway
    tunnel: str = ""

    def __post_init__(self) -> None:
        if self.plan is not None and self.plan.n != self.choices.n:
            raise ConfigError(
                f"plan: it runs {self.plan.n} rollouts of each task, but a group of the feed has {self.choices.n}; make them equal",
                param="plan",
            )
        if self.plan is not None and self.choices.groups and not f"{self.plan.name}.".startswith(self.choices.groups):
            begin = f"begin with {self.plan.name + '.'!r}" if self.plan.name else "begin with no name of yours"
            raise ConfigError(
                f"plan: its groups {begin}, but the feed takes only those that begin with {self.choices.groups!r}; "
                "leave `groups` empty, or give the plan a `name` that begins so",
                param="plan",
            )
        pinned = None if self.plan is None else self.plan.session.get("sampling", {}).get("temperature")
        if pinned is not None and pinned != self.temperature:
            raise ConfigError(
                f"temperature: the plan's sessions have {pinned:g}, the trainer {self.temperature:g}; make them equal",
                param="temperature",
            )
        for name in ("ahead", "rows_ahead", "longest_row"):  # structs that Python code makes are not checked by msgspec
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {value} must be at least 1", param=name)

    def named(self) -> WorkerConfig:
        """With a feed that takes this plan's groups and no others, where it was not said which it takes. A plan without a name is called
        as the feed."""
        if self.plan is None or self.choices.groups:
            return self
        plan = self.plan
        if not plan.name:
            plan = msgspec.structs.replace(plan, name=self.feed.replace(":", "-")[:64])
        choices = msgspec.structs.replace(self.choices, groups=f"{plan.name}.")
        return msgspec.structs.replace(self, plan=plan, choices=choices)


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says about the feed."""

    feed: str
    mark: str = ""  # of that very feed, and of none that is opened under its name later
    delivery: int  # up to which all is trained
    rows: dict[int, list[RowName]] = {}  # of deliveries past it, those that are


class TurngateWorker:
    """`admin_key`: the gateway's; left out, from `TURNGATE_ADMIN_KEY`. `checkpoint`: the folder that training goes on from, as
    `CheckpointedTrainer` wrote it; left out, it goes on after what the feed has as committed. For one run of a trainer."""

    def __init__(self, config: WorkerConfig, *, admin_key: str = "", checkpoint: Path | None = None) -> None:
        self.config = config = config.named()
        self.checkpoint = checkpoint
        self._key = admin_key or read_admin_key()
        self._from = None if checkpoint is None else _read(checkpoint, config.feed)
        self._thread = LoopThread("turngate-worker")
        self._gateway: GatewayClient | None = None
        self._feed: Feed | None = None
        self._work: concurrent.futures.Future[None] | None = None
        self._mark = "" if self._from is None else self._from.mark  # of the feed
        self._over = False  # it was started, and stopped
        self._pace: Pace | None = None
        self._base: int | None = None  # TRL's version 0, as the gateway counts
        self._seen = 0.0  # when the loop was last known to turn
        self._room = asyncio.Event()  # a row was taken
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ran_out = ""  # why no more deliveries will come
        self._dry = False  # and none is left
        self.rollout_buffer = Buffer(self._on_taken, self._on_dropped)
        self.rollout_buffer.bound = config.choices.max_staleness
        self.metrics_queue: queue.Queue[dict[str, Metric]] = queue.Queue(_METRICS)

    # ── what TRL calls ──────────────────────────────────────────────────────────────────────────────────────────

    def update_model_version(self, model_version: int) -> None:
        """The gateway's turns are of this version from now on. TRL calls it once before `start`."""
        self._check_not_over()
        self._thread.start()
        self._thread.run(self._raised(model_version))
        self.rollout_buffer.version = model_version

    def start(self) -> None:
        """Returns when the feed is open: what is wrong with it, or with the gateway, is told here."""
        self._check_not_over()
        if self._work is not None:
            return
        self._thread.start()
        self._thread.run(self._opened())
        self._seen = time.monotonic()
        self._work = self._thread.spawn(self._worked())

    def stop(self) -> None:
        """Agents that run are ended, their sandboxes removed, their sessions closed. As often as one likes."""
        if not self._thread.is_running:
            return
        self._over = self._over or self._work is not None
        try:
            self._thread.run(self._closed())
        finally:
            self._thread.stop()
            self._work = self._gateway = self._feed = None
            self.rollout_buffer.discard()

    def check_health(self, stale_after_s: float) -> None:
        """TRL asks whenever it waits for a row in vain."""
        work = self._work
        if work is None:
            raise RuntimeError(f"the rollout worker is not running: {_OVER if self._over else 'it was not started'}")
        if work.done():
            error = None if work.cancelled() else work.exception()
            raise RuntimeError(f"the rollout worker has failed: {_told(error)}") from error
        silent = time.monotonic() - self._seen
        if silent > stale_after_s:
            raise RuntimeError(
                f"the rollout worker has not been heard of for {silent:.0f} s; something blocks its loop"
            )
        if self._dry and not self.rollout_buffer.qsize():
            raise RuntimeError(f"no more rows will come: {self._ran_out}")

    def _check_not_over(self) -> None:
        """Of what a trainer was given, nobody knows later whether it is in the weights that another one begins with."""
        if self._over:
            raise ConfigError(f"rollout_worker: {_OVER}", param="rollout_worker")

    # ── what `CheckpointedTrainer` calls ────────────────────────────────────────────────────────────────────────

    def state(self) -> State:
        delivery, rows = self.rollout_buffer.state()
        return State(feed=self.config.feed, mark=self._mark, delivery=delivery, rows=rows)

    def commit(self, delivery: int) -> None:
        """All up to it is in a checkpoint that is on disk."""
        feed = self._feed
        if feed is not None and delivery > feed.committed:
            self._thread.run(patiently(lambda: feed.commit(delivery)))

    # ── in the loop ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _client(self) -> GatewayClient:
        if self._gateway is None:
            self._loop, self._room = asyncio.get_running_loop(), asyncio.Event()
            self._gateway = await GatewayClient(self.config.gateway, self._key).__aenter__()
        return self._gateway

    async def _raised(self, model_version: int) -> None:
        """The gateway may have counted further than TRL, which begins anew each time that it is started."""
        gateway = await self._client()
        now = int((await patiently(gateway.fence))["version"])
        named = f"{self.config.adapter}-v{model_version}" if self.config.adapter else None
        if self._base is None:  # whole weights are sent inside a fence, which has counted them; an adapter is news
            self._base = max(0, now - model_version + (named is not None))
        target = self._base + model_version
        if now < target:
            await patiently(lambda: gateway.resume(target, named))

    async def _opened(self) -> None:
        gateway, config = await self._client(), self.config
        after = None if self._from is None else self._from.delivery
        mark = self._mark
        self._feed = await patiently(lambda: Feed.open(gateway, config.feed, config.choices, after=after, mark=mark))
        self._mark = self._feed.mark
        begun = self._feed.committed if after is None else after
        self.rollout_buffer.begin(begun)
        if config.plan is not None:
            newest = (await patiently(lambda: gateway.show_feed(config.feed))).newest
            self._pace = Pace(self, n=config.plan.n, ahead=config.ahead, newest=newest)

    async def _closed(self) -> None:
        work = asyncio.all_tasks() - {asyncio.current_task()}
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        if self._gateway is not None:
            await self._gateway.__aexit__(None, None, None)

    async def _worked(self) -> None:
        plan = self.config.plan
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat())
            tasks.create_task(self._follow())
            if plan is not None and self._pace is not None:
                tasks.create_task(self._run(plan, self._pace))

    async def _beat(self) -> None:
        while True:
            self._seen = time.monotonic()
            await asyncio.sleep(_BEAT_S)

    async def _follow(self) -> None:
        """Deliveries into the buffer, no more than the trainer will soon take: how old a row is, is judged when it is asked for."""
        assert self._feed is not None
        while True:
            while self.rollout_buffer.qsize() >= self.config.rows_ahead:
                await self.row_taken()
            over = bool(self._ran_out)
            delivery = await self._feed.next(_WAIT_S)
            if delivery is not None:
                self._add(delivery)
                self._room.set()  # one without rows is taken at once
            elif over:
                self._dry = True

    def _add(self, delivery: Delivery) -> None:
        config, before = self.config, self._from
        trained = [] if before is None else before.rows.get(delivery.number, [])
        made = items(delivery, self._base or 0, weigh=config.weigh, longest=config.longest_row)
        self.rollout_buffer.add(
            delivery.number, tuple(item for item in made.items if item.name not in trained), trained
        )
        if self._pace is not None:
            self._pace.delivered(delivery.number, delivery.group)
        self._tell(_metrics(delivery, made.too_long))

    async def _run(self, plan: BatchPlan, pace: Pace) -> None:
        """The rollouts, at the trainer's pace."""
        gateway, config = await self._client(), self.config
        async with GatewayConnector(gateway.url, config.public_url, config.tunnel) as connector:
            sampling = {"temperature": config.temperature, **plan.session.get("sampling", {})}
            pinned = msgspec.structs.replace(plan, session={**plan.session, "sampling": sampling})
            fruits = _Fruits(plan)

            def tell(finished: FinishedRollout) -> None:
                pace.finished(finished)
                fruits(finished)

            result = await Batch(pinned, gateway, connector, throttle=pace, tell=tell).run()
        told = f"{len(result.finished)} of {plan.total} rollouts are finished"
        self._ran_out = result.stopped or f"{told}, which are all rounds of the plan; raise `rounds`"

    @property
    def consumed(self) -> int:
        return self.rollout_buffer.consumed

    async def row_taken(self) -> None:
        """Until the trainer has taken a row, or a while has passed."""
        self._room.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_BEAT_S):
                await self._room.wait()

    # ── from the trainer's thread ───────────────────────────────────────────────────────────────────────────────

    def _on_taken(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed, and nobody waits in it
                self._loop.call_soon_threadsafe(self._room.set)

    def _on_dropped(self, why: Dropped) -> None:
        self._tell({f"sample/dropped_{why}_total": 1.0})

    def _tell(self, metrics: dict[str, Metric]) -> None:
        with suppress(queue.Full):  # training does not wait for its logs
            self.metrics_queue.put_nowait(metrics)


class Fruitless(TurngateError):
    """Rollout after rollout, and nothing that could be trained: a plan of many rounds would go on so for days."""

    kind = "fruitless"


class _Fruits:
    """Told of every rollout that is finished. Stops a plan whose tasks can all not be graded."""

    def __init__(self, plan: BatchPlan) -> None:
        self._most = max(_FEWEST_BARREN, 2 * plan.n * len(plan.tasks))
        self._barren = 0

    def __call__(self, finished: FinishedRollout) -> None:
        self._barren = 0 if finished.reward is not None else self._barren + 1
        if self._barren >= self._most:
            raise Fruitless(
                f"the last {self._barren} rollouts have no reward, {finished.rollout} because: {finished.message}"
            )


def _metrics(delivery: Delivery, too_long: int) -> dict[str, Metric]:
    """Per rollout, under TRL's own names where it has one. A rate is a sum and how many it is of."""
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


def _told(error: BaseException | None) -> str:
    """The first of what went wrong at once."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "it was stopped" if error is None else f"{type(error).__name__}: {error}"


def _read(checkpoint: Path, feed: str) -> State:
    """Only from a checkpoint that is whole: what its weights were trained on is not known otherwise."""
    file = checkpoint / STATE
    if not file.is_file():
        raise ConfigError(
            f"checkpoint: {checkpoint} has no {STATE}, so nobody knows which rows are in its weights: no `CheckpointedTrainer` wrote it. "
            "Resume one that has; or leave `checkpoint` out, and the worker goes on after what the feed has as committed",
            param="checkpoint",
        )
    if not (checkpoint / LAST).is_file():
        raise ConfigError(
            f"checkpoint: {checkpoint} has no {LAST}: its trainer was ended before it was written whole; resume the one before it",
            param="checkpoint",
        )
    try:
        state = msgspec.json.decode(file.read_bytes(), type=State)
    except msgspec.DecodeError as error:
        raise ConfigError(f"checkpoint: {file} cannot be read ({error})", param="checkpoint") from None
    if state.feed != feed:
        raise ConfigError(
            f"checkpoint: {checkpoint} was trained on the feed {state.feed!r}, not {feed!r}", param="checkpoint"
        )
    return state
