"""The model of a cluster: machines with cells, engines, the driver, and the shared store.

Two kinds of runs:

    Cluster(…).run_turns(…)     every turn of every rollout on every machine: how a cluster of this size performs
    Cluster(…).run_sessions(…)  only finished sessions, at a given rate: where the shared parts break, for any number of machines

A rollout: the driver orders it → a machine starts its sandbox and agent → per turn: gateway, engine, gateway, SQLite, tools → grade →
outbox → shipped in a transaction with others of the same cell → once its group is complete, delivered to the trainer.
"""

from __future__ import annotations

import math
from collections import Counter

import msgspec

from bench.scale.costs import Assumptions, Costs
from bench.scale.shared_store import SLICE_S, SharedStore
from bench.scale.simulation import Process, Queue, Simulation, Station

_SPREAD = 0.5  # sigma of the log-normal times of engines and tools
_BEFORE_ENGINE = 0.6  # share of a turn's CPU that is spent before the engine is called


class Order(msgspec.Struct):
    """One attempt at a rollout."""

    rollout: int
    attempt: int
    turns: int
    outcome_s: float = 0.0  # when its outcome was recorded on its machine


class Machine:
    """One machine with its cell. `life` changes when the machine fails."""

    def __init__(self, simulation: Simulation, given: Assumptions) -> None:
        self.cores = Station(simulation, "cores", given.cores, SLICE_S)
        self.gateway = Station(simulation, "gateway", given.workers)
        self.sqlite = Station(simulation, "SQLite")
        self.outbox = Queue(simulation)
        self.running: dict[int, Order] = {}  # attempts without an outcome
        self.life = 0
        self.back_at = 0.0  # after a failure


class Totals(msgspec.Struct):
    """Counters of one run."""

    ended: int = 0
    lost_attempts: int = 0
    turns: int = 0
    groups: int = 0
    renewals: int = 0
    late_renewals: int = 0


class Cluster:
    def __init__(self, costs: Costs, assumptions: Assumptions, machines: int, seed: int = 0) -> None:
        self.costs = costs
        self.assumptions = assumptions
        self.simulation = Simulation(seed)
        self.shared = SharedStore(self.simulation, costs, assumptions)
        self.machines = [Machine(self.simulation, assumptions) for _ in range(machines)]
        self.engines = Station(self.simulation, "engines", assumptions.engine_slots * machines)
        self.driver = Station(self.simulation, "the driver's process")
        self.gateway = (
            Station(self.simulation, "the shared gateway's process") if assumptions.is_gateway_apart else self.driver
        )
        self.totals = Totals()
        self.endings: Counter[int] = Counter()  # how often each rollout has ended; once, if all is well
        self.in_flight: dict[int, Order] = {}  # ordered and not yet in the shared store
        self.ship_delays: list[float] = []
        self.added_latencies: list[float] = []  # per turn: time that the gateway added to the engine's
        self.durations: list[float] = []  # of rollouts, from the order to the outcome
        self.began = 0.0
        self.waiting_at_start = 0
        self.ordered = 0  # rollouts so far, each with one attempt or more
        self._groups: Counter[int] = Counter()
        self._repeats: list[Order] = []

    # ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────

    def run_turns(self, warm_up_s: float, seconds: float) -> None:
        """Simulate every turn. At the start, each rollout is at a random point of its work."""
        for machine in self.machines:
            for _ in range(self.assumptions.slots):
                self.simulation.start(self._fill_slot(machine))
            self._start_cell(machine)
        self._run(warm_up_s, seconds)

    def run_sessions(self, per_machine_s: float, warm_up_s: float, seconds: float) -> None:
        """Simulate only finished sessions. Each machine finishes them at a given rate."""
        for machine in self.machines:
            self._start_cell(machine)
        self.simulation.start(self._finish_sessions(per_machine_s * len(self.machines)))
        self._run(warm_up_s, seconds)

    def _run(self, warm_up_s: float, seconds: float) -> None:
        for _ in range(self.assumptions.page_viewers):
            self.simulation.start(self._watch_page())
        self.simulation.run(warm_up_s)
        self.shared.reset()
        stations = [self.engines, self.driver, self.gateway]
        stations += [s for machine in self.machines for s in (machine.cores, machine.gateway, machine.sqlite)]
        for station in stations:
            station.reset()
        self.totals = Totals()
        self.began = self.simulation.now
        self.ship_delays, self.added_latencies, self.durations = [], [], []
        self.waiting_at_start = self.waiting
        self.simulation.run(warm_up_s + seconds)

    @property
    def waiting(self) -> int:
        """Sessions that have an outcome and are not yet in the shared store, and work that waits for the driver."""
        return sum(order.outcome_s > 0 for order in self.in_flight.values()) + self.driver.inside + self.gateway.inside

    def _start_cell(self, machine: Machine) -> None:
        self.simulation.start(self._ship(machine))
        self.simulation.start(self._renew_lease(machine))
        if self.assumptions.machine_mean_days:
            self.simulation.start(self._fail(machine))

    # ── rollouts ────────────────────────────────────────────────────────────────────────────────────────────────

    def _order(self) -> Order:
        """Return the next attempt: of a rollout that was lost with its machine, or of a new one."""
        if self._repeats:
            lost = self._repeats.pop()
            order = Order(lost.rollout, lost.attempt + 1, lost.turns)
        else:
            turns = self.simulation.random.uniform(0.4, 1.6) * self.assumptions.turns
            order = Order(self.ordered, 1, max(1, round(turns)))
            self.ordered += 1
        self.in_flight[order.rollout] = order
        return order

    def _fill_slot(self, machine: Machine) -> Process:
        """Run rollouts one after another, forever."""
        order = self._order()
        first = self.simulation.random.randrange(order.turns)
        yield self.simulation.random.random() * (self.assumptions.engine_s + self.assumptions.tool_s)
        while True:
            began, life = self.simulation.now, machine.life
            machine.running[order.rollout] = order
            yield from self._run_rollout(machine, order, first)
            if machine.life == life:
                del machine.running[order.rollout]
                if first == 0:
                    self.durations.append(self.simulation.now - began)
                order.outcome_s = self.simulation.now
                machine.outbox.put(order)
                yield self.driver.use(self.costs.driver_cpu_s / 2)
            else:
                yield max(0.0, machine.back_at - self.simulation.now)
            yield self.driver.use(self.costs.driver_cpu_s / 2)
            order, first = self._order(), 0
            yield self.assumptions.round_trip_s

    def _run_rollout(self, machine: Machine, order: Order, first: int) -> Process:
        given, costs, life = self.assumptions, self.costs, machine.life
        if first == 0:
            yield machine.cores.use(costs.rollout_cpu_s + costs.agent_start_cpu_s)
        for turn in range(first, order.turns):
            cpu = costs.turn_cpu_s + costs.turn_growth_cpu_s * turn + costs.token_cpu_s * given.sampled_tokens
            began = self.simulation.now
            yield from self._use_gateway(machine, cpu * _BEFORE_ENGINE)
            added = self.simulation.now - began
            yield self.engines.use(self._draw(given.engine_s))
            began = self.simulation.now
            yield from self._use_gateway(machine, cpu * (1 - _BEFORE_ENGINE))
            yield machine.sqlite.use(costs.sqlite_write_s)
            self.added_latencies.append(added + self.simulation.now - began)
            self.totals.turns += 1
            yield self._draw(given.tool_s)
            yield machine.cores.use(given.tool_cpu_s)
            if machine.life != life:
                return
        yield machine.cores.use(given.grade_cpu_s)

    def _use_gateway(self, machine: Machine, seconds: float) -> Process:
        yield machine.gateway.acquire()
        yield machine.cores.use(seconds)
        machine.gateway.release()

    def _draw(self, mean: float) -> float:
        """Draw a log-normal time."""
        return self.simulation.random.lognormvariate(math.log(mean) - _SPREAD**2 / 2, _SPREAD) if mean else 0.0

    def _finish_sessions(self, per_second: float) -> Process:
        while True:
            yield self.simulation.random.expovariate(per_second)
            order = self._order()
            order.outcome_s = self.simulation.now
            self.simulation.random.choice(self.machines).outbox.put(order)
            self.simulation.start(self._drive())

    def _drive(self) -> Process:
        yield self.driver.use(self.costs.driver_cpu_s)

    # ── cells ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _ship(self, machine: Machine) -> Process:
        costs = self.costs
        while True:
            batch = yield machine.outbox.take(self.assumptions.most_per_transaction)
            cpu = costs.ship_client_transaction_cpu_s + costs.ship_client_cpu_s * len(batch)
            yield machine.cores.use(cpu)
            yield from self.shared.ship(len(batch))
            for order in batch:
                self._end(order)

    def _end(self, order: Order) -> None:
        """Record the outcome in the shared store, unless a later attempt has superseded it."""
        if self.in_flight.get(order.rollout) is not order:
            return
        del self.in_flight[order.rollout]
        self.endings[order.rollout] += 1
        self.totals.ended += 1
        self.ship_delays.append(self.simulation.now - order.outcome_s)
        group = order.rollout // self.assumptions.group
        self._groups[group] += 1
        if self._groups[group] == self.assumptions.group:
            del self._groups[group]
            self.simulation.start(self._deliver())

    def _deliver(self) -> Process:
        size = self.assumptions.group
        yield from self.shared.read_delivery(size)
        yield self.gateway.use(self.costs.delivery_cpu_s * size)
        self.totals.groups += 1

    def _renew_lease(self, machine: Machine) -> Process:
        every = self.assumptions.lease_s / 3
        yield self.simulation.random.random() * every
        while True:
            began = self.simulation.now
            yield from self.shared.renew_lease()
            self.totals.renewals += 1
            self.totals.late_renewals += self.simulation.now - began > self.assumptions.lease_s - every
            yield every

    def _fail(self, machine: Machine) -> Process:
        """Let a machine fail now and then. Its rollouts run again once its lease has lapsed."""
        while True:
            yield self.simulation.random.expovariate(1 / (self.assumptions.machine_mean_days * 86400))
            machine.life += 1
            machine.back_at = self.simulation.now + self.assumptions.machine_repair_s
            lost = [*machine.outbox.clear(), *machine.running.values()]
            machine.running.clear()
            yield self.assumptions.lease_s
            for order in lost:
                if self.in_flight.get(order.rollout) is order:
                    self.totals.lost_attempts += 1
                    self._repeats.append(order)
            yield max(0.0, machine.back_at - self.simulation.now)

    def _watch_page(self) -> Process:
        yield self.simulation.random.random() * self.assumptions.page_refresh_s
        while True:
            yield from self.shared.read_page()
            yield self.gateway.use(self.costs.page_cpu_s)
            yield self.assumptions.page_refresh_s
