"""GRPO over a feed, with the weights that the in-process engine samples from. Small on purpose: the reference for trainer authors.

    deliveries of the feed → rows → log-probabilities again, compared with the recorded ones → loss (`loss.py`) → gradients
    → fence up → one step of the optimizer → fence down at version n + 1 → checkpoint → commit

`Learner` computes and knows nothing of gateways. `Trainer` is the loop around it. Called by `training.py`, and by whoever has a gateway,
a `LocalEngine` behind it, and a feed.

Whatever is killed when: the weights of a checkpoint and the number in it belong together, and a trainer goes on past that number. What was
trained after the checkpoint is lost with the weights it was in, and its deliveries are read again. A version of the policy never
stands for two sets of weights: a trainer that comes back with older ones than the gateway has seen takes a new number.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from turngate.client.feed import Delivery, Feed, Row
from turngate.client.gateway import GatewayClient
from turngate.common.aio import run_to_completion
from turngate.engines.local import LocalEngine, Model
from turngate.engines.local.model import Attend
from turngate.errors import ConfigError, TurngateError
from turngate.trainers.local import checkpoint
from turngate.trainers.local.checkpoint import State
from turngate.trainers.local.loss import Normalise, Terms, clipped_share, divergence, divisor, loss

_MANY = 0.5  # share of compared rows that differ, from which on it is not the rows
# How far, in nats, a token of other weights may be from what it was recorded with. A few versions of clipped updates move one by a few
# nats. Beyond 20, either it was next to impossible when it was drawn (one in 5·10⁸): the record is damaged. Or it has become so since:
# its ratio is as good as 0, and nothing would be learnt from it.
_FURTHEST = 20.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How is learnt."""

    groups: int = 2  # deliveries that make one update
    learning_rate: float = 3e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_low: float = 0.2  # a ratio is clipped below 1 - this where the advantage is negative
    clip_high: float = 0.28  # and above 1 + this where it is positive
    largest_gradient: float = 1.0  # norm of all gradients; more is scaled down to it
    normalise: Normalise = "token"
    temperature: float = 1.0  # with which the sessions sample: log-probabilities are those of what was really drawn
    batch_tokens: int = 2048  # computed at once; what rows begin with alike counts once
    tolerance: float = (
        0.05  # of a token's log-probability, recomputed beside recorded; a row with a token beyond it is refused
    )

    def __post_init__(self) -> None:
        for name in ("groups", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} must be at least 1", param=name)
        for name in ("learning_rate", "largest_gradient", "temperature", "tolerance"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} must be more than 0", param=name)


class NotTheSame(TurngateError):
    """What is recomputed is not what was recorded, and not for single rows: something is set up wrongly."""

    kind = "logprobs_differ"


class NotFinite(TurngateError):
    """The gradients have no finite norm: a step along them would leave no weights. None was made."""

    kind = "gradient_not_finite"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over the rows of an update."""

    rows: int
    tokens: int  # trained ones
    loss: float
    entropy: float  # of the policy at the sampled places, in nats
    divergence: float  # of the present policy from the one that sampled, per token
    clipped: float  # share of tokens
    compared: int  # rows that were sampled with exactly these weights
    difference: (
        float | None
    )  # mean absolute difference of their log-probabilities, recomputed and recorded; None: none was compared
    largest: float | None
    refused: tuple[str, ...]  # rows that were left out since they differ, of these weights or of others, in words
    signal: bool  # some advantage is not 0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One update, or what would have been one had there been anything to learn from."""

    step: int
    version: int  # that came of it
    first: int  # numbers of its deliveries
    last: int
    reward: float | None  # mean over its rollouts that have one
    rewards: tuple[float, ...]
    passed: float | None  # share of them that resolved their task
    excluded: int
    why: tuple[str, ...] = ()  # the reasons, each once
    stale: int  # versions that the oldest row is behind
    measured: Measured
    gradient: float  # norm, before it is scaled
    seconds: dict[str, float]  # wait: for deliveries; train: rows to new weights; save
    sampled_tokens: int


class Learner:
    """A model and its optimizer. Plain, blocking computation."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self.model = model
        self.settings = settings
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            foreach=True,
        )

    def gradients(self, rows: Sequence[Row], version: int) -> Measured:
        """Leaves the gradients of the loss over these rows in the parameters. `version`: of the weights as they are now.

        Where they are not finite it leaves none: `NotFinite`."""
        settings, tally = self.settings, _Tally()
        self.optimizer.zero_grad(set_to_none=True)
        weights, tokens = [row.weight for row in rows], [int(row.mask.sum()) for row in rows]
        by = divisor(weights, tokens, settings.normalise)
        # Rows without an advantage are compared, but there is nothing to go back through.
        for silent in (False, True):
            chosen = [row for row in rows if (row.advantage == 0) == silent]
            for batch in batches(chosen, settings.batch_tokens):
                with torch.set_grad_enabled(not silent):
                    self._pass(batch, version, by, tally)
        measured = tally.measured(rows, sum(tokens))
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]))
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NotFinite(f"the norm of the gradients is {norm}")
        return measured

    def step(self) -> float:
        """One step along the gradients. Their norm."""
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.settings.largest_gradient, error_if_nonfinite=True
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def logprobs(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Of the trained tokens of all rows, one after the other: log-probabilities under the present weights, and entropies."""
        device, pack = self.model.device, packed(rows)
        ids, positions, at = (torch.from_numpy(x).to(device) for x in (pack.ids, pack.positions, pack.at))
        hidden = self.model.run(ids[None], positions, _seeing(torch.from_numpy(pack.sees).to(device)))
        scores = self.model.scores(hidden[0, at]).float() / self.settings.temperature
        likely = torch.log_softmax(scores, dim=-1)
        drawn = torch.from_numpy(np.concatenate([row.ids[row.mask] for row in rows]).astype(np.int64)).to(device)
        with torch.no_grad():
            entropy = -(likely.exp() * likely).sum(dim=-1)
        return likely.gather(-1, drawn[:, None])[:, 0], entropy

    def _pass(self, rows: Sequence[Row], version: int, by: float, tally: _Tally) -> None:
        settings, device = self.settings, self.model.device
        now, entropy = self.logprobs(rows)
        counts = np.array([int(row.mask.sum()) for row in rows])
        place = np.repeat(np.arange(len(rows)), counts)
        then = torch.from_numpy(np.concatenate([row.logprobs[row.mask] for row in rows])).to(device)
        apart = (now.detach() - then).abs().cpu().numpy()
        kept = np.ones(len(rows), np.bool_)
        for n, row in enumerate(rows):
            own, same = apart[place == n], of_version(row, version)
            if same:
                tally.compared.append(own)
            if not own.max() <= (settings.tolerance if same else _FURTHEST):  # also where it is not a number
                kept[n] = False
                why = _refused(row, own)
                if same:
                    tally.differ.append(why)
                else:
                    why += ", more than the age of its weights explains"
                tally.refused.append(why)
        use = torch.from_numpy(kept[place]).to(device)
        terms = Terms(
            now=now[use],
            then=then[use],
            advantage=_spread([row.advantage for row in rows], place, device)[use],
            weight=_spread([row.weight for row in rows], place, device)[use],
            row=torch.from_numpy(place).to(device)[use],
        )
        low, high = settings.clip_low, settings.clip_high
        value = loss(
            terms,
            torch.from_numpy(counts).to(device),
            by=by,
            low=low,
            high=high,
            normalise=settings.normalise,
        )
        if value.requires_grad and bool(use.any()):
            value.backward()
            tally.signal = True
        size = int(use.sum())
        if size:
            tally.loss += float(value.detach())
            tally.tokens += size
            tally.entropy += float(entropy[use].sum())
            tally.divergence += float(divergence(terms.now, terms.then).sum())
            tally.clipped += size * float(clipped_share(terms, low=low, high=high))


class _Tally:
    """What the passes over an update's rows add up to."""

    def __init__(self) -> None:
        self.loss = self.entropy = self.divergence = self.clipped = 0.0
        self.tokens = 0
        self.signal = False
        self.compared: list[np.ndarray] = []
        self.differ: list[str] = []  # the refused ones of those that were compared
        self.refused: list[str] = []

    def measured(self, rows: Sequence[Row], tokens: int) -> Measured:
        if len(self.compared) > 1 and len(self.differ) > _MANY * len(self.compared):
            raise NotTheSame(
                f"{len(self.differ)} of {len(self.compared)} rows have other log-probabilities than were recorded when they were sampled, "
                f"with the same weights ({self.differ[0]}); does the trainer's temperature equal the sessions', and does the engine "
                "behind the gateway sample from this model?"
            )
        apart = np.concatenate(self.compared) if self.compared else None
        count = max(1, self.tokens)
        return Measured(
            rows=len(rows),
            tokens=tokens,
            loss=self.loss,
            entropy=self.entropy / count,
            divergence=self.divergence / count,
            clipped=self.clipped / count,
            compared=len(self.compared),
            difference=None if apart is None else float(apart.mean()),
            largest=None if apart is None else float(apart.max()),
            refused=tuple(self.refused),
            signal=self.signal,
        )


def of_version(row: Row, version: int) -> bool:
    """Whether all that is trained of it was sampled with these weights."""
    return all(span.version_start == span.version_end == version for span in row.spans if span.trained)


class Packed(msgspec.Struct, frozen=True):
    """Rows in one line of tokens: what all of them begin with, once, then what is left of each. Rollouts of one task begin alike."""

    ids: np.ndarray
    positions: np.ndarray
    sees: np.ndarray  # (token, token), bool: who sees whom
    at: np.ndarray  # where the scores of the trained tokens are: at the place before each


def packed(rows: Sequence[Row]) -> Packed:
    shared = beginning(rows)
    rests = [row.ids.size - shared for row in rows]
    owner = np.repeat(np.arange(len(rows) + 1), [shared, *rests])  # 0: what is shared
    starts = shared + np.cumsum([0, *rests[:-1]])
    place = np.arange(owner.size)
    same = (owner[:, None] == owner[None, :]) | (owner == 0)[None, :]
    return Packed(
        ids=np.concatenate([rows[0].ids[:shared], *(row.ids[shared:] for row in rows)]).astype(np.int64),
        positions=np.concatenate([place[:shared], *(np.arange(shared, row.ids.size) for row in rows)]),
        sees=same & (place[:, None] >= place[None, :]),
        at=np.concatenate(
            [np.flatnonzero(row.mask) - shared + start - 1 for row, start in zip(rows, starts, strict=True)]
        ),
    )


def beginning(rows: Sequence[Row]) -> int:
    """How many tokens all of these rows begin with. The place before a row's first trained token is always its own."""
    most = min(int(row.mask.argmax()) for row in rows) - 1
    apart = np.zeros(max(0, most), np.bool_)
    for row in rows[1:]:
        apart |= row.ids[: apart.size] != rows[0].ids[: apart.size]
    return int(apart.argmax()) if apart.any() else apart.size


def batches(rows: Sequence[Row], tokens: int) -> Iterator[list[Row]]:
    """Rows that follow each other, each batch with at most so many tokens once packed; a longer row is alone."""
    batch: list[Row] = []
    for row in rows:
        more = [*batch, row]
        shared = beginning(more)
        if batch and shared + sum(one.ids.size - shared for one in more) > tokens:
            yield batch
            more = [row]
        batch = more
    if batch:
        yield batch


def _seeing(sees: Tensor) -> Attend:
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True).transpose(1, 2)

    return attend


def _spread(values: list[float], place: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values, np.float32)[place]).to(device)


def _refused(row: Row, apart: np.ndarray) -> str:
    worst = int(apart.argmax())  # what is not a number counts as the largest
    place = int(np.flatnonzero(row.mask)[worst])
    return f"branch {row.branch}: token {place} differs by {apart[worst]:.3g}"


class Trainer:
    """The loop. `engine` is the one behind the gateway, and its model is what is trained.

        async with await Feed.open(gateway, "name", FeedConfig(n=8), after=trainer.state.number, mark=trainer.state.mark) as feed:
            await trainer.run(feed, steps=20)

    `folder` is where its checkpoints are; the newest one there is gone on from, weights included, but with these settings. None: it keeps
    none, and commits after every step. `every`: steps between checkpoints; the last step always has one.
    """

    def __init__(
        self,
        engine: LocalEngine,
        gateway: GatewayClient,
        settings: Settings,
        *,
        folder: Path | None = None,
        source: str | Path | None = None,
        every: int = 1,
        watch: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self.engine = engine
        self.learner = Learner(engine.model, settings)
        self.state = State()
        self.steps: list[Step] = []
        self.earlier_rate: float | None = None  # the learning rate that the checkpoint it goes on from was made with
        self._gateway = gateway
        self._settings = settings
        self._folder = folder
        self._source = source
        self._every = every
        self._watch = watch
        self._saved = 0  # the step of the newest checkpoint

    async def restore(self) -> None:
        """Go on from the newest checkpoint, if there is one, and let the gateway know which version these weights are."""
        found = None if self._folder is None else await asyncio.to_thread(checkpoint.newest, self._folder)
        state = self.state if found is None else found.state
        present = (await self._gateway.fence())["version"]
        version = state.version
        if present > version:  # what was sampled since came from weights that are lost, unless nobody keeps any
            version = present if self._folder is None else present + 1
        if found is not None:
            async with self.engine.updating(version):
                self.earlier_rate = await asyncio.to_thread(found.restore, self.engine.model, self.learner.optimizer)
            self.steps = [msgspec.convert(one, Step, strict=False) for one in found.state.history]
            self._saved = found.state.step
        self.state = msgspec.structs.replace(state, version=version)
        await self._gateway.resume(version)

    async def run(self, feed: Feed, steps: int) -> list[Step]:
        """Until so many steps are done in all."""
        while self.state.step < steps:
            began = time.monotonic()
            deliveries = [await _next(feed) for _ in range(self._settings.groups)]
            waited = time.monotonic() - began
            # Not half of it: new weights without their number would be trained on the same rows again.
            await run_to_completion(self._update(deliveries, waited, feed, last=self.state.step + 1 >= steps))
        return self.steps

    async def _update(self, deliveries: Sequence[Delivery], waited: float, feed: Feed, *, last: bool) -> None:
        began = time.monotonic()
        rows = [row for delivery in deliveries for row in delivery.rows()]
        version, gradient = self.state.version, 0.0
        stale = max((version - span.version_start for row in rows for span in row.spans if span.trained), default=0)
        number = deliveries[-1].number
        step = self.state.step + 1
        try:
            measured = await asyncio.to_thread(self.learner.gradients, rows, version)
        except NotFinite as error:  # before the fence is up: nothing waits, and nothing is committed
            raise NotFinite(
                f"step {step} was not made: {error.message}; the weights are those of step {self.state.step}, and deliveries "
                f"{deliveries[0].number} to {number} of feed {feed.name} are not trained: whoever goes on reads them again"
            ) from None
        if measured.signal:
            version += 1
            await self._gateway.pause("hold")
            # The engine says which tokens the new weights drew: a call in flight goes on before the fence is down.
            async with self.engine.updating(version):
                gradient = await asyncio.to_thread(self.learner.step)
            await self._gateway.resume(version)
        trained = time.monotonic() - began
        rolled = [rolled for delivery in deliveries for rolled in delivery.rollouts]
        rewards = tuple(one.reward for one in rolled if one.reward is not None)
        resolved = [
            one.reward >= 1 if one.resolved is None else one.resolved for one in rolled if one.reward is not None
        ]
        done = Step(
            step=step,
            version=version,
            first=deliveries[0].number,
            last=number,
            reward=sum(rewards) / len(rewards) if rewards else None,
            rewards=rewards,
            passed=sum(resolved) / len(resolved) if resolved else None,
            excluded=sum(1 for one in rolled if one.excluded),
            why=tuple(sorted({one.excluded for one in rolled if one.excluded})),
            stale=stale,
            measured=measured,
            gradient=gradient,
            seconds={"wait": waited, "train": trained},
            sampled_tokens=sum(one.sampled_tokens for one in rolled),
        )
        self.state = State(
            step=step,
            number=number,
            mark=feed.mark,
            version=version,
            history=(*self.state.history, msgspec.to_builtins(done)),
        )
        self.steps.append(done)
        self._watch(done)
        if self._folder is None:
            await feed.commit(number)
        elif last or step - self._saved >= self._every:
            await self.save(feed)

    async def save(self, feed: Feed) -> None:
        """A checkpoint of what there is, unless there is one already. Not while a step is being made."""
        if self._folder is None or self.state.step == self._saved:
            return
        await asyncio.to_thread(
            checkpoint.write, self._folder, self.state, self.engine.model, self.learner.optimizer, self._source
        )
        self._saved = self.state.step
        await feed.commit(self.state.number)


async def _next(feed: Feed) -> Delivery:
    async for delivery in feed:
        return delivery
    raise TurngateError(f"feed {feed.name} was closed while its trainer waits for more")
