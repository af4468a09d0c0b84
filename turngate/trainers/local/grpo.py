"""GRPO over a feed, with the weights that the in-process engine samples from. Small on purpose: a reference for trainer authors.

    deliveries of the feed → rows → recompute log-probabilities and compare them with the recorded ones → loss (`loss.py`) → gradients
    → fence up → one step of the optimizer → fence down at version n + 1 → checkpoint → commit

`Learner` computes and knows nothing of gateways. `Trainer` is the loop around it. It needs a gateway, the `LocalEngine` behind it, and a
feed.

After a crash, the trainer resumes from the checkpoint's weights, after the delivery number in it. Updates since then are lost with their
weights, and their deliveries are read again. A policy version never stands for two sets of weights: a trainer that resumes with older
weights than the gateway has seen takes a new version number.
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
from turngate.trainers.local.checkpoint import TrainerState
from turngate.trainers.local.loss import (
    LossTerms,
    Normalise,
    compute_clipped_share,
    compute_divergence,
    compute_divisor,
    compute_loss,
)

_MISMATCH_SHARE = 0.5  # if more of the compared rows differ, the setup is wrong, not the rows
# Largest difference, in nats, between the recorded log-probability of a token and the one under later weights. A few clipped updates move
# it by a few nats. Beyond 20, either the token was next to impossible when it was sampled (one in 5·10⁸) and the record is damaged, or its
# ratio is practically 0 by now, and nothing would be learned from it.
_MAX_DRIFT = 20.0


class GrpoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Hyperparameters."""

    groups: int = 2  # deliveries per update
    learning_rate: float = 3e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_low: float = 0.2  # a ratio is clipped below 1 - this where the advantage is negative
    clip_high: float = 0.28  # and above 1 + this where it is positive
    largest_gradient: float = 1.0  # gradients are scaled down to this norm
    normalise: Normalise = "token"
    temperature: float = 1.0  # of the sessions: recorded log-probabilities are those of the sampled distribution
    batch_tokens: int = 2048  # per forward pass; a shared prefix counts once
    tolerance: float = (
        0.05  # between recomputed and recorded log-probabilities; a row with a larger difference is rejected
    )

    def __post_init__(self) -> None:
        for name in ("groups", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} must be at least 1", param=name)
        for name in ("learning_rate", "largest_gradient", "temperature", "tolerance"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} must be more than 0", param=name)


class LogprobMismatch(TurngateError):
    """Recomputed and recorded log-probabilities differ for many rows: the setup is wrong."""

    kind = "logprobs_differ"


class NonFiniteGradient(TurngateError):
    """The norm of the gradients is not finite. No step was made."""

    kind = "gradient_not_finite"


class UpdateMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of the rows of an update."""

    rows: int
    tokens: int  # trained ones
    loss: float
    entropy: float  # of the policy at the sampled tokens, in nats
    divergence: float  # from the sampling policy, per token
    clipped: float  # share of tokens
    compared: int  # rows sampled with exactly these weights
    difference: (
        float | None
    )  # mean absolute difference between their recomputed and recorded log-probabilities; None: none was compared
    largest: float | None
    refused: tuple[str, ...]  # rows that were left out because they differ, with the reason
    signal: bool  # whether some advantage is not 0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One update. Without a signal, the weights stay as they are."""

    step: int
    version: int  # of the policy after it
    first: int  # numbers of its deliveries
    last: int
    reward: float | None  # mean over its graded rollouts
    rewards: tuple[float, ...]
    passed: float | None  # share of graded rollouts that resolved their task
    excluded: int
    why: tuple[str, ...] = ()  # reasons for exclusion, without duplicates
    stale: int  # policy versions between the oldest row and the weights
    measured: UpdateMetrics
    gradient: float  # norm, before scaling
    seconds: dict[str, float]  # wait: for deliveries; train: rows to new weights; save
    sampled_tokens: int


class Learner:
    """A model and its optimizer. Blocking."""

    def __init__(self, model: Model, settings: GrpoSettings) -> None:
        self.model = model
        self.settings = settings
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            foreach=True,
        )

    def gradients(self, rows: Sequence[Row], version: int) -> UpdateMetrics:
        """Compute the gradients of the loss over these rows. `version`: of the present weights.

        Raises `NonFiniteGradient`, and clears the gradients, if they are not finite.
        """
        settings, totals = self.settings, _UpdateTotals()
        self.optimizer.zero_grad(set_to_none=True)
        weights, tokens = [row.weight for row in rows], [int(row.mask.sum()) for row in rows]
        by = compute_divisor(weights, tokens, settings.normalise)
        # Rows without an advantage are compared, but need no backward pass.
        for silent in (False, True):
            chosen = [row for row in rows if (row.advantage == 0) == silent]
            for batch in split_batches(chosen, settings.batch_tokens):
                with torch.set_grad_enabled(not silent):
                    self._pass(batch, version, by, totals)
        measured = totals.summarize(rows, sum(tokens))
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]))
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteGradient(f"the norm of the gradients is {norm}")
        return measured

    def step(self) -> float:
        """Make one optimizer step. Returns the norm of the gradients."""
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.settings.largest_gradient, error_if_nonfinite=True
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def logprobs(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities and entropies of the trained tokens of all rows under the present weights."""
        device, pack = self.model.device, pack_rows(rows)
        ids, positions, at = (torch.from_numpy(x).to(device) for x in (pack.ids, pack.positions, pack.at))
        hidden = self.model.run(ids[None], positions, _mask_attention(torch.from_numpy(pack.sees).to(device)))
        scores = self.model.scores(hidden[0, at]).float() / self.settings.temperature
        likely = torch.log_softmax(scores, dim=-1)
        drawn = torch.from_numpy(np.concatenate([row.ids[row.mask] for row in rows]).astype(np.int64)).to(device)
        with torch.no_grad():
            entropy = -(likely.exp() * likely).sum(dim=-1)
        return likely.gather(-1, drawn[:, None])[:, 0], entropy

    def _pass(self, rows: Sequence[Row], version: int, by: float, totals: _UpdateTotals) -> None:
        settings, device = self.settings, self.model.device
        now, entropy = self.logprobs(rows)
        counts = np.array([int(row.mask.sum()) for row in rows])
        place = np.repeat(np.arange(len(rows)), counts)
        then = torch.from_numpy(np.concatenate([row.logprobs[row.mask] for row in rows])).to(device)
        differences = (now.detach() - then).abs().cpu().numpy()
        kept = np.ones(len(rows), np.bool_)
        for n, row in enumerate(rows):
            own, same = differences[place == n], is_of_version(row, version)
            if same:
                totals.compared.append(own)
            if not own.max() <= (settings.tolerance if same else _MAX_DRIFT):  # also if it is NaN
                kept[n] = False
                why = _describe_mismatch(row, own)
                if same:
                    totals.differ.append(why)
                else:
                    why += ", which the age of its weights does not explain"
                totals.refused.append(why)
        use = torch.from_numpy(kept[place]).to(device)
        terms = LossTerms(
            now=now[use],
            then=then[use],
            advantage=_spread([row.advantage for row in rows], place, device)[use],
            weight=_spread([row.weight for row in rows], place, device)[use],
            row=torch.from_numpy(place).to(device)[use],
        )
        low, high = settings.clip_low, settings.clip_high
        value = compute_loss(
            terms,
            torch.from_numpy(counts).to(device),
            by=by,
            low=low,
            high=high,
            normalise=settings.normalise,
        )
        if value.requires_grad and bool(use.any()):
            value.backward()
            totals.signal = True
        size = int(use.sum())
        if size:
            totals.loss += float(value.detach())
            totals.tokens += size
            totals.entropy += float(entropy[use].sum())
            totals.divergence += float(compute_divergence(terms.now, terms.then).sum())
            totals.clipped += size * float(compute_clipped_share(terms, low=low, high=high))


class _UpdateTotals:
    """Sums over the batches of an update."""

    def __init__(self) -> None:
        self.loss = self.entropy = self.divergence = self.clipped = 0.0
        self.tokens = 0
        self.signal = False
        self.compared: list[np.ndarray] = []
        self.differ: list[str] = []  # rejected rows among the compared ones
        self.refused: list[str] = []

    def summarize(self, rows: Sequence[Row], tokens: int) -> UpdateMetrics:
        if len(self.compared) > 1 and len(self.differ) > _MISMATCH_SHARE * len(self.compared):
            raise LogprobMismatch(
                f"{len(self.differ)} of {len(self.compared)} rows have other log-probabilities than recorded, although the weights are the "
                f"same ({self.differ[0]}); check that the trainer's temperature equals the sessions', and that the engine behind the "
                "gateway samples from this model"
            )
        differences = np.concatenate(self.compared) if self.compared else None
        count = max(1, self.tokens)
        return UpdateMetrics(
            rows=len(rows),
            tokens=tokens,
            loss=self.loss,
            entropy=self.entropy / count,
            divergence=self.divergence / count,
            clipped=self.clipped / count,
            compared=len(self.compared),
            difference=None if differences is None else float(differences.mean()),
            largest=None if differences is None else float(differences.max()),
            refused=tuple(self.refused),
            signal=self.signal,
        )


def is_of_version(row: Row, version: int) -> bool:
    """Check that all its trained tokens were sampled with these weights."""
    return all(span.version_start == span.version_end == version for span in row.spans if span.trained)


class PackedRows(msgspec.Struct, frozen=True):
    """Rows packed into one sequence: their shared prefix once, then the rest of each. Rollouts of a task share a prefix."""

    ids: np.ndarray
    positions: np.ndarray
    sees: np.ndarray  # (token, token), bool: the attention mask
    at: np.ndarray  # positions whose scores predict the trained tokens


def pack_rows(rows: Sequence[Row]) -> PackedRows:
    shared = count_shared_prefix(rows)
    lengths = [row.ids.size - shared for row in rows]
    owner = np.repeat(np.arange(len(rows) + 1), [shared, *lengths])  # 0: the shared prefix
    starts = shared + np.cumsum([0, *lengths[:-1]])
    place = np.arange(owner.size)
    same = (owner[:, None] == owner[None, :]) | (owner == 0)[None, :]
    return PackedRows(
        ids=np.concatenate([rows[0].ids[:shared], *(row.ids[shared:] for row in rows)]).astype(np.int64),
        positions=np.concatenate([place[:shared], *(np.arange(shared, row.ids.size) for row in rows)]),
        sees=same & (place[:, None] >= place[None, :]),
        at=np.concatenate(
            [np.flatnonzero(row.mask) - shared + start - 1 for row, start in zip(rows, starts, strict=True)]
        ),
    )


def count_shared_prefix(rows: Sequence[Row]) -> int:
    """Count the tokens that all rows start with. The position before a row's first trained token is never shared."""
    most = min(int(row.mask.argmax()) for row in rows) - 1
    differs = np.zeros(max(0, most), np.bool_)
    for row in rows[1:]:
        differs |= row.ids[: differs.size] != rows[0].ids[: differs.size]
    return int(differs.argmax()) if differs.any() else differs.size


def split_batches(rows: Sequence[Row], tokens: int) -> Iterator[list[Row]]:
    """Split rows into batches of at most `tokens` packed tokens; a longer row gets its own batch."""
    batch: list[Row] = []
    for row in rows:
        more = [*batch, row]
        shared = count_shared_prefix(more)
        if batch and shared + sum(one.ids.size - shared for one in more) > tokens:
            yield batch
            more = [row]
        batch = more
    if batch:
        yield batch


def _mask_attention(sees: Tensor) -> Attend:
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True).transpose(1, 2)

    return attend


def _spread(values: list[float], place: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values, np.float32)[place]).to(device)


def _describe_mismatch(row: Row, differences: np.ndarray) -> str:
    worst = int(differences.argmax())  # NaN counts as the largest
    place = int(np.flatnonzero(row.mask)[worst])
    return f"branch {row.branch}: token {place} differs by {differences[worst]:.3g}"


class Trainer:
    """The training loop. `engine` is the one behind the gateway; its model is trained.

        async with await Feed.open(gateway, "name", FeedConfig(n=8), after=trainer.state.number, mark=trainer.state.mark) as feed:
            await trainer.run(feed, steps=20)

    `folder` holds the checkpoints; the newest one is resumed, with its weights but with these settings. None: no checkpoints, and a commit
    after every step. `every`: steps between checkpoints; the last step always writes one.
    """

    def __init__(
        self,
        engine: LocalEngine,
        gateway: GatewayClient,
        settings: GrpoSettings,
        *,
        folder: Path | None = None,
        source: str | Path | None = None,
        every: int = 1,
        watch: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self.engine = engine
        self.learner = Learner(engine.model, settings)
        self.state = TrainerState()
        self.steps: list[Step] = []
        self.earlier_rate: float | None = None  # learning rate of the resumed checkpoint
        self._gateway = gateway
        self._settings = settings
        self._folder = folder
        self._source = source
        self._every = every
        self._watch = watch
        self._saved = 0  # the step of the newest checkpoint

    async def restore(self) -> None:
        """Resume from the newest checkpoint, if there is one, and set the gateway's policy version."""
        found = None if self._folder is None else await asyncio.to_thread(checkpoint.find_newest, self._folder)
        state = self.state if found is None else found.state
        present = (await self._gateway.fence()).version
        version = state.version
        if present > version:  # later rows came from weights that are lost, if there are checkpoints at all
            version = present if self._folder is None else present + 1
        if found is not None:
            async with self.engine.updating(version):
                self.earlier_rate = await asyncio.to_thread(found.restore, self.engine.model, self.learner.optimizer)
            self.steps = [msgspec.convert(one, Step, strict=False) for one in found.state.history]
            self._saved = found.state.step
        self.state = msgspec.structs.replace(state, version=version)
        await self._gateway.resume(version)

    async def run(self, feed: Feed, steps: int) -> list[Step]:
        """Train until `steps` steps are done in total."""
        while self.state.step < steps:
            began = time.monotonic()
            deliveries = [await _next_delivery(feed) for _ in range(self._settings.groups)]
            waited = time.monotonic() - began
            # Not to be interrupted: new weights without their delivery number would be trained on the same rows again.
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
        except NonFiniteGradient as error:  # the fence is still open: no call waits, and nothing is committed
            raise NonFiniteGradient(
                f"step {step} was not made: {error.message}; the weights are those of step {self.state.step}, and deliveries "
                f"{deliveries[0].number} to {number} of feed {feed.name} are not trained on: they are delivered again after a restart"
            ) from None
        if measured.signal:
            version += 1
            await self._gateway.pause("hold")
            # The engine records the version per token: calls in flight continue before the fence is open.
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
        self.state = TrainerState(
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
        """Write a checkpoint unless it exists already. Must not run during a step."""
        if self._folder is None or self.state.step == self._saved:
            return
        await asyncio.to_thread(
            checkpoint.write_checkpoint,
            self._folder,
            self.state,
            self.engine.model,
            self.learner.optimizer,
            self._source,
        )
        self._saved = self.state.step
        await feed.commit(self.state.number)


async def _next_delivery(feed: Feed) -> Delivery:
    async for delivery in feed:
        return delivery
    raise TurngateError(f"feed {feed.name} was closed while its trainer was waiting for more")
