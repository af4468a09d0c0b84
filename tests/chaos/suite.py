"""Inject faults one after the other while agents work, and check the invariants after each."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from tests import kit
from tests.chaos.agents import CallCounts, ChaosAgent, RolloutLog
from tests.chaos.faults import Fault
from tests.chaos.invariants import Breaches, check_rollouts
from tests.chaos.sites import Site
from tests.crash.storm import read_verdicts
from tests.speed import paced, scaled
from turngate.verify import Renderers, VerifyOptions, open_session_reader, verify
from turngate.views.session import open_row_source

RECOVER_S = 30.0
VERIFY = "turngate verify --all"  # the last row of each place
GIVE_UP_S = 5.0  # an agent gives up a call after this long, and repeats it


@dataclass
class Row:
    """The result of one fault."""

    fault: str
    counts: CallCounts = field(default_factory=CallCounts)
    rollouts: int = 0
    breaches: Breaches = field(default_factory=Breaches)
    untold: int = 0  # calls that failed without an error in the caller's format
    recovery_s: float | None = None  # until every agent has received an answer again; None: one never did
    notes: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.breaches.total and not self.untold and self.recovery_s is not None


@dataclass(frozen=True)
class Pace:
    """How much work is done around each fault."""

    agents: int = 5
    seconds: float = 1.2  # how long a fault lasts
    rounds: int = 1  # how often each fault is injected
    tasks: int = 4  # of a batch of real rollouts


FAST = Pace(agents=4, seconds=0.7, tasks=3)


async def run_faults(
    opening: AbstractAsyncContextManager[Site],
    faults: Sequence[Fault],
    pace: Pace,
    rng: random.Random,
    report: Callable[[Row], None],
) -> list[Row]:
    """Inject faults at one gateway, in random order, and verify everything at the end."""
    rows = []
    async with opening as site:
        for n in range(pace.rounds):
            for fault in rng.sample(faults, len(faults)):
                rows.append(await run_fault(site, fault, pace, rng, f"{_slug(fault.name)}.{n}"))
                report(rows[-1])
        rows.append(await verify_store(site))
        report(rows[-1])
    return rows


async def run_fault(site: Site, fault: Fault, pace: Pace, rng: random.Random, name: str) -> Row:
    row = Row(fault.name)
    agents = [
        ChaosAgent(
            f"{name}.{n}",
            site.client_side.url,
            random.Random(rng.random()),
            row.counts,
            give_up_s=paced(GIVE_UP_S),
            keep_alive=fault.keep_alive,
        )
        for n in range(pace.agents)
    ]
    async with _at_work(agents) as is_over:
        await _wait(lambda: all(agent.last_answer for agent in agents), "not every agent got a first answer")
        await asyncio.sleep(rng.random() * 0.2)
        try:
            await fault.inject(site, pace.seconds)
            ended = time.monotonic()
            await _wait(
                lambda: all(agent.last_answer > ended for agent in agents),
                "not every agent got an answer after the fault",
            )
            row.recovery_s = time.monotonic() - ended
        except TimeoutError as error:  # the row fails, but other faults can still be injected
            row.notes.append(str(error))
        is_over.set()
    await check(site, fault, row, [log for agent in agents for log in agent.rollouts])
    return row


@asynccontextmanager
async def _at_work(agents: Sequence[ChaosAgent]) -> AsyncIterator[asyncio.Event]:
    """Let agents work until the event is set, and wait for the end of their rollouts."""
    is_over = asyncio.Event()
    tasks = [asyncio.create_task(agent.work(is_over.is_set)) for agent in agents]
    try:
        yield is_over
        await asyncio.wait(tasks, timeout=scaled(RECOVER_S))
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


async def check(site: Site, fault: Fault, row: Row, logs: Sequence[RolloutLog]) -> None:
    """Check the invariants for the rollouts of one fault, and verify their sessions."""
    await site.server.ready()
    await _wait_until_readable(site, logs)
    row.rollouts = len(logs)
    row.breaches = check_rollouts(
        logs, await site.read_rollouts([log.session for log in logs]), site.engine.generations
    )
    rejected = await asyncio.to_thread(find_rejected, site.reader.data, [log.session for log in logs])
    row.breaches.inexact += len(rejected)
    row.notes += rejected
    row.untold = len(row.counts.errors_garbled)
    row.notes += [*row.breaches.notes, *row.counts.errors_garbled]
    if row.counts.broken_off and not fault.may_break:
        row.untold += row.counts.broken_off
        row.notes.append(
            f"calls that ended without an error, although no connection to the agent was cut: {row.counts.broken_off}"
        )
    if row.counts.damaged and not fault.may_break and not fault.may_damage:
        row.untold += row.counts.damaged
        row.notes.append(f"answers that were damaged without an error: {row.counts.damaged}")


def find_rejected(data: str, sessions: Sequence[str]) -> list[str]:
    """Verify sessions as `turngate verify` does, without starting a process, and say which are rejected and why."""
    rejected = []
    with open_session_reader(data) as folder, open_row_source(data) as rows:
        options = VerifyOptions(rows=rows, renderers=Renderers(given=kit.renderer()))
        for session in sessions:
            verdict = verify(folder, session, options)
            if not verdict.ok:
                wrong = "; ".join(f"{finding.part}/{finding.check}: {finding.what}" for finding in verdict.wrong)
                rejected.append(f"verify rejects {session}: {wrong}")
    return rejected


async def verify_store(site: Site) -> Row:
    """Run `turngate verify --all` at the end, on everything that was recorded."""
    row = Row(VERIFY, recovery_s=0.0)
    for verdict in await read_verdicts(site.reader.data):
        row.rollouts += 1
        if not verdict["ok"]:
            row.breaches.inexact += 1
            row.notes.append(f"verify rejects {verdict['session']}: {[f for f in verdict['findings'] if not f['ok']]}")
    return row


async def _wait_until_readable(site: Site, logs: Sequence[RolloutLog]) -> None:
    """Wait until a cell has shipped all outcomes to the shared store."""
    if site.reader is site.server:
        return
    recorded = [log.session for log in logs if log.is_recorded]

    async with asyncio.timeout(scaled(RECOVER_S)):
        while True:
            shown = await site.read_rollouts(recorded)
            if all(session in shown and shown[session].outcome for session in recorded):
                return
            await asyncio.sleep(0.2)


async def _wait(condition: Callable[[], bool], otherwise: str) -> None:
    limit = scaled(RECOVER_S)
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{otherwise} within {limit:.0f} s")
        await asyncio.sleep(0.02)


def _slug(name: str) -> str:
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
