"""Run the chaos suite: `python -m tests.chaos [--fast] [--seed N] [--only PATTERN]`, or `make chaos`.

It injects every fault of the catalog into live gateways while agents work, checks the invariants after each, and prints a table. The exit
code is 1 if an invariant was broken. Faults that this machine cannot have (no root, no PostgreSQL, Docker or Ray) are listed as skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import math
import os
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeVar

from tests import needs
from tests.chaos import ray_batches, rollouts
from tests.chaos.control import detect_plants
from tests.chaos.faults import Fault, Place, list_faults
from tests.chaos.ray_batches import RAY_FAULTS, run_ray_faults
from tests.chaos.report import print_row, write_table
from tests.chaos.rollouts import ROLLOUT_FAULTS, run_rollout_faults
from tests.chaos.sites import Site, open_cell, open_on_disk, open_single, open_workers
from tests.chaos.suite import FAST, VERIFY, Pace, Row, run_faults
from tests.chaos.training import TRAINING_FAULTS, run_training_faults

T = TypeVar("T")

PLACES: dict[Place, Callable[[random.Random], AbstractAsyncContextManager[Site]]] = {
    "single": open_single,
    "workers": open_workers,
    "disk": open_on_disk,
    "cell": open_cell,
}
FAST_KINDS = 22  # as many as fit into three minutes on two cores


class Catalog:
    """The kinds of faults to inject, by what they need."""

    def __init__(self, pattern: str = "") -> None:
        self.faults = [fault for fault in list_faults() if re.search(pattern, fault.name)]
        self.training = [name for name in TRAINING_FAULTS if re.search(pattern, name)]
        self.rollouts = [name for name in ROLLOUT_FAULTS if re.search(pattern, name)]
        self.ray = [name for name in RAY_FAULTS if re.search(pattern, name)]

    def __len__(self) -> int:
        return len(self.faults) + len(self.training) + len(self.rollouts) + len(self.ray)

    def sample(self, count: int, rng: random.Random) -> None:
        """Keep about `count` kinds: the same share of every group, and at least one. Keep none in Docker or on Ray, which take too long."""
        self.ray = []
        self.rollouts = [name for name in self.rollouts if ROLLOUT_FAULTS[name].sandbox != "docker"]
        share = min(1.0, count / max(1, len(self)))
        by_place = [[fault for fault in self.faults if fault.place == place] for place in PLACES]
        self.faults = [fault for each in by_place for fault in _take(each, share, rng)]
        self.training = _take(self.training, share, rng)
        self.rollouts = _take(self.rollouts, share, rng)


def _take(items: list[T], share: float, rng: random.Random) -> list[T]:
    return rng.sample(items, math.ceil(share * len(items)))


def explain_missing(fault: Fault) -> str | None:
    """Return why a fault cannot be injected here, or None if it can."""
    part = {"cell": "postgres", "disk": "root"}.get(fault.place)
    return (needs.missing(part) if part else None) or fault.explain_missing()


async def run(catalog: Catalog, pace: Pace, seed: int) -> tuple[list[Row], list[str], dict[str, bool]]:
    """Inject all faults. Return the results, why faults were skipped, and whether the damage that was planted was detected."""
    rows: list[Row] = []
    skipped = []
    detected: dict[str, bool] = {}
    for place, open_place in PLACES.items():
        rng = random.Random(f"{seed} {place}")
        faults = []
        for fault in catalog.faults:
            if fault.place == place and (reason := explain_missing(fault)):
                skipped.append(f"{fault.name}: {reason}")
            elif fault.place == place:
                faults.append(fault)
        if faults:
            rows += await run_faults(open_place(rng), faults, pace, rng, print_row)
    if catalog.training:
        rows += await run_training_faults(catalog.training, pace, seed, print_row)
    missing = {name: reason for name in catalog.rollouts if (reason := rollouts.explain_missing(name))}
    missing |= {name: reason for name in catalog.ray if (reason := ray_batches.explain_missing())}
    skipped += [f"{name}: {reason}" for name, reason in missing.items()]
    for names, run_batches in ((catalog.rollouts, run_rollout_faults), (catalog.ray, run_ray_faults)):
        if possible := [name for name in names if name not in missing]:
            found, planted = await run_batches(possible, pace, seed, print_row)
            rows += found
            detected |= planted
    return rows, skipped, detected | await detect_plants()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description="Inject faults and check the invariants."
    )
    parser.add_argument(
        "--fast",
        action="store_true",
        help="inject only a sample of the faults, each for a shorter time (under three minutes)",
    )
    parser.add_argument("--rounds", type=int, default=1, help="inject each fault this many times")
    parser.add_argument("--seed", type=int, default=None, help="repeat the run with this seed")
    parser.add_argument("--only", default="", help="only faults whose name matches this regular expression")
    parser.add_argument("--table", type=Path, help="write the table to this file, as Markdown")
    options = parser.parse_args(arguments)
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # the engine's calls end early all the time
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    catalog = Catalog(options.only)
    if options.fast:
        catalog.sample(FAST_KINDS, random.Random(seed))
    print(f"{len(catalog)} kinds of faults, seed {seed} (repeat this run with SEED={seed})", flush=True)
    began = time.monotonic()
    pace = dataclasses.replace(FAST if options.fast else Pace(), rounds=options.rounds)
    rows, skipped, detected = asyncio.run(run(catalog, pace, seed))
    table = write_table(rows)
    print(f"\n{table}\n", *(f"skipped: {line}" for line in skipped), sep="\n")
    broken = [row for row in rows if not row.is_clean]
    for row in broken:
        print(f"\n{row.fault}:", *row.notes[:20], sep="\n  ")
    for name, is_right in detected.items():
        print(f"control: {name}: {'ok' if is_right else 'NOT DETECTED'}")
    spent = time.monotonic() - began
    count = sum(row.fault != VERIFY for row in rows)
    print(f"{count} faults injected in {spent:.0f} s on {os.cpu_count()} cores; {len(broken)} broke an invariant")
    if options.table:
        options.table.write_text(table + "\n")
    return 1 if broken or not rows or not all(detected.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
