"""Compare the model with a real PostgreSQL on this machine: `python -m bench.scale.check [--rounds 3]`.

The costs are measured with a single shipper. From these costs, the model predicts how many sessions per second several shippers ship on the
same cores, and how many one shipper ships with a different number of sessions per transaction. Then real shippers run, and the results are
compared. Shippers, PostgreSQL and other programs share this machine's cores. The use by other programs is measured during each run, and the
model gets the remaining cores.
"""

from __future__ import annotations

import argparse
import os
import statistics

import msgspec

from bench.scale.costs import Assumptions, Costs, read_measurements
from bench.scale.measure import split_shipping
from bench.scale.shared_store import SharedStore
from bench.scale.shipping import Run, measure_run, start_server
from bench.scale.simulation import Process, Simulation, Station

CASES = (
    (1, 1),
    (1, 16),
    (1, 4),
    (2, 1),
    (2, 16),
    (4, 1),
    (4, 16),
)  # shippers, sessions per transaction; the costs are derived from the first two
LOOPBACK_S = 0.00003  # a round trip on this machine, without the CPU time at its ends
_SLICE_S = 0.004


def predict_rate(costs: Costs, shippers: int, per_transaction: int, cores: float, seconds: float = 30.0) -> float:
    """Predict the sessions per second of shippers that share `cores` with PostgreSQL."""
    simulation = Simulation()
    count = max(1, round(cores))
    slower = count / cores  # a core that other programs also use is slower
    scaled = {name: getattr(costs, name) * slower for name in Costs.__struct_fields__ if name.endswith("cpu_s")}
    costs = msgspec.structs.replace(costs, **scaled)
    machine = Station(simulation, "cores", count, _SLICE_S)
    shared = SharedStore(simulation, costs, Assumptions(round_trip_s=LOOPBACK_S), machine)

    def ship() -> Process:
        while True:
            yield machine.use(costs.ship_client_transaction_cpu_s + costs.ship_client_cpu_s * per_transaction)
            yield from shared.ship(per_transaction)

    for _ in range(shippers):
        simulation.start(ship())
    simulation.run(seconds)
    return shared.transactions * per_transaction / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    runs: dict[tuple[int, int], list[Run]] = {case: [] for case in CASES}
    with start_server() as (server, url):
        for _ in range(args.rounds):  # the cases alternate, so that other load on the machine affects all of them
            for case in CASES:
                runs[case].append(measure_run(server, url, *case, args.seconds))
    measured = split_shipping(runs[CASES[0]], runs[CASES[1]])
    known = read_measurements().to_costs()
    costs = msgspec.structs.replace(known, **{name: one.value for name, one in measured.items()})
    print("| shippers | sessions per transaction | measured, sessions/s | predicted | error | used by others |")
    print("|---|---|---|---|---|---|")
    errors = []
    for (shippers, count), each in runs.items():
        flush = statistics.median(run.flush_s for run in each)
        predicted = statistics.median(
            predict_rate(
                msgspec.structs.replace(costs, flush_s=flush), shippers, count, (os.cpu_count() or 1) - run.other_cores
            )
            for run in each
        )
        rate = statistics.median(run.sessions_per_s for run in each)
        others = statistics.median(run.other_cores for run in each)
        error = predicted / rate - 1
        if (shippers, count) not in CASES[:2]:
            errors.append(abs(error))
        print(f"| {shippers} | {count} | {rate:.0f} | {predicted:.0f} | {error:+.0%} | {others:.1f} cores |")
    print(
        f"\nmean error of the cases from which no costs were derived: {statistics.mean(errors):.0%}, largest {max(errors):.0%}"
    )


if __name__ == "__main__":
    main()
