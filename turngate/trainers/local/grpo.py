"""Train the in-process engine's model with GRPO on the groups of a feed. A small reference for trainer authors.

    deliveries of the feed → rows → recompute log-probabilities and compare them with the recorded ones → loss (`loss.py`) → gradients
    → make new calls wait at the gateway's fence → one optimizer step → resume at version n + 1 → checkpoint → commit

`Learner` does the computation and does not depend on a gateway. `Trainer` is the loop around it. It needs a gateway, the gateway's
`LocalEngine`, and a feed.

After a crash, the trainer resumes with the checkpoint's weights and continues after the last delivery that they were trained on. Updates
made after the checkpoint are lost, and their deliveries are read again. A policy version always identifies one set of weights: if the
gateway has already seen newer weights than those in the checkpoint, the trainer chooses a new version number.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from turngate.client.feed import Delivery, Feed, Row
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import PauseMode
from turngate.common.aio import run_to_completion
from turngate.engines.local import LocalEngine, Model
from turngate.errors import ConfigError, TurngateError
from turngate.trace.mismatch import LagMismatch, MismatchAlarm, MismatchMeter
from turngate.trainers.local import checkpoint
from turngate.trainers.local.attention import attend_densely, attend_flexibly
from turngate.trainers.local.checkpoint import TrainerState
from turngate.trainers.local.distillation import (
    compute_mean_kl,
    compute_reverse_kl,
    compute_teacher_advantages,
    split_scored,
)
from turngate.trainers.local.loss import (
    LossTerms,
    Normalise,
    compute_clipped_share,
    compute_divergence,
    compute_divisor,
    compute_loss,
    compute_reference_penalty,
)
from turngate.trainers.local.packing import pack_rows, pack_tree, split_batches
from turngate.trainers.local.sampling import adjust_scores, find_obstacle

_MISMATCH_SHARE = 0.5  # if a larger share of the compared rows differs, the setup is wrong, not the rows
# Maximum difference, in nats, between the recorded log-probability of a token and its log-probability under later weights. A few clipped
# updates change it by a few nats. Beyond 20, either the token was almost impossible when it was sampled (one in 5·10⁸) and the record is
# damaged, or its ratio is now practically 0 and the token has no effect.
_MAX_DRIFT = 20.0


class GrpoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Hyperparameters and precision settings of GRPO training."""

    groups: int = 2  # deliveries per update
    learning_rate: float = 3e-5
    warm_up: int = 0  # the learning rate rises linearly over this many updates; AdamW's first updates are its largest
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_low: float = 0.2  # ratios below 1 - clip_low are clipped if the advantage is negative
    clip_high: float = 0.28  # ratios above 1 + clip_high are clipped if the advantage is positive
    largest_gradient: float = 1.0  # gradients are scaled down to this norm
    normalise: Normalise = "token"
    # rollout: every token has its rollout's advantage; turn: its turn's advantage, which the feed must deliver (`FeedConfig.credit`)
    advantages: Literal["rollout", "turn"] = "rollout"
    temperature: float | None = None  # of the policy; None: the temperature at which each turn was sampled
    batch_tokens: int = 2048  # per forward pass, counting a shared prefix once
    prefix_tree: bool = False  # also compute a prefix only once if just some rows of a forward pass share it
    flex_attention: bool = False  # use PyTorch's FlexAttention, which needs a CUDA device, instead of a dense mask
    bfloat16: bool = False  # run the layers in bfloat16; the weights, the scores and the loss keep their precision
    tolerance: float = 0.05  # rows of the current version whose log-probabilities differ by more are rejected
    # Weights of the two parts of a token's advantage: the rollout's or turn's advantage, and the reverse KL divergence from the teacher.
    reward_weight: float = 1.0  # 0: train only on the teacher's scores
    teacher_kl: float = 0.0
    reference_kl: float = 0.0  # weight of the KL penalty for leaving the initial weights, of which a copy is kept

    def __post_init__(self) -> None:
        for name in ("groups", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}", param=name)
        if self.warm_up < 0:
            raise ConfigError(f"warm_up must be 0 or greater, not {self.warm_up}", param="warm_up")
        for name in ("learning_rate", "largest_gradient", "temperature", "tolerance"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be greater than 0, not {getattr(self, name)}", param=name)
        for name in ("reward_weight", "teacher_kl", "reference_kl"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be finite and 0 or greater, not {getattr(self, name)}", param=name)
        if self.teacher_kl and self.temperature not in (None, 1):
            raise ConfigError(
                f"temperature must be 1, not {self.temperature}, if teacher_kl is set, because teachers score at temperature 1",
                param="temperature",
            )


class LogprobMismatch(TurngateError):
    """Recomputed and recorded log-probabilities differ for most of the compared rows, so the setup is wrong."""

    kind = "logprobs_differ"
    lags: tuple[LagMismatch, ...] = ()  # statistics of the differences, by version lag


class NonFiniteGradient(TurngateError):
    """The gradient norm is not finite. The weights were not updated."""

    kind = "gradient_not_finite"


class MissingTeacherScores(TurngateError):
    """`teacher_kl` is set, but no row of an update has usable teacher scores."""

    kind = "teacher_scores_missing"


class UpdateMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of an update, computed over its rows."""

    rows: int
    tokens: int  # trained tokens
    loss: float
    entropy: float  # of the policy at the sampled tokens, in nats
    divergence: float  # from the sampling policy, per token
    clipped: float  # share of tokens with a clipped ratio
    compared: int  # rows sampled with exactly these weights
    # Mean and largest absolute difference between recomputed and recorded log-probabilities. None if no rows were compared.
    difference: float | None
    largest: float | None
    refused: tuple[str, ...]  # why each rejected row was left out
    signal: bool  # whether any row has a gradient
    # Reverse KL divergence from the teacher per token. None if `teacher_kl` is 0.
    teacher_divergence: float | None = None
    # KL divergence from the initial weights per token. None if `reference_kl` is 0.
    reference_divergence: float | None = None
    # Differences between recomputed and recorded log-probabilities of all rows, by version lag, including rejected rows.
    mismatch: tuple[LagMismatch, ...] = ()


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One training step. If no row had a training signal, the weights did not change."""

    step: int
    version: int  # policy version after the update
    first: int  # number of the first delivery
    last: int  # number of the last delivery
    reward: float | None  # mean over the graded rollouts
    rewards: tuple[float, ...]
    passed: float | None  # share of the graded rollouts that resolved their task
    excluded: int
    why: tuple[str, ...] = ()  # distinct reasons for exclusion
    stale: int  # policy versions between the oldest row and the weights
    measured: UpdateMetrics
    gradient: float  # norm, before scaling
    seconds: dict[str, float]  # wait: for deliveries; train: from rows to new weights
    sampled_tokens: int
    alarms: tuple[MismatchAlarm, ...] = ()  # about differences between log-probabilities


class Learner:
    """A model and its optimizer, independent of any gateway. Its methods are blocking, so call them in a thread."""

    def __init__(self, model: Model, settings: GrpoSettings) -> None:
        if settings.flex_attention and model.device.type != "cuda":
            raise ConfigError(
                f"flex_attention needs a CUDA device, but the model is on {model.device}, where PyTorch's FlexAttention has no backward "
                "pass; leave flex_attention out: the dense attention mask gives the same gradients",
                param="flex_attention",
            )
        self.model = model
        self.settings = settings
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            foreach=True,
        )
        self._reference = copy.deepcopy(model).requires_grad_(False) if settings.reference_kl else None

    def gradients(self, rows: Sequence[Row], version: int) -> UpdateMetrics:
        """Compute the gradients of the loss over `rows`. `version` is the policy version of the current weights.

        If the gradients are not finite, clear them and raise `NonFiniteGradient`. Raise `MissingTeacherScores` if `teacher_kl` is set and
        no row has usable scores. Raise `LogprobMismatch` if at least two rows were sampled at this version, and if recomputed and recorded
        log-probabilities differ in most of them.
        """
        settings, totals = self.settings, _UpdateTotals()
        if settings.advantages == "turn":
            rows, totals.refused = select_credited(rows)
        self.optimizer.zero_grad(set_to_none=True)
        weights, tokens = [row.weight for row in rows], [int(row.mask.sum()) for row in rows]
        by = compute_divisor(weights, tokens, settings.normalise)
        usable = self._select_scored(self._select_sampled(rows, totals), totals)
        # Rows without a gradient are compared, but need no backward pass.
        for silent in (False, True):
            chosen = [row for row in usable if self._is_silent(row) == silent]
            for batch in split_batches(chosen, settings.batch_tokens, tree=settings.prefix_tree):
                with torch.set_grad_enabled(not silent):
                    self._pass(batch, version, by, totals)
        measured = totals.summarize(rows, sum(tokens), settings)
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]))
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteGradient(f"the gradient norm is {norm}")
        return measured

    def _select_sampled(self, rows: Sequence[Row], totals: _UpdateTotals) -> list[Row]:
        """Return the rows whose log-probabilities the model can compute. Record why the other rows are rejected."""
        obstacles = [find_obstacle(row, self.settings.temperature, self.model.shape.vocabulary) for row in rows]
        totals.refused += [f"branch {row.branch}: {why}" for row, why in zip(rows, obstacles, strict=True) if why]
        return [row for row, why in zip(rows, obstacles, strict=True) if not why]

    def _select_scored(self, rows: Sequence[Row], totals: _UpdateTotals) -> Sequence[Row]:
        """Return the rows that can be trained on. With `teacher_kl`, reject rows without usable teacher scores."""
        if not self.settings.teacher_kl or not rows:
            return rows
        scored, unscored = split_scored(rows)
        if not scored:
            problem = f"no row can be used (rejected rows: {len(rows)}). First reason: {unscored[0]}"
            raise MissingTeacherScores(f"teacher_kl is set, but {problem}", param="teacher_kl")
        totals.refused += unscored
        totals.mean_kl = compute_mean_kl(scored)
        return scored

    def step(self) -> float:
        """Make one optimizer step. Return the gradient norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.settings.largest_gradient, error_if_nonfinite=True
        )
        begun, rate = count_updates(self.optimizer) + 1, self.settings.learning_rate
        warms_up = begun <= self.settings.warm_up
        if warms_up:
            set_rate(self.optimizer, rate * begun / self.settings.warm_up)
        self.optimizer.step()
        if warms_up:
            set_rate(self.optimizer, rate)  # checkpoints contain the rate of the settings
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def logprobs(self, rows: Sequence[Row], model: Model | None = None) -> tuple[Tensor, Tensor]:
        """Compute the log-probabilities and entropies of the trained tokens of all rows. The default model is the one that is trained."""
        model = model or self.model
        device = model.device
        pack = pack_tree(rows) if self.settings.prefix_tree else pack_rows(rows)
        ids, positions, until, at = (
            torch.from_numpy(x).to(device) for x in (pack.ids, pack.positions, pack.until, pack.at)
        )
        attend = attend_flexibly(until) if self.settings.flex_attention else attend_densely(until)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.bfloat16):
            hidden = model.run(ids[None], positions, attend)
        scores = adjust_scores(model.scores(hidden[0, at]).float(), rows, self.settings.temperature)
        likely = torch.log_softmax(scores, dim=-1)
        drawn = torch.from_numpy(np.concatenate([row.ids[row.mask] for row in rows]).astype(np.int64)).to(device)
        with torch.no_grad():
            # 0 for masked ids, whose log-probability is -inf
            entropy = torch.special.entr(likely.exp()).sum(dim=-1)
        return likely.gather(-1, drawn[:, None])[:, 0], entropy

    def _is_silent(self, row: Row) -> bool:
        """Return whether a row has no gradient, because all its advantages are 0 and nothing else is added to them or to the loss."""
        settings = self.settings
        return not (settings.teacher_kl or settings.reference_kl) and not self._spread_advantages([row], 0.0).any()

    def _spread_advantages(self, rows: Sequence[Row], mean_kl: float) -> np.ndarray:
        """Return the advantage of each trained token of all rows, as float32. `mean_kl` is the mean divergence from the teacher."""
        settings = self.settings
        if settings.advantages == "turn":
            values = np.concatenate([row.token_advantages()[row.mask] for row in rows])
        else:
            counts = [int(row.mask.sum()) for row in rows]
            values = np.repeat(np.array([row.advantage for row in rows], np.float32), counts)
        values = values * np.float32(settings.reward_weight)
        if settings.teacher_kl:
            values += np.float32(settings.teacher_kl) * compute_teacher_advantages(rows, mean_kl)
        return values

    def _pass(self, rows: Sequence[Row], version: int, by: float, totals: _UpdateTotals) -> None:
        settings, device = self.settings, self.model.device
        now, entropy = self.logprobs(rows)
        counts = np.array([int(row.mask.sum()) for row in rows])
        place = np.repeat(np.arange(len(rows)), counts)
        recorded = np.concatenate([row.logprobs[row.mask] for row in rows])
        then = torch.from_numpy(recorded).to(device)
        computed = now.detach().cpu().numpy()
        versions = np.concatenate([row.token_versions()[row.mask] for row in rows])
        totals.meter.add(computed, recorded, versions, version)
        differences = np.abs(computed - recorded)
        kept = np.ones(len(rows), np.bool_)
        for n, row in enumerate(rows):
            own, same = differences[place == n], is_of_version(row, version)
            if same:
                totals.compared.append(own)
            if not own.max() <= (settings.tolerance if same else _MAX_DRIFT):  # true for NaN as well
                kept[n] = False
                why = _describe_mismatch(row, own)
                if same:
                    totals.differ.append(why)
                else:
                    why += ", more than later weight updates can explain"
                totals.refused.append(why)
        use = torch.from_numpy(kept[place]).to(device)
        terms = LossTerms(
            now=now[use],
            then=then[use],
            advantage=torch.from_numpy(self._spread_advantages(rows, totals.mean_kl)).to(device)[use],
            weight=_spread([row.weight for row in rows], place, device)[use],
            row=torch.from_numpy(place).to(device)[use],
        )
        low, high = settings.clip_low, settings.clip_high
        sizes = torch.from_numpy(counts).to(device)
        value = compute_loss(terms, sizes, by=by, low=low, high=high, normalise=settings.normalise)
        if self._reference is not None:
            with torch.no_grad():
                reference = self.logprobs(rows, self._reference)[0][use]
            totals.reference_divergence += float(compute_divergence(reference, terms.now.detach()).sum())
            penalty = compute_reference_penalty(terms, reference, sizes, by=by, normalise=settings.normalise)
            value = value + settings.reference_kl * penalty
        if value.requires_grad and bool(use.any()):
            value.backward()
            totals.signal = True
        if settings.teacher_kl:
            totals.teacher_divergence += sum(
                float(compute_reverse_kl(row).sum()) for row, is_kept in zip(rows, kept, strict=True) if is_kept
            )
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
        self.teacher_divergence = self.reference_divergence = 0.0
        self.mean_kl = 0.0  # reverse KL divergence from the teacher, of all rows with scores
        self.tokens = 0
        self.signal = False
        self.meter = MismatchMeter()
        self.compared: list[np.ndarray] = []
        self.differ: list[str] = []  # compared rows that were rejected
        self.refused: list[str] = []

    def summarize(self, rows: Sequence[Row], tokens: int, settings: GrpoSettings) -> UpdateMetrics:
        if len(self.compared) > 1 and len(self.differ) > _MISMATCH_SHARE * len(self.compared):
            error = LogprobMismatch(
                f"the recomputed log-probabilities of {len(self.differ)} of {len(self.compared)} rows differ from the recorded ones, "
                f"although the weights are the same ({self.differ[0]}); check that the trainer and the sessions use the same temperature, "
                "that turns with top-p, top-k or min-p have sampling masks, and that the gateway's engine samples from this model"
            )
            error.lags = self.meter.summarize()
            raise error
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
            teacher_divergence=self.teacher_divergence / count if settings.teacher_kl else None,
            reference_divergence=self.reference_divergence / count if settings.reference_kl else None,
            mismatch=self.meter.summarize(),
        )


def select_credited(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Return the rows that have turn advantages, and the reasons why the remaining rows are left out.

    In the returned rows, turns without an advantage are masked out.
    """
    selected, refused = [], []
    for row in rows:
        mask = row.mask & np.isfinite(row.token_advantages())
        if mask.any():
            selected.append(msgspec.structs.replace(row, mask=mask))
        else:
            refused.append(f"branch {row.branch}: its turns have no advantages")
    return selected, refused


def count_updates(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of updates that an AdamW optimizer has made, including those before the checkpoint that it was restored from."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def is_of_version(row: Row, version: int) -> bool:
    """Return whether all trained tokens of a row were sampled at policy version `version`."""
    return all(span.version_start == span.version_end == version for span in row.spans if span.trained)


def _spread(values: list[float], place: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values, np.float32)[place]).to(device)


def _describe_mismatch(row: Row, differences: np.ndarray) -> str:
    worst = int(differences.argmax())  # argmax returns the first NaN, if any
    place = int(np.flatnonzero(row.mask)[worst])
    return f"branch {row.branch}: the log-probability of token {place} differs by {differences[worst]:.3g}"


class Trainer:
    """The training loop. It trains the model of `engine`, which must be the gateway's engine.

        await trainer.restore()
        async with await Feed.open(gateway, "name", FeedConfig(n=8), after=trainer.state.number, mark=trainer.state.mark) as feed:
            await trainer.run(feed, steps=20)

    `folder` contains the checkpoints. `restore` resumes with the weights of the newest one, but with the given `settings`. If `folder` is
    None, no checkpoints are written, and the deliveries of each step are committed right after it. Otherwise, a checkpoint is written at
    intervals of `every` steps, and after the last step.
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
        pause_mode: PauseMode = "hold",
    ) -> None:
        """Prepare training. `source` is the model folder that training started from. `watch` is called after each step.

        With `pause_mode="drain"`, an update waits until the calls in flight have ended. This is required if the gateways cannot learn from
        the engine which weights sampled each token.
        """
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
        self._pause_mode = pause_mode
        self._saved = 0  # the step of the newest checkpoint

    async def restore(self) -> None:
        """Resume from the newest checkpoint, if any, and set the gateway's policy version."""
        newest = None if self._folder is None else await asyncio.to_thread(checkpoint.find_newest, self._folder)
        state = self.state if newest is None else newest.state
        current = (await self._gateway.fence()).version
        version = state.version
        if current > version:  # with checkpoints, the weights of the gateway's version are lost, so use a new version
            version = current if self._folder is None else current + 1
        if newest is not None:
            async with self.engine.updating(version):
                self.earlier_rate = await asyncio.to_thread(newest.restore, self.engine.model, self.learner.optimizer)
            self.steps = [msgspec.convert(one, Step, strict=False) for one in newest.state.history]
            self._saved = newest.state.step
        self.state = msgspec.structs.replace(state, version=version)
        await self._gateway.resume(version)

    async def run(self, feed: Feed, steps: int) -> list[Step]:
        """Train until `steps` steps are done in total, including those of earlier runs."""
        while self.state.step < steps:
            began = time.monotonic()
            deliveries = [await _next_delivery(feed) for _ in range(self._settings.groups)]
            waited = time.monotonic() - began
            # Must not be interrupted: new weights without their delivery number would be trained on the same rows again.
            await run_to_completion(self._update(deliveries, waited, feed, last=self.state.step + 1 >= steps))
        return self.steps

    async def _update(self, deliveries: Sequence[Delivery], waited: float, feed: Feed, *, last: bool) -> None:
        began = time.monotonic()
        rows = [row for delivery in deliveries for row in delivery.rows()]
        version, gradient = self.state.version, 0.0
        stale = max((version - span.version_start for row in rows for span in row.spans if span.trained), default=0)
        number = deliveries[-1].number
        step = self.state.step + 1
        measured, alarms = await self._compute_gradients(rows, deliveries, feed)
        if measured.signal:
            version += 1
            await self._gateway.pause(self._pause_mode)
            # With `hold`, the engine records the version of each token, so calls in flight may continue before the fence opens.
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
            alarms=alarms,
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

    async def _compute_gradients(
        self, rows: Sequence[Row], deliveries: Sequence[Delivery], feed: Feed
    ) -> tuple[UpdateMetrics, tuple[MismatchAlarm, ...]]:
        """Compute gradients, and report how recomputed and recorded log-probabilities differ. Return the metrics and the alarms.

        If this fails, the fence is still open, so no call is waiting, and nothing was committed.
        """
        number, version = deliveries[-1].number, self.state.version
        try:
            measured = await asyncio.to_thread(self.learner.gradients, rows, version)
        except NonFiniteGradient as error:
            raise NonFiniteGradient(
                f"step {self.state.step + 1} failed: {error.message}; the weights are still those of step {self.state.step}, and "
                f"after a restart, feed {feed.name} will repeat the deliveries of the failed step, the first of which is number "
                f"{deliveries[0].number}"
            ) from None
        except LogprobMismatch as error:
            with suppress(TurngateError):  # the reason why training stops must not be hidden
                await feed.report_lags(number, version, error.lags)
            raise
        return measured, await feed.report_lags(number, version, measured.mismatch)

    async def save(self, feed: Feed) -> None:
        """Write a checkpoint of the current step, and commit its deliveries. Do not call this during a step.

        If the checkpoint already exists, or if there is no folder for checkpoints, do nothing.
        """
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
    raise TurngateError(f"feed {feed.name} was closed while the trainer was waiting for a delivery")
