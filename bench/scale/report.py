"""The results of a simulated cluster: rates, delays, the use of each resource, and what breaks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

import msgspec

from bench.scale.cluster import Cluster
from bench.scale.costs import Assumptions, Costs

FULL = 0.95  # a resource counts as full if a larger share of it is in use
_KEEPS_UP = 0.02  # share of the arriving work that may remain undone


class Report(msgspec.Struct, frozen=True):
    machines: int
    in_flight: int
    turns_per_s: float
    sessions_per_s: float  # in the shared store
    added_ms: float  # to a turn, by the gateway, median
    added_p99_ms: float
    ship_delay_s: float  # from the outcome on the machine to the commit in the shared store, median
    ship_delay_p99_s: float
    transactions_per_s: float
    sessions_per_transaction: float
    postgres_cores: float  # in use
    wal_bytes_per_s: float
    network_bytes_per_s: float  # of PostgreSQL
    engine_network_bytes_per_s: float
    sampled_tokens_per_s: float
    connections: int
    use: dict[str, float]  # share of each resource in use
    breaks: list[str]

    @property
    def busiest(self) -> str:
        return max(self.use, key=self.use.__getitem__)


def summarize(cluster: Cluster) -> Report:
    """Build the report of a finished run."""
    given, costs, totals, shared = cluster.assumptions, cluster.costs, cluster.totals, cluster.shared
    elapsed = cluster.simulation.now - cluster.began
    renewals = totals.renewals / elapsed
    shipments = max(1, shared.transactions - totals.renewals)
    connections = len(cluster.machines) * given.connections_per_cell + given.page_viewers + 1
    network = shared.network_bytes / elapsed
    use = {
        "machines: cores": _mean(machine.cores.utilization for machine in cluster.machines),
        "machines: gateway process": _mean(machine.gateway.utilization for machine in cluster.machines),
        "machines: SQLite": _mean(machine.sqlite.utilization for machine in cluster.machines),
        "engines": cluster.engines.utilization,
        "driver's process": cluster.driver.utilization,
        "PostgreSQL: cores": shared.cores.utilization,
        "PostgreSQL: disk": shared.disk.utilization,
        "PostgreSQL: network": network / given.network_bytes_per_s,
        "feed's row lock": shared.feed.utilization,
        "event counter's lock": shared.counter.utilization,
    }
    if cluster.gateway is not cluster.driver:
        use["shared gateway's process"] = cluster.gateway.utilization
    return Report(
        machines=len(cluster.machines),
        in_flight=sum(order.outcome_s == 0 for order in cluster.in_flight.values()),
        turns_per_s=totals.turns / elapsed,
        sessions_per_s=totals.ended / elapsed,
        added_ms=_quantile(cluster.added_latencies, 0.5) * 1000,
        added_p99_ms=_quantile(cluster.added_latencies, 0.99) * 1000,
        ship_delay_s=_quantile(cluster.ship_delays, 0.5),
        ship_delay_p99_s=_quantile(cluster.ship_delays, 0.99),
        transactions_per_s=shared.transactions / elapsed,
        sessions_per_transaction=totals.ended / shipments,
        postgres_cores=shared.cores.utilization * shared.cores.servers,
        wal_bytes_per_s=shared.disk.bytes / elapsed,
        network_bytes_per_s=network,
        engine_network_bytes_per_s=totals.turns / elapsed * costs.turn_network_bytes,
        sampled_tokens_per_s=totals.turns / elapsed * given.sampled_tokens,
        connections=connections,
        use=use,
        breaks=_find_breaks(cluster, use, connections, renewals),
    )


def _find_breaks(cluster: Cluster, use: dict[str, float], connections: int, renewals: float) -> list[str]:
    given, totals = cluster.assumptions, cluster.totals
    breaks = [f"{name} is full" for name, share in use.items() if share > FULL]
    growth = cluster.waiting - cluster.waiting_at_start
    if growth > max(20.0, _KEEPS_UP * (totals.ended + growth)):
        breaks.append("finished sessions pile up")
    if totals.late_renewals:
        breaks.append("leases lapse")
    if (most := given.max_connections - given.reserved_connections) < connections:
        breaks.append(f"{connections} connections, but PostgreSQL allows {most}")
    return breaks


def measure_rate(costs: Costs, assumptions: Assumptions, seed: int = 0) -> float:
    """Return the number of sessions that one machine finishes per second."""
    cluster = Cluster(costs, assumptions, 4, seed)
    cluster.run_turns(warm_up_s=1000.0, seconds=3000.0)
    return cluster.totals.ended / (cluster.simulation.now - cluster.began) / len(cluster.machines)


def find_limit(
    costs: Costs,
    assumptions: Assumptions,
    rate: float,
    *,
    most: int = 65536,
    holds: Callable[[Report], bool] = lambda report: not report.breaks,
    seconds: float = 30.0,
) -> tuple[int, Report | None]:
    """Find the largest number of machines, within 3 %, that the shared parts can serve. Also return the report for a number above it."""
    low, high, first = 0, 1, None
    while high <= most:
        report = simulate_sessions(costs, assumptions, high, rate, seconds)
        if not holds(report):
            first = report
            break
        low, high = high, high * 2
    else:
        return most, None
    while high - low > max(1, low // 33):
        middle = (low + high) // 2
        report = simulate_sessions(costs, assumptions, middle, rate, seconds)
        if holds(report):
            low = middle
        else:
            high, first = middle, report
    return low, first


def simulate_sessions(
    costs: Costs, assumptions: Assumptions, machines: int, rate: float, seconds: float = 30.0, seed: int = 0
) -> Report:
    """Simulate the shared parts of a cluster whose machines each finish `rate` sessions per second."""
    cluster = Cluster(costs, assumptions, machines, seed)
    cluster.run_sessions(rate, warm_up_s=seconds / 3, seconds=seconds)
    return summarize(cluster)


def simulate_turns(
    costs: Costs, assumptions: Assumptions, machines: int, *, warm_up_s: float, seconds: float, seed: int = 0
) -> Report:
    """Simulate every turn of a cluster."""
    cluster = Cluster(costs, assumptions, machines, seed)
    cluster.run_turns(warm_up_s, seconds)
    return summarize(cluster)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))] if values else 0.0
