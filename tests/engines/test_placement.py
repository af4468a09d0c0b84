"""Tests for the placement rule and the parsers of engines' load reports. Everything is pure."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from turngate.engines.load import EngineLoad, OldSGLangLoads, SGLangLoads, parse_vllm_metrics
from turngate.engines.placement import LaneLoad, count_moves, is_crowded, is_saturated, should_move
from turngate.engines.replica import merge_loads


@pytest.mark.parametrize(
    ("load", "crowded"),
    [
        (EngineLoad(0, 0), False),
        (EngineLoad(200, 0, 1.0), False),  # full, but nothing waits for it
        (EngineLoad(200, 1, 0.9), True),
        (EngineLoad(200, 1, 0.89), False),
        (EngineLoad(8, 3, 0.2), False),  # calls that arrived in the last step also count as waiting
        (EngineLoad(8, 4, 0.2), True),
        (EngineLoad(16, 4), True),
        (EngineLoad(17, 4), False),
        (EngineLoad(100, 25), True),
        (EngineLoad(100, 24), False),
        (EngineLoad(0, 4), True),
    ],
)
def test_crowded_lane_has_full_cache_or_long_queue(load: EngineLoad, crowded: bool) -> None:
    assert is_crowded(load) is crowded


@pytest.mark.parametrize(
    ("load", "own", "moves"),
    [
        (EngineLoad(10, 0), 5, 0),
        (EngineLoad(10, 10), 20, 10),  # the only gateway moves all that wait
        (EngineLoad(10, 10), 5, 3),  # a quarter of the calls: a quarter of the 10 that wait, rounded up
        (EngineLoad(10, 10), 0, 0),
        (EngineLoad(10, 10), 50, 10),  # the report is older than our newest calls
        (EngineLoad(0, 0), 3, 0),
    ],
)
def test_gateway_moves_its_share_of_waiting_calls(load: EngineLoad, own: int, moves: int) -> None:
    assert count_moves(load, own) == moves


def lane(running: int, waiting: int, kv_use: float | None = None, own: int = 1) -> LaneLoad:
    made = LaneLoad(in_flight=own)
    made.update(EngineLoad(running, waiting, kv_use))
    return made


@pytest.mark.parametrize(
    ("home", "other", "moves"),
    [
        (lane(10, 0), lane(0, 0), False),  # not crowded: the cached prefix is worth more than an empty engine
        (lane(10, 10), lane(10, 0), True),  # 10 calls are half of 20
        (lane(10, 10), lane(11, 0), False),
        (lane(10, 10), lane(2, 4), False),  # the other lane is crowded too
        (lane(100, 1, 0.95), lane(20, 0, 0.2), True),
        (lane(10, 10, own=0), lane(0, 0, own=0), False),  # none of the calls there are ours
    ],
)
def test_session_leaves_crowded_lane_for_one_with_half_its_calls(home: LaneLoad, other: LaneLoad, moves: bool) -> None:
    assert should_move(home, other) is moves


def test_moves_end_until_next_report() -> None:
    home, other = lane(10, 10, own=2), lane(0, 0)
    assert home.moves_left == 1 and should_move(home, other)
    home.moves_left -= 1
    assert not should_move(home, other)
    home.update(EngineLoad(10, 10))
    assert should_move(home, other)


def test_calls_are_those_of_report_and_own_since_then() -> None:
    made = LaneLoad(in_flight=2)
    assert made.calls == 2  # without a report
    made.update(EngineLoad(9, 1))
    made.in_flight += 3
    assert made.calls == 13
    made.in_flight = 0
    assert made.calls == 8
    made.update(EngineLoad(0, 0))
    made.in_flight = 4
    assert made.calls == 4
    made.update(None)
    assert made.calls == 4 and not made.is_crowded


def test_burst_between_reports_crowds_lane_that_was_full() -> None:
    made = LaneLoad()
    made.update(EngineLoad(100, 0))
    made.in_flight = 1000
    assert made.room == inf and not made.is_crowded  # nothing shows how many calls the engine can run
    made.update(EngineLoad(100, 30))
    assert made.room == 0 and made.is_crowded
    made.in_flight = 90
    made.update(EngineLoad(90, 0))
    assert made.room == 35 and not made.is_crowded  # 100 calls run, and 25 wait
    made.in_flight += 34
    assert made.room == 1 and not made.is_crowded
    made.in_flight += 1
    assert made.room == 0 and made.is_crowded
    made.in_flight -= 2
    assert made.room == 2 and not made.is_crowded


@pytest.mark.parametrize(
    ("reports", "room"),
    [
        ([EngineLoad(8, 4), EngineLoad(8, 0)], 4),  # a short queue is no crowd
        ([EngineLoad(100, 1, 0.95), EngineLoad(90, 0, 0.95)], 11),  # with a full cache, one waiting call is
        ([EngineLoad(100, 1, 0.95), EngineLoad(90, 0, 0.5)], 35),
        ([EngineLoad(0, 10), EngineLoad(10, 0)], inf),  # calls had just arrived: the engine was not full
        ([EngineLoad(100, 30), None], inf),
    ],
)
def test_room_is_learned_from_long_queues(reports: list[EngineLoad | None], room: float) -> None:
    made = LaneLoad()
    for report in reports:
        made.update(report)
    assert made.room == room


def test_new_sessions_avoid_crowded_lanes_then_count_calls_then_sessions() -> None:
    crowded, busy, idle = lane(0, 5), lane(50, 0), lane(7, 0)
    twin = lane(7, 0)
    twin.sessions = 3
    assert sorted([crowded, busy, twin, idle], key=LaneLoad.order) == [idle, twin, busy, crowded]


def test_saturated_if_every_lane_is_crowded() -> None:
    assert is_saturated([lane(0, 5), lane(9, 9)])
    assert not is_saturated([lane(0, 5), lane(50, 0)])
    assert is_saturated([])  # no engine accepts calls


# Written by hand with the metric names of vLLM 0.32, as two data-parallel ranks would report them.
VLLM_METRICS = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_running{engine="0",model_name="m"} 7.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.9125
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 1e-03
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 12.0
"""


@pytest.mark.parametrize(
    ("text", "loads"),
    [
        (VLLM_METRICS, [EngineLoad(7, 3, 0.9125), EngineLoad(2, 0, 0.001)]),
        (  # older versions have another name for the KV cache, and no engine label
            b'vllm:num_requests_running{model_name="m"} 1.0\nvllm:num_requests_waiting{model_name="m"} 2.0\n'
            b'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n',
            [EngineLoad(1, 2, 0.5)],
        ),
        (b"vllm:num_requests_running 1.0\nvllm:num_requests_waiting 2.0\n", [EngineLoad(1, 2)]),
        (b'vllm:num_requests_running{model_name="m"} 1.0\n', []),  # half a report is none
        (b"vllm:num_requests_running +Inf\nvllm:num_requests_waiting 2.0\n", []),  # as if the gauge were missing
        (b"vllm:num_requests_running 1.0\nvllm:num_requests_waiting 1e999\n", []),
        (b"vllm:num_requests_running 1.0\nvllm:num_requests_waiting -\n", []),
        (
            b"vllm:num_requests_running 1.0\nvllm:num_requests_waiting 2.0\nvllm:kv_cache_usage_perc +Inf\n",
            [EngineLoad(1, 2)],
        ),
        (
            b"vllm:num_requests_running 1.0\nvllm:num_requests_waiting 2.0\nvllm:kv_cache_usage_perc NaN\n",
            [EngineLoad(1, 2)],
        ),
        (b"", []),
        (b"process_cpu_seconds_total 3\n", []),
    ],
)
def test_parse_vllm_metrics(text: bytes, loads: list[EngineLoad]) -> None:
    assert parse_vllm_metrics(text) == loads


def test_parse_sglang_loads() -> None:
    new = b'{"loads": [{"dp_rank": 1, "num_running_reqs": 4, "num_waiting_reqs": 1, "token_usage": 0.25, "x": 1},'
    new += b'{"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 0, "token_usage": 0.5}], "version": "0.5.23"}'
    assert msgspec.json.decode(new, type=SGLangLoads).to_loads() == [EngineLoad(2, 0, 0.5), EngineLoad(4, 1, 0.25)]
    old = b'[{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 900}]'
    assert SGLangLoads(msgspec.json.decode(old, type=OldSGLangLoads)).to_loads() == [EngineLoad(3, 2)]


def test_merged_load_counts_all_calls_and_fullest_cache() -> None:
    assert merge_loads([EngineLoad(1, 2, 0.5), EngineLoad(3, 0, 0.9)]) == EngineLoad(4, 2, 0.9)
    assert merge_loads([EngineLoad(1, 2)]) == EngineLoad(1, 2)
    assert merge_loads([]) is None
