"""The shared store as the model sees it: PostgreSQL's cores and log, and the two locks of a shipping transaction."""

from __future__ import annotations

from bench.scale.costs import Assumptions, Costs
from bench.scale.simulation import Disk, Process, Simulation, Station

SLICE_S = 0.1  # after this time, a long job lets others use the core


class SharedStore:
    """Transactions as sequences of waits. Use them with `yield from`."""

    def __init__(
        self, simulation: Simulation, costs: Costs, assumptions: Assumptions, cores: Station | None = None
    ) -> None:
        self._costs = costs
        self._assumptions = assumptions
        self.cores = cores or Station(simulation, "PostgreSQL's cores", assumptions.postgres_cores, SLICE_S)
        self.feed = Station(simulation, "the feed's row")
        self.counter = Station(simulation, "the event counter")
        self.disk = Disk(simulation, costs.flush_s, assumptions.disk_bytes_per_s)
        connections = assumptions.max_connections - assumptions.reserved_connections
        self.connections = Station(simulation, "connections", connections)
        self.transactions = 0
        self.network_bytes = 0.0

    def reset(self) -> None:
        for station in (self.cores, self.feed, self.counter, self.connections, self.disk):
            station.reset()
        self.transactions = 0
        self.network_bytes = 0.0

    def ship(self, sessions: int) -> Process:
        """Write sessions in one transaction, which locks the feed's row, then the event counter, and holds both locks until it commits."""
        costs, given = self._costs, self._assumptions
        yield self.connections.acquire()
        yield given.round_trip_s * (costs.ship_round_trips + costs.ship_session_round_trips * sessions)
        yield self.cores.use(costs.ship_server_transaction_cpu_s + costs.ship_server_cpu_s * sessions)
        if given.is_feed_lock:
            yield self.feed.acquire()
        yield given.round_trip_s * costs.feed_round_trips * sessions
        yield self.cores.use(costs.feed_server_cpu_s * sessions)
        if given.is_event_counter:
            yield self.counter.acquire()
        yield given.round_trip_s * costs.counter_round_trips
        yield self.cores.use(costs.counter_server_transaction_cpu_s + costs.counter_server_cpu_s * sessions)
        yield self.disk.flush(costs.ship_wal_bytes * sessions)
        if given.is_event_counter:
            self.counter.release()
        if given.is_feed_lock:
            self.feed.release()
        self.connections.release()
        self.transactions += 1
        self.network_bytes += costs.ship_network_bytes * sessions

    def renew_lease(self) -> Process:
        yield self.connections.acquire()
        yield self._assumptions.round_trip_s
        yield self.cores.use(self._costs.lease_server_cpu_s)
        yield self.disk.flush(self._costs.lease_wal_bytes)
        self.connections.release()
        self.transactions += 1

    def read_delivery(self, sessions: int) -> Process:
        yield self.connections.acquire()
        yield self._assumptions.round_trip_s
        yield self.cores.use(self._costs.delivery_server_cpu_s * sessions)
        self.connections.release()
        self.network_bytes += self._costs.delivery_network_bytes * sessions

    def read_page(self) -> Process:
        yield self.connections.acquire()
        yield self._assumptions.round_trip_s
        yield self.cores.use(self._costs.page_server_cpu_s)
        self.connections.release()
