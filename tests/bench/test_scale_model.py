"""The cluster model of `bench/scale`: no rollout is lost or counted twice, and its limits follow from its costs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.scale.__main__ import extrapolate
from bench.scale.cluster import Cluster
from bench.scale.costs import COSTS, Assumptions, Costs, read_measurements
from bench.scale.figure import draw_limits
from bench.scale.report import FULL, find_limit, simulate_sessions, simulate_turns, summarize
from bench.scale.simulation import Process

FREE = Costs(**dict.fromkeys(Costs.__struct_fields__, 0.0))
SMALL = Assumptions(
    cores=4,
    slots=6,
    turns=5,
    engine_s=1.0,
    tool_s=0.5,
    tool_cpu_s=0.1,
    grade_cpu_s=0.2,
    group=4,
    max_connections=10_000,
)
SOME = msgspec.structs.replace(
    FREE,
    turn_cpu_s=0.01,
    sqlite_write_s=0.001,
    rollout_cpu_s=0.1,
    driver_cpu_s=0.002,
    ship_client_cpu_s=0.001,
    ship_server_cpu_s=0.002,
    counter_server_transaction_cpu_s=0.001,
    flush_s=0.002,
    delivery_cpu_s=0.005,
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mean_days", [0.0, 0.001, 0.0002])
def test_every_rollout_ends_once(mean_days: float, seed: int) -> None:
    given = msgspec.structs.replace(SMALL, machine_mean_days=mean_days, machine_repair_s=5.0, lease_s=3.0)
    cluster = Cluster(SOME, given, 5, seed)
    cluster.run_turns(0.0, 300.0)
    assert set(cluster.endings.values()) == {1}
    assert cluster.ordered == len(cluster.endings) + len(cluster.in_flight)
    assert cluster.endings.keys().isdisjoint(cluster.in_flight)
    assert bool(mean_days) == bool(cluster.totals.lost_attempts)
    assert 0 < cluster.totals.groups <= cluster.totals.ended // given.group


def test_lost_rollouts_run_again() -> None:
    """With failures, the oldest rollouts end too: only those of the last minutes may be in flight."""
    given = msgspec.structs.replace(SMALL, machine_mean_days=0.001, machine_repair_s=5.0, lease_s=3.0)
    cluster = Cluster(SOME, given, 5)
    cluster.run_turns(0.0, 400.0)
    assert min(cluster.in_flight) > cluster.ordered * 0.8
    assert max(order.attempt for order in cluster.in_flight.values()) < 10


def test_the_same_seed_gives_the_same_run() -> None:
    first, same, other = (simulate_turns(SOME, SMALL, 3, warm_up_s=10.0, seconds=60.0, seed=seed) for seed in (1, 1, 2))
    assert first == same
    assert first != other


def test_littles_law_holds_for_the_cluster() -> None:
    cluster = Cluster(SOME, SMALL, 5)
    cluster.run_turns(30.0, 300.0)
    report = summarize(cluster)
    seconds = sum(cluster.durations) / len(cluster.durations)
    assert report.sessions_per_s * seconds == pytest.approx(report.in_flight, rel=0.05)


def test_each_turn_is_counted() -> None:
    cluster = Cluster(SOME, SMALL, 2)
    cluster.run_turns(0.0, 200.0)
    assert cluster.totals.turns == len(cluster.added_latencies)
    assert cluster.totals.turns / cluster.totals.ended == pytest.approx(SMALL.turns, rel=0.1)
    assert min(cluster.added_latencies) >= SOME.turn_cpu_s + SOME.sqlite_write_s - 1e-9


def _ship_all(cluster: Cluster, sessions: int) -> Process:
    while True:
        yield from cluster.shared.ship(sessions)


@pytest.mark.parametrize(
    ("cost", "value", "sessions", "expected"),
    [
        ("flush_s", 0.01, 1, 100.0),  # the event counter is locked during the flush
        ("flush_s", 0.01, 8, 800.0),
        ("counter_server_cpu_s", 0.01, 8, 100.0),
        ("counter_server_transaction_cpu_s", 0.01, 4, 400.0),
        ("feed_server_cpu_s", 0.01, 4, 100.0),
        ("ship_server_cpu_s", 0.01, 4, 200.0),  # two cores
        ("ship_server_transaction_cpu_s", 0.01, 4, 800.0),
    ],
)
def test_a_doubled_cost_halves_a_saturated_rate(cost: str, value: float, sessions: int, expected: float) -> None:
    given = msgspec.structs.replace(SMALL, postgres_cores=2)
    for factor in (1, 2):
        cluster = Cluster(msgspec.structs.replace(FREE, **{cost: value * factor}), given, 1)
        for _ in range(20):
            cluster.simulation.start(_ship_all(cluster, sessions))
        cluster.simulation.run(20.0)
        assert cluster.shared.transactions * sessions / 20.0 == pytest.approx(expected / factor, rel=0.05)


def test_without_the_event_counter_commits_share_flushes() -> None:
    given = msgspec.structs.replace(SMALL, is_event_counter=False, is_feed_lock=False)
    cluster = Cluster(msgspec.structs.replace(FREE, flush_s=0.01), given, 1)
    for _ in range(20):
        cluster.simulation.start(_ship_all(cluster, 1))
    cluster.simulation.run(20.0)
    assert cluster.shared.transactions / 20.0 == pytest.approx(
        1000.0, rel=0.03
    )  # each waits for the end of a flush, and for the next


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("costs", "changes", "rate", "machines", "why"),
    [
        ({"driver_cpu_s": 0.1}, {}, 1.0, 10, "driver's process is full"),
        ({"delivery_cpu_s": 0.1}, {}, 1.0, 10, "driver's process is full"),
        ({"delivery_cpu_s": 0.1}, {"is_gateway_apart": True}, 1.0, 10, "shared gateway's process is full"),
        ({"ship_server_cpu_s": 0.1}, {"postgres_cores": 2}, 1.0, 20, "PostgreSQL: cores is full"),
        ({"flush_s": 0.05}, {"most_per_transaction": 1}, 1.0, 20, "event counter's lock is full"),
        ({"ship_network_bytes": 1e6}, {"network_bytes_per_s": 1e7}, 1.0, 10, "PostgreSQL: network is full"),
        ({}, {"max_connections": 103, "page_viewers": 0}, 0.01, 19, "connections, but PostgreSQL allows 100"),
    ],
)
def test_the_limit_follows_from_the_cost(
    costs: dict[str, float], changes: dict[str, object], rate: float, machines: int, why: str
) -> None:
    given = msgspec.structs.replace(SMALL, machine_mean_days=0.0, lease_s=1e9, **changes)
    limit, first = find_limit(msgspec.structs.replace(FREE, **costs), given, rate, most=256, seconds=60.0)
    assert limit == pytest.approx(machines, rel=0.12, abs=2.5)
    assert first is not None
    assert any(why in one for one in first.breaks) or "finished sessions pile up" in first.breaks
    assert first.use["driver's process"] == max(first.use.values()) or "driver" not in why


def test_slow_renewals_are_a_break() -> None:
    given = msgspec.structs.replace(SMALL, lease_s=3.0, machine_mean_days=0.0)
    report = simulate_sessions(msgspec.structs.replace(FREE, flush_s=2.5), given, 2, 0.01, seconds=60.0)
    assert "leases lapse" in report.breaks


def test_the_committed_costs_are_complete() -> None:
    measured = read_measurements()
    assert measured.to_costs().turn_cpu_s > 0
    assert all(one.source for one in measured.costs.values())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda costs: costs.pop("flush_s"), "flush_s"),
        (lambda costs: costs.update(flush=costs["flush_s"]), "flush"),
        (lambda costs: costs["flush_s"].update(value=-1), "flush_s"),
    ],
)
def test_bad_costs_are_named(change: object, named: str, tmp_path: Path) -> None:
    content = msgspec.json.decode(COSTS.read_bytes())
    change(content["costs"])  # type: ignore[operator]
    path = tmp_path / "costs.json"
    path.write_bytes(msgspec.json.encode(content))
    with pytest.raises(SystemExit, match=f"{named}.*measure again"):
        read_measurements(path)


def test_limits_are_extrapolated_without_the_fixed_load() -> None:
    """The page costs the same with any number of machines."""
    given = msgspec.structs.replace(SMALL, machine_mean_days=0.0, lease_s=1e9, page_viewers=10, page_refresh_s=1.0)
    costs = msgspec.structs.replace(FREE, driver_cpu_s=0.01, page_cpu_s=0.02)
    few, many = (simulate_sessions(costs, given, machines, 1.0, seconds=200.0) for machines in (10, 20))
    assert extrapolate(few, many)["driver's process"] == pytest.approx((FULL - 0.2) / 0.01, rel=0.1)


def test_the_figure_shows_every_limit() -> None:
    image = draw_limits({"locks": 720.0, "network": 5e6}, "a <note>")
    assert [part in image for part in (">locks<", ">720<", ">more than 100,000<", "a &lt;note&gt;")] == [True] * 4
