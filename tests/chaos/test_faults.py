"""A few faults of `make chaos`, with a fixed seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tests.chaos.faults import Fault, list_faults
from tests.chaos.sites import Site, open_single, open_workers
from tests.chaos.suite import FAST, run_faults

SINGLE = ("client: reset", "engine: truncation", "engine repeats an event", "gateway: kill -9")
WORKERS = ("workers: kill -9 of a worker", "workers: SIGSTOP of the front")


def test_catalog_has_forty_kinds() -> None:
    names = [fault.name for fault in list_faults()]
    assert len(set(names)) == len(names) >= 40


@pytest.mark.process
@pytest.mark.real
@pytest.mark.full
async def test_fault_without_effect_fails_its_row_and_not_the_run() -> None:
    async def inject(site: Site, seconds: float) -> None:
        raise TimeoutError("nothing happened")

    rng = random.Random(19)
    rows = await run_faults(open_single(rng), [Fault("harmless", "single", inject)], FAST, rng, lambda row: None)
    assert [row.notes for row in rows] == [["nothing happened"], []]
    assert not rows[0].is_clean and rows[0].rollouts and rows[0].breaches.lost == 0


@pytest.mark.process
@pytest.mark.real
@pytest.mark.full
@pytest.mark.promise(5)
@pytest.mark.parametrize(("open_place", "names"), [(open_single, SINGLE), (open_workers, WORKERS)])
async def test_faults_break_no_promise(
    open_place: Callable[[random.Random], AbstractAsyncContextManager[Site]], names: tuple[str, ...]
) -> None:
    faults = [fault for fault in list_faults() if fault.name in names]
    assert len(faults) == len(names)
    rng = random.Random(19)
    for _ in range(3):  # on a busy machine, all faults may happen between two calls
        rows = await run_faults(open_place(rng), faults, FAST, rng, lambda row: None)
        for row in rows:
            assert row.is_clean, (row.fault, row.notes)
        if sum(row.counts.errors_told + row.counts.broken_off for row in rows):
            return
    pytest.fail("no fault had an effect")
