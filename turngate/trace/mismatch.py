"""Compare the log-probabilities that a trainer computes with those that the engine reported when it sampled the tokens.

For each trained token, d = log-probability under the trainer's current weights − recorded log-probability, and exp(d) is its importance
ratio. Tokens are grouped by lag, the number of policy versions by which the trainer's weights are newer than those that sampled the token.

    lag 0   the weights are the same, so d is the mismatch between engine and trainer and should be 0
    lag n   d also reflects n policy updates
    None    the engine did not report which version sampled the token

No I/O.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np

from turngate.config import MISMATCH_STEPS, MismatchLimits
from turngate.errors import BadRequest
from turngate.trace.sample import UNKNOWN_VERSION
from turngate.types import Count

# Edges of the histogram of d, in nats. An edge belongs to the bucket that is nearer to 0.
MISMATCH_EDGES = (*(-step for step in reversed(MISMATCH_STEPS)), *MISMATCH_STEPS)
MAX_LAG = 16  # stands for this lag and all greater lags
_MAX_LOG_RATIO = 20.0  # exp(d) is computed with |d| limited to this

AlarmKind = Literal["difference", "kl", "stale_kl", "not_finite"]


class LagMismatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Statistics of d, the trainer's log-probability minus the recorded one, over the trained tokens of one lag.

    `mean`, `largest`, `k1` and `k3` cover only tokens whose d is finite, and are None if there is no such token.
    """

    lag: Annotated[int, msgspec.Meta(ge=0, le=MAX_LAG)] | None
    tokens: Annotated[int, msgspec.Meta(ge=1, le=2**62)]
    not_finite: Count = 0  # tokens for which the trainer computed NaN or an infinite value
    counts: tuple[Count, ...]  # tokens per bucket of `MISMATCH_EDGES`, without those that are not finite
    mean: Annotated[float, msgspec.Meta(ge=0)] | None  # of |d|
    largest: Annotated[float, msgspec.Meta(ge=0)] | None  # of |d|
    k1: float | None  # mean of −d: unbiased estimate of KL(sampling policy ‖ trainer's policy)
    k3: float | None  # mean of exp(d) − 1 − d: estimate of the same divergence; never negative

    def count_over(self, difference: float) -> int:
        """Return the number of tokens with |d| > `difference`, including those whose d is not finite.

        `difference` must be one of `MISMATCH_STEPS`.
        """
        inside = bisect_left(MISMATCH_EDGES, -difference), bisect_left(MISMATCH_EDGES, difference)
        return self.tokens - sum(self.counts[inside[0] + 1 : inside[1] + 1])


class MismatchAlarm(msgspec.Struct, frozen=True):
    kind: AlarmKind
    message: str  # what was measured, and what to change


class MismatchMeter:
    """Collects d, the trainer's log-probability minus the recorded one, for the trained tokens of an update."""

    def __init__(self) -> None:
        self._differences: list[np.ndarray] = []
        self._lags: list[np.ndarray] = []

    def add(self, trainer: np.ndarray, recorded: np.ndarray, versions: np.ndarray, version: int) -> None:
        """Add the log-probabilities of tokens, as computed by the trainer and as recorded.

        `version` is the version of the trainer's weights. `versions` contains the version that sampled each token, or `UNKNOWN_VERSION`.
        """
        if not trainer.shape == recorded.shape == versions.shape:
            found = f"length {len(trainer)}" if trainer.ndim == 1 else f"the shape {trainer.shape}"
            raise BadRequest(
                f"logprobs has {found}, but the number of trained tokens is {len(recorded)}; pass one value per trained token",
                param="logprobs",
            )
        newest = int(versions.max(initial=UNKNOWN_VERSION))
        if newest > version:
            raise BadRequest(
                f"'version' is {version}, but a token was sampled at version {newest}; pass the version of the weights "
                "with which the log-probabilities were computed",
                param="version",
            )
        self._differences.append(trainer.astype(np.float64) - recorded)
        self._lags.append(np.where(versions == UNKNOWN_VERSION, -1, np.minimum(version - versions, MAX_LAG)))

    def summarize(self) -> tuple[LagMismatch, ...]:
        """Return the statistics of each lag that occurs, from the lowest lag to the highest, with None last."""
        if not self._differences:
            return ()
        differences, lags = np.concatenate(self._differences), np.concatenate(self._lags)
        found = sorted({int(lag) for lag in np.unique(lags)}, key=lambda lag: (lag < 0, lag))
        return tuple(_summarize_lag(None if lag < 0 else lag, differences[lags == lag]) for lag in found)


def _summarize_lag(lag: int | None, differences: np.ndarray) -> LagMismatch:
    known = differences[np.isfinite(differences)]
    sizes = np.searchsorted(MISMATCH_STEPS, np.abs(known), side="left")
    buckets = len(MISMATCH_STEPS) + np.where(known < 0, -sizes, sizes)
    limited = known.clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return LagMismatch(
        lag=lag,
        tokens=len(differences),
        not_finite=len(differences) - len(known),
        counts=tuple(np.bincount(buckets, minlength=len(MISMATCH_EDGES) + 1).tolist()),
        mean=float(np.abs(known).mean()) if len(known) else None,
        largest=float(np.abs(known).max()) if len(known) else None,
        k1=float(-known.mean()) if len(known) else None,
        k3=float((np.expm1(limited) - limited).mean()) if len(known) else None,
    )


def check_lags(lags: Sequence[LagMismatch]) -> None:
    """Raise `BadRequest`, with the name of the field, if the lags of a report are empty or inconsistent."""
    if not lags:
        raise BadRequest("'lags' is empty; report at least one lag", param="lags")
    seen = [one.lag for one in lags]
    for place, one in enumerate(lags):
        where = f"lags[{place}]"
        if seen.count(one.lag) > 1:
            lag = "null" if one.lag is None else one.lag
            raise BadRequest(f"{where}.lag: {lag} occurs more than once; merge the entries with this lag", param="lags")
        if len(one.counts) != len(MISMATCH_EDGES) + 1:
            raise BadRequest(
                f"{where}.counts must have {len(MISMATCH_EDGES) + 1} buckets, not {len(one.counts)}; their edges are {MISMATCH_EDGES}",
                param="lags",
            )
        if sum(one.counts) + one.not_finite != one.tokens:
            raise BadRequest(
                f"{where}.tokens must be {sum(one.counts) + one.not_finite} (the sum of 'counts' and 'not_finite'), not {one.tokens}",
                param="lags",
            )
        if one.mean is not None and one.largest is not None and one.mean > one.largest * (1 + 1e-6):
            raise BadRequest(
                f"{where}.mean is {one.mean}, but {where}.largest is {one.largest}; a mean cannot exceed the largest value",
                param="lags",
            )
        has_finite = one.not_finite < one.tokens
        if any((value is not None) != has_finite for value in (one.mean, one.largest, one.k1, one.k3)):
            raise BadRequest(
                f"{where}: 'mean', 'largest', 'k1' and 'k3' must be numbers if 'not_finite' is less than 'tokens', and null otherwise",
                param="lags",
            )


def find_alarms(lags: Sequence[LagMismatch], limits: MismatchLimits) -> tuple[MismatchAlarm, ...]:
    """Return the alarms of a report. A limit of 0 turns its alarm off."""
    alarms = [
        *_check_not_finite(lags),
        *(alarm for one in lags if one.lag == 0 for alarm in _check_same_weights(one, limits)),
        *_check_stale([one for one in lags if one.lag != 0], limits),
    ]
    return tuple(alarms)


def _check_not_finite(lags: Sequence[LagMismatch]) -> list[MismatchAlarm]:
    tokens = sum(one.not_finite for one in lags)
    message = (
        f"the trainer computed NaN or infinite log-probabilities for {tokens:,} of {sum(one.tokens for one in lags):,} tokens; check "
        "the trainer's data type and gradients, and that it uses the engine's vocabulary"
    )
    return [MismatchAlarm("not_finite", message)] if tokens else []


_SAME_WEIGHTS = (
    "although the weights are the same; check that engine and trainer use the same data type (quantization and bfloat16 cause "
    "differences), the same temperature and the same model, and that the engine reports the log-probabilities of the distribution that "
    "it samples from (vLLM: --logprobs-mode processed_logprobs)"
)


def _check_same_weights(one: LagMismatch, limits: MismatchLimits) -> list[MismatchAlarm]:
    alarms = []
    over = one.count_over(limits.difference) if limits.difference else 0
    if limits.share and over / one.tokens > limits.share:
        message = (
            f"the engine's and the trainer's log-probabilities differ by more than {limits.difference:g} nats for {over:,} of "
            f"{one.tokens:,} tokens ({over / one.tokens:.1%}, limit {limits.share:.1%}), {_SAME_WEIGHTS}"
        )
        alarms.append(MismatchAlarm("difference", message))
    if limits.kl and one.k3 is not None and one.k3 > limits.kl:
        message = f"the trainer's policy diverges from the engine's by {one.k3:.2g} nats per token (limit {limits.kl:g}), {_SAME_WEIGHTS}"
        alarms.append(MismatchAlarm("kl", message))
    return alarms


def _check_stale(lags: Sequence[LagMismatch], limits: MismatchLimits) -> list[MismatchAlarm]:
    measured = [(one.k3, one.tokens - one.not_finite) for one in lags if one.k3 is not None]
    tokens = sum(count for _, count in measured)
    k3 = sum(value * count for value, count in measured) / tokens if tokens else 0.0
    if not limits.stale_kl or k3 <= limits.stale_kl:
        return []
    message = (
        f"the trainer's policy diverges by {k3:.2g} nats per token (limit {limits.stale_kl:g}) from the older or unknown weights that "
        f"sampled {tokens:,} of the tokens; train on fresher rollouts (lower the feed's max_staleness, or let agents run fewer groups "
        "ahead), or lower the learning rate"
    )
    return [MismatchAlarm("stale_kl", message)]
