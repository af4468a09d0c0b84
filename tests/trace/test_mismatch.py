"""Test the comparison of a trainer's log-probabilities with recorded ones: statistics, histogram and alarms."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from turngate.config import MISMATCH_STEPS, MismatchLimits
from turngate.errors import BadRequest
from turngate.trace.mismatch import (
    MAX_LAG,
    MISMATCH_EDGES,
    LagMismatch,
    MismatchMeter,
    check_lags,
    find_alarms,
)

NAN, INF = math.nan, math.inf


def measure(differences: list[float], versions: list[int] | None = None, version: int = 5) -> tuple[LagMismatch, ...]:
    """Measure tokens whose recorded log-probability is -1 and whose trainer's is higher by `differences`."""
    recorded = np.full(len(differences), -1.0, np.float32)
    sampled_at = np.array([version] * len(differences) if versions is None else versions, np.int64)
    meter = MismatchMeter()
    half = len(differences) // 2  # in two parts, as in batches
    for part in (slice(0, half), slice(half, None)):
        meter.add(np.array(differences[part]) - 1.0, recorded[part], sampled_at[part], version)
    return meter.summarize()


@pytest.mark.parametrize(
    ("differences", "mean", "largest", "k1", "k3", "not_finite"),
    [
        ([0.0, 0.0], 0.0, 0.0, 0.0, 0.0, 0),
        ([0.3, -0.1], 0.2, 0.3, -0.1, (math.exp(0.3) - 1.3 + math.exp(-0.1) - 0.9) / 2, 0),
        ([-0.5, NAN, INF, -INF], 0.5, 0.5, 0.5, math.exp(-0.5) - 0.5, 3),
        ([NAN], None, None, None, None, 1),
        ([1e6], 1e6, 1e6, -1e6, math.exp(20) - 21, 0),  # the ratio is limited
    ],
)
def test_statistics(
    differences: list[float],
    mean: float | None,
    largest: float | None,
    k1: float | None,
    k3: float | None,
    not_finite: int,
) -> None:
    [one] = measure(differences)
    assert (one.lag, one.tokens, one.not_finite) == (0, len(differences), not_finite)
    assert sum(one.counts) == len(differences) - not_finite
    assert [one.mean, one.largest, one.k1, one.k3] == [
        expected if expected is None else pytest.approx(expected) for expected in (mean, largest, k1, k3)
    ]


def test_tokens_are_grouped_by_lag() -> None:
    lags = measure([0.0, 0.1, 0.2, 0.3, 0.4], versions=[5, 4, 4, -1, 0], version=5)
    assert [(one.lag, one.tokens) for one in lags] == [(0, 1), (1, 2), (5, 1), (None, 1)]
    assert lags[1].mean == pytest.approx(0.15)
    assert measure([0.0], versions=[1], version=1000)[0].lag == MAX_LAG
    assert MismatchMeter().summarize() == ()


def _measure_exactly(differences: list[float]) -> tuple[LagMismatch, ...]:
    """Measure tokens whose recorded log-probability is 0, so that no difference is rounded."""
    meter = MismatchMeter()
    meter.add(np.array(differences), np.zeros(len(differences)), np.zeros(len(differences), np.int64), 0)
    return meter.summarize()


@pytest.mark.parametrize("step", MISMATCH_STEPS)
def test_tokens_over_a_difference_are_counted_from_the_histogram(step: float) -> None:
    differences = [sign * edge * factor for edge in MISMATCH_STEPS for sign in (-1, 1) for factor in (0.7, 1.0, 1.3)]
    [one] = _measure_exactly([0.0, *differences, NAN])
    assert one.count_over(step) == 1 + sum(abs(difference) > step for difference in differences)


@pytest.mark.parametrize(
    ("differences", "lag", "change", "alarms"),
    [
        ([0.0] * 100, 0, {}, []),
        ([0.3] * 5 + [0.0] * 95, 0, {"kl": 0}, []),  # exactly the limit of 5 %
        ([0.3] * 29 + [0.0] * 71, 0, {"kl": 0, "share": 0.29}, []),
        ([0.3] * 6 + [0.0] * 94, 0, {"kl": 0}, ["difference"]),
        ([-0.3] * 6 + [0.0] * 94, 0, {"kl": 0}, ["difference"]),
        ([0.3] * 6 + [0.0] * 94, 0, {"kl": 0, "share": 0}, []),
        ([0.3] * 6 + [0.0] * 94, 0, {"kl": 0, "difference": 0.5}, []),
        ([0.19] * 100, 0, {}, ["kl"]),
        ([0.19] * 100, 0, {"kl": 0}, []),
        ([0.3] * 100, 0, {}, ["difference", "kl"]),
        ([0.3] * 100, 1, {}, []),  # the policy has moved, within the limit for older weights
        ([0.6] * 100, 1, {}, ["stale_kl"]),
        ([0.6] * 100, 1, {"stale_kl": 0}, []),
        ([0.6] * 100, None, {}, ["stale_kl"]),
        ([NAN] + [0.0] * 99, 0, {}, ["not_finite"]),
    ],
)
def test_alarms(differences: list[float], lag: int | None, change: dict[str, float], alarms: list[str]) -> None:
    versions = [-1 if lag is None else 5 - lag] * len(differences)
    found = find_alarms(measure(differences, versions), MismatchLimits(**change))
    assert [alarm.kind for alarm in found] == alarms


def test_alarms_say_what_to_change() -> None:
    same, _, stale = find_alarms(measure([0.3] * 10 + [2.0] * 10, [5] * 10 + [3] * 10), MismatchLimits())
    assert "10 of 10 tokens (100.0%, limit 5.0%)" in same.message
    assert "data type" in same.message and "temperature" in same.message and "processed_logprobs" in same.message
    assert "max_staleness" in stale.message and "learning rate" in stale.message


@pytest.mark.parametrize(
    ("logprobs", "version", "problem"),
    [
        (1, 5, "logprobs has length 1, but the number of trained tokens is 2"),
        (2, 4, "'version' is 4, but a token was sampled at version 5"),
    ],
)
def test_wrong_input_is_rejected(logprobs: int, version: int, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        MismatchMeter().add(np.zeros(logprobs), np.zeros(2, np.float32), np.array([5, 5]), version)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), ()])
def test_logprobs_of_another_shape_are_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadRequest, match=r"logprobs has the shape .*, but the number of trained tokens is 2"):
        MismatchMeter().add(np.zeros(shape), np.zeros(2, np.float32), np.array([5, 5]), 5)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"counts": (1,)}, r"lags\[0\]\.counts must have 21 buckets, not 1"),
        ({"tokens": 3}, r"lags\[0\]\.tokens must be 2 \(the sum of 'counts' and 'not_finite'\), not 3"),
        ({"mean": 0.2}, r"lags\[0\]\.mean is 0.2, but lags\[0\]\.largest is"),
        ({"k3": None}, "must be numbers if 'not_finite' is less than 'tokens'"),
    ],
)
def test_contradictory_report_is_rejected(change: dict[str, object], problem: str) -> None:
    [one] = measure([0.0, 0.1])
    check_lags([one])
    with pytest.raises(BadRequest, match=problem):
        check_lags([msgspec.structs.replace(one, **change)])
    with pytest.raises(BadRequest, match="0 occurs more than once"):
        check_lags([one, one])
    with pytest.raises(BadRequest, match="'lags' is empty"):
        check_lags([])
    [broken] = measure([float("nan")])
    check_lags([broken])
    with pytest.raises(BadRequest, match="and null otherwise"):
        check_lags([msgspec.structs.replace(broken, k3=5.0)])
    assert len(one.counts) == len(MISMATCH_EDGES) + 1
