"""The inputs of the model: measured costs, and assumptions about the load and the machines."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cost of each piece of work, in CPU seconds unless noted. `measure.py` measures all costs on one machine."""

    turn_cpu_s: float  # gateway: a session's first turn
    turn_growth_cpu_s: float  # gateway: added by each turn before it
    token_cpu_s: float  # gateway: added by each sampled token that the engine streams by itself
    turn_network_bytes: float  # between gateway and engine, mean over a session of 50 turns
    sqlite_write_s: float  # elapsed time for which a turn's transaction keeps other writers out
    rollout_cpu_s: float  # runner, sandbox and gateway: per rollout, without the agent
    agent_start_cpu_s: float  # the agent's program: until its first call, and its end
    driver_cpu_s: float  # the process that runs the batch: per rollout

    ship_client_cpu_s: float  # cell: per session of 50 turns
    ship_client_transaction_cpu_s: float  # cell: per transaction
    ship_server_cpu_s: float  # PostgreSQL: per session, before any lock
    ship_server_transaction_cpu_s: float  # PostgreSQL: per transaction, before any lock
    feed_server_cpu_s: float  # PostgreSQL: per session, while the feeds are locked
    counter_server_cpu_s: float  # PostgreSQL: per session, while the event counter is locked
    counter_server_transaction_cpu_s: (
        float  # PostgreSQL: per transaction, while the event counter is locked, with the commit
    )
    ship_round_trips: float  # per transaction, before any lock
    ship_session_round_trips: float  # per session, before any lock
    feed_round_trips: float  # per session, while the feeds are locked
    counter_round_trips: float  # per transaction, while the event counter is locked, with the commit
    flush_s: float  # elapsed time of one flush of the write-ahead log
    ship_wal_bytes: float  # per session
    ship_network_bytes: float  # per session

    lease_server_cpu_s: float  # PostgreSQL: per renewal
    lease_wal_bytes: float  # per renewal
    connection_bytes: float  # memory of one connection in PostgreSQL
    delivery_cpu_s: float  # gateway on the shared store: per session delivered to a trainer
    delivery_server_cpu_s: float  # PostgreSQL: per session delivered
    delivery_network_bytes: float  # per session delivered
    page_cpu_s: float  # gateway on the shared store: one refresh of the page
    page_server_cpu_s: float  # PostgreSQL: one refresh of the page


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: float
    source: str  # how it was measured


class Measurements(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of `costs.json`."""

    machine: str
    date: str
    costs: dict[str, Measurement]

    def to_costs(self) -> Costs:
        return msgspec.convert({name: one.value for name, one in self.costs.items()}, Costs)


COSTS = Path(__file__).parent / "costs.json"


def read_measurements(path: Path = COSTS) -> Measurements:
    """Read measured costs. Raise `SystemExit` with the field and the fix if one is missing or invalid."""
    try:
        measurements = msgspec.json.decode(path.read_bytes(), type=Measurements)
        measurements.to_costs()
    except (OSError, msgspec.DecodeError) as error:
        raise SystemExit(f"{path}: {error}; measure again with python -m bench.scale.measure") from None
    if wrong := [name for name, one in measurements.costs.items() if not 0 <= one.value < float("inf")]:
        raise SystemExit(f"{path}: {', '.join(wrong)}: must not be negative; measure again")
    return measurements


class Assumptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Assumptions about the load and the machines. They are not measured; change them to match your own setup."""

    # one machine with its cell
    cores: int = 16
    workers: int = 1  # gateway processes
    slots: int = 64  # rollouts at once

    # one rollout
    turns: int = 50  # mean; between 0.4 and 1.6 times this
    engine_s: float = 8.0  # mean time of one model call at the engine
    sampled_tokens: int = 400  # per turn
    tool_s: float = 4.0  # mean time between two calls of an agent, while its tools run
    tool_cpu_s: float = 0.4  # their CPU time
    grade_cpu_s: float = 10.0
    group: int = 8  # rollouts of one task

    # engines: their number grows with the number of machines
    engine_slots: int = 64  # calls that the engines answer at once, per machine

    # PostgreSQL
    postgres_cores: int = 16
    max_connections: int = 100  # PostgreSQL's default
    reserved_connections: int = 3  # for administrators; PostgreSQL's default
    connections_per_cell: int = 5  # two to ship, one for the lease, two to follow the fence, the engines and the keys
    disk_bytes_per_s: float = 500e6
    most_per_transaction: int = 32  # sessions that a cell ships in one transaction
    is_event_counter: bool = True  # events are numbered by one row, which a transaction locks until it has committed
    is_feed_lock: bool = True  # every rollout enters one feed, whose row its transaction locks

    # the rest
    round_trip_s: float = 0.0003
    network_bytes_per_s: float = 1.25e9  # 10 Gbit/s
    lease_s: float = 30.0
    page_viewers: int = 5
    page_refresh_s: float = 2.0
    is_gateway_apart: bool = False  # the gateway on the shared store has a process of its own, not the driver's
    machine_mean_days: float = 30.0  # between failures of one machine; 0: none fails
    machine_repair_s: float = 300.0
