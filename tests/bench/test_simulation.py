"""The simulator of `bench/scale` against queueing theory: exact results for simple queues, and laws that hold for any."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from bench.scale.simulation import Disk, Process, Queue, Simulation, Station


def _arrive(simulation: Simulation, station: Station, rate: float, draw: Callable[[], float]) -> Process:
    while True:
        yield simulation.random.expovariate(rate)
        simulation.start(_visit(station, draw()))


def _visit(station: Station, seconds: float) -> Process:
    yield station.use(seconds)


def _hold(station: Station, seconds: float) -> Process:
    yield station.acquire()
    yield seconds
    station.release()


def _erlang_c(servers: int, load: float) -> float:
    """Return the probability that a customer has to wait in M/M/c."""
    rest = load**servers / math.factorial(servers) * servers / (servers - load)
    return rest / (sum(load**k / math.factorial(k) for k in range(servers)) + rest)


@pytest.mark.parametrize(
    ("servers", "rate", "service", "is_constant", "expected"),
    [
        (1, 0.5, 1.0, False, 2.0),  # M/M/1: 1 / (mu - lambda)
        (1, 0.8, 1.0, False, 5.0),
        (1, 0.8, 1.0, True, 3.0),  # M/D/1: half of that wait
        (3, 2.4, 1.0, False, 1.0 + _erlang_c(3, 2.4) / (3 - 2.4)),
    ],
)
def test_time_inside_matches_theory(
    servers: int, rate: float, service: float, is_constant: bool, expected: float
) -> None:
    simulation = Simulation(seed=7)
    station = Station(simulation, "shop", servers)
    draw = (lambda: service) if is_constant else (lambda: simulation.random.expovariate(1 / service))
    simulation.start(_arrive(simulation, station, rate, draw))
    simulation.run(1000.0)
    station.reset()
    simulation.run(15_000.0)
    assert station.time_inside / station.departures == pytest.approx(expected, rel=0.1)
    assert station.utilization == pytest.approx(rate * service / servers, rel=0.03)  # utilization law


@pytest.mark.parametrize("slice_s", [float("inf"), 0.3])
@pytest.mark.parametrize("servers", [1, 4])
@pytest.mark.parametrize("load", [0.3, 0.9])
def test_littles_law(slice_s: float, servers: int, load: float) -> None:
    simulation = Simulation(seed=3)
    station = Station(simulation, "cores", servers, slice_s)
    simulation.start(_arrive(simulation, station, load * servers, lambda: simulation.random.lognormvariate(-0.5, 1.0)))
    simulation.run(2000.0)
    rate, seconds = station.departures / simulation.now, station.time_inside / station.departures
    assert station.mean_inside == pytest.approx(rate * seconds, rel=0.04)
    assert station.arrivals == station.departures + station.inside


def test_a_lock_is_held_until_it_is_released() -> None:
    simulation = Simulation()
    lock = Station(simulation, "lock")
    for _ in range(10):
        simulation.start(_hold(lock, 0.5))
    simulation.run(4.9)
    assert (lock.departures, lock.inside, lock.longest) == (9, 1, 10)
    simulation.run(10.0)
    assert (lock.departures, lock.inside) == (10, 0)
    assert lock.utilization == pytest.approx(0.5)
    assert lock.time_inside == pytest.approx(sum(0.5 * n for n in range(1, 11)))


@pytest.mark.parametrize(("slice_s", "short_ends"), [(float("inf"), 10.1), (0.1, 0.2)])
def test_a_short_job_waits_for_one_slice_of_a_long_one(slice_s: float, short_ends: float) -> None:
    simulation = Simulation()
    core = Station(simulation, "core", 1, slice_s)
    ends: list[float] = []

    def short() -> Process:
        yield core.use(0.1)
        ends.append(simulation.now)

    simulation.start(_visit(core, 10.0))
    simulation.start(short())
    simulation.run(20.0)
    assert ends == [pytest.approx(short_ends)]
    assert core.utilization == pytest.approx(10.1 / 20)


def test_commits_during_a_flush_share_the_next_one() -> None:
    simulation = Simulation()
    disk = Disk(simulation, 1.0, bytes_per_s=100.0)
    ends: list[tuple[str, float]] = []

    def commit(name: str, at: float) -> Process:
        yield at
        yield disk.flush(50.0)
        ends.append((name, simulation.now))

    for name, at in (("a", 0.0), ("b", 0.5), ("c", 1.4), ("d", 9.0)):
        simulation.start(commit(name, at))
    simulation.run(20.0)
    assert ends == [("a", 1.5), ("b", 3.5), ("c", 3.5), ("d", 10.5)]
    assert (disk.commits, disk.flushes, disk.bytes) == (4, 3, 200.0)
    assert disk.utilization == pytest.approx(5.0 / 20)


def test_a_queue_hands_out_each_item_once() -> None:
    simulation = Simulation(seed=1)
    queue = Queue(simulation)
    taken: list[list[int]] = []

    def take() -> Process:
        while True:
            items = yield queue.take(4)
            assert 1 <= len(items) <= 4
            taken.append(items)
            yield 1.0

    def put() -> Process:
        for item in range(100):
            queue.put(item)
            yield simulation.random.expovariate(3.0)

    simulation.start(take())
    simulation.start(put())
    simulation.run(100.0)
    assert [item for items in taken for item in items] == list(range(100))
    assert len(queue) == 0


def test_the_past_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="in the past"):
        Simulation().after(-1.0, lambda: None)


def test_a_station_needs_a_server() -> None:
    with pytest.raises(ValueError, match="shop: at least one server"):
        Station(Simulation(), "shop", 0)
