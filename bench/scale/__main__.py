"""Simulate 1, 10, 100 and 1,000 machines, and find what breaks first: `python -m bench.scale [--figure FILE] [--set NAME=VALUE …]`.

The costs come from `costs.json` (`python -m bench.scale.measure`), and the assumptions from `costs.py`. `--set` changes an assumption.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from bench.scale.costs import COSTS, Assumptions, Costs, read_measurements
from bench.scale.figure import draw_limits
from bench.scale.report import FULL, Report, find_limit, measure_rate, simulate_sessions, simulate_turns

RUNS = ((1, 1000.0, 3000.0), (10, 300.0, 600.0), (100, 60.0, 120.0), (1000, 20.0, 30.0))  # machines, warm-up, seconds
MANY = 1_000_000  # connections with PgBouncer, so many that they are never the limit


def print_table(reports: list[Report]) -> None:
    rows = {
        "rollouts in flight": lambda r: f"{r.in_flight:,}",
        "turns/s": lambda r: f"{r.turns_per_s:,.0f}",
        "sampled tokens/s": lambda r: f"{r.sampled_tokens_per_s:,.0f}",
        "sessions/s into the shared store": lambda r: f"{r.sessions_per_s:.2f}",
        "added to a turn by the gateway, p50 / p99": lambda r: f"{r.added_ms:.0f} / {r.added_p99_ms:.0f} ms",
        "from outcome to shared store, p50 / p99": lambda r: (
            f"{r.ship_delay_s * 1000:.0f} / {r.ship_delay_p99_s * 1000:.0f} ms"
        ),
        "transactions/s (shipping, leases)": lambda r: f"{r.transactions_per_s:.1f}",
        "sessions per shipping transaction": lambda r: f"{r.sessions_per_transaction:.2f}",
        "PostgreSQL: cores in use": lambda r: f"{r.postgres_cores:.2f}",
        "PostgreSQL: log": lambda r: f"{r.wal_bytes_per_s / 1e6:.1f} MB/s",
        "PostgreSQL: network": lambda r: f"{r.network_bytes_per_s / 1e6:.1f} MB/s",
        "connections to PostgreSQL": lambda r: f"{r.connections:,}",
        "network between gateways and engines": lambda r: f"{r.engine_network_bytes_per_s / 1e6:,.0f} MB/s",
    }
    print("| machines | " + " | ".join(f"{r.machines:,}" for r in reports) + " |")
    print("|---|" + "---|" * len(reports))
    for name, cell in rows.items():
        print(f"| {name} | " + " | ".join(map(cell, reports)) + " |")
    for name in reports[0].use:
        print(f"| in use: {name} | " + " | ".join(f"{r.use[name]:.0%}" for r in reports) + " |")
    print("| breaks | " + " | ".join("; ".join(r.breaks) or "nothing" for r in reports) + " |")


def list_changes(costs: Costs, given: Assumptions) -> list[tuple[str, Costs, Assumptions]]:
    """Return changes that may raise the limit. Each one includes the changes before it."""
    replace = msgspec.structs.replace
    steps: list[tuple[str, Costs, Assumptions]] = [("as it is", costs, given)]
    pooled = replace(given, max_connections=MANY)
    steps.append(("PgBouncer, or a higher max_connections", costs, pooled))
    apart = replace(pooled, is_gateway_apart=True)
    steps.append(("the gateway on the shared store in a process of its own", costs, apart))
    quick = replace(costs, flush_s=0.0002)
    steps.append(("a disk that flushes in 0.2 ms", quick, apart))
    piped = replace(quick, feed_round_trips=0.0, counter_round_trips=2.0)
    steps.append(("no round trip per session while locks are held", piped, apart))
    unlocked = replace(
        piped,
        ship_server_cpu_s=piped.ship_server_cpu_s + piped.feed_server_cpu_s * 0.8,
        feed_server_cpu_s=piped.feed_server_cpu_s * 0.2,
    )
    steps.append(("a fifth of the work under the locks, the rest before them", unlocked, apart))
    return steps


def print_limits(costs: Costs, given: Assumptions, rate: float) -> None:
    print("\n| change, in addition to those above | machines | sessions/s | first bottleneck |\n|---|---|---|---|")
    for name, changed, assumed in list_changes(costs, given):
        machines, first = find_limit(changed, assumed, rate, most=16384)
        why = "nothing" if first is None else _explain(first)
        print(f"| {name} | {machines:,} | {machines * rate:.0f} | {why} |")


def print_overload(costs: Costs, given: Assumptions, rate: float) -> None:
    """Show what happens past the limit: cells wait longer for the locks, and ship more sessions in each transaction."""
    print(
        "\n| machines | sessions/s arrive | per transaction | from outcome to shared store, p50 / p99 | breaks |\n|---|---|---|---|---|"
    )
    pooled = msgspec.structs.replace(given, max_connections=MANY)
    for machines in (250, 500, 1000, 2000):
        report = simulate_sessions(costs, pooled, machines, rate, seconds=300.0)
        delays = f"{report.ship_delay_s:.2f} / {report.ship_delay_p99_s:.2f} s"
        cells = (
            f"{machines * rate:.0f}",
            f"{report.sessions_per_transaction:.1f}",
            delays,
            "; ".join(report.breaks) or "nothing",
        )
        print(f"| {machines:,} | " + " | ".join(cells) + " |")


def _explain(first: Report) -> str:
    named = [one for one in first.breaks if one != "finished sessions pile up"]
    return "; ".join(named) or f"{first.busiest} ({first.use[first.busiest]:.0%} in use, sessions pile up)"


def draw_figure(costs: Costs, given: Assumptions, rate: float, machine: str) -> str:
    """Draw the number of machines at which each shared resource is full, extrapolated from 100 and 400 machines."""
    pooled = msgspec.structs.replace(given, max_connections=MANY)
    few, many = (simulate_sessions(costs, pooled, machines, rate, seconds=60.0) for machines in (100, 400))
    limits = extrapolate(few, many)
    connections = given.max_connections - given.reserved_connections - given.page_viewers - 1
    limits["PostgreSQL: default max_connections"] = connections / given.connections_per_cell
    note = f"extrapolated from 100 and 400 simulated machines with {given.slots} rollouts each; costs measured on {machine}"
    return draw_limits(limits, note)


def extrapolate(few: Report, many: Report) -> dict[str, float]:
    """Return the number of machines at which each shared resource is full, by linear extrapolation from two runs."""
    limits = {}
    for name, share in few.use.items():
        growth = (many.use[name] - share) / (many.machines - few.machines)
        if growth > 0 and not name.startswith(("machines", "engines")):
            limits[name] = few.machines + (FULL - share) / growth
    return limits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, default=COSTS)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="change an assumption")
    parser.add_argument("--figure", type=Path, help="draw the limits to this file")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of machines [1 10 100 1000]")
    args = parser.parse_args()
    measured = read_measurements(args.costs)
    costs = measured.to_costs()
    try:
        given = msgspec.convert(dict(one.split("=", 1) for one in args.set), Assumptions, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise SystemExit(f"bench: --set: {error}; the names are: {', '.join(Assumptions.__struct_fields__)}") from None
    print(f"costs: {measured.machine}, {measured.date}\n")
    runs = [run for run in RUNS if not args.only or run[0] in args.only]
    print_table([simulate_turns(costs, given, n, warm_up_s=warm, seconds=s) for n, warm, s in runs])
    rate = measure_rate(costs, given)
    print_limits(costs, given, rate)
    print_overload(costs, given, rate)
    if args.figure:
        args.figure.write_text(draw_figure(costs, given, rate, measured.machine), encoding="utf-8")


if __name__ == "__main__":
    main()
