"""The catalog of faults that are injected while agents work. Each one begins, lasts for a while, and ends."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from tests.chaos import misbehaviors as engine
from tests.chaos.engine import Misbehavior
from tests.chaos.fault_proxy import NetworkFault
from tests.chaos.sites import LEASE_S, Site
from tests.crash.storm import ADMIN, children
from tests.speed import scaled
from turngate.sandboxes import cgroups
from turngate.sandboxes.base import Resources

Place = Literal["single", "workers", "disk", "cell"]
Inject = Callable[[Site, float], Awaitable[None]]


@dataclass(frozen=True)
class Fault:
    """A fault and the kind of gateway that it is injected into."""

    name: str
    place: Place
    inject: Inject  # returns when the fault has ended; gets the seconds that it should last
    may_break: bool = True  # calls may end without an error, because a connection or a process of the gateway is cut
    keep_alive: bool = (
        True  # agents use a connection for several calls; repeated bytes would answer one call with another's reply
    )
    may_damage: bool = (
        False  # agents may receive a different text from the engine's, because the damage cannot be detected
    )
    explain_missing: Callable[[], str | None] = lambda: None  # why it cannot be injected here, apart from its place


# ── the network ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _disturb(side: Literal["client_side", "engine_side"], fault: NetworkFault) -> Inject:
    async def inject(site: Site, seconds: float) -> None:
        proxy = getattr(site, side)
        proxy.fault = fault
        try:
            await asyncio.sleep(seconds)
        finally:
            proxy.heal()

    return inject


async def _refuse_connections(site: Site, seconds: float) -> None:
    site.engine_side.refuse()
    try:
        await asyncio.sleep(seconds)
    finally:
        await site.engine_side.listen()


_NETWORK = {
    "latency": NetworkFault(delay_s=0.15),
    "jitter": NetworkFault(jitter_s=0.25),
    "reset": NetworkFault(way="down", cut="reset", cut_after=(0, 3000)),
    "half-close": NetworkFault(way="down", cut="half-close", cut_after=(0, 3000)),
    "half-closed request": NetworkFault(way="up", cut="half-close", cut_after=(0, 6000)),
    "truncation": NetworkFault(way="down", cut="close", cut_after=(0, 3000)),
    "truncated request": NetworkFault(way="up", cut="close", cut_after=(0, 3000)),
    "slow bytes": NetworkFault(way="down", piece=40, delay_s=0.01),
    "slow request (slow-loris)": NetworkFault(way="up", piece=40, delay_s=0.02),
    "repeated bytes": NetworkFault(way="down", repeat=0.3, piece=700),
    "repeated request bytes": NetworkFault(way="up", repeat=0.3, piece=900),
    "black hole": NetworkFault(swallow=True),
}

# ── the engine ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _misbehave(misbehavior: Misbehavior, share: float = 0.5) -> Inject:
    async def inject(site: Site, seconds: float) -> None:
        site.engine.share, site.engine.misbehavior = share, misbehavior
        try:
            await asyncio.sleep(seconds)
        finally:
            site.engine.misbehavior = None

    return inject


_ENGINE: dict[str, Misbehavior] = {
    "hangs before the first token": engine.hang,
    "hangs in the middle": engine.stall,
    "ends its reply early": engine.end_early,
    "drops the connection": engine.drop,
    "answers garbage": engine.send_garbage,
    "answers no HTTP": engine.send_no_http,
    "answers a web page": engine.send_html,
    "redirects": engine.redirect,
    "repeats an event": engine.repeat_event,
    "omits an event": engine.omit_event,
    "continues after the end": engine.send_after_end,
    "samples nothing": engine.send_nothing,
    "aborts the generation": engine.abort,
    "fails in the middle": engine.fail_in_stream,
    "sends text without ids": engine.omit_ids,
    "sends too many log-probabilities": engine.add_logprobs,
    "sends an id past the vocabulary": engine.change_ids(10_000_000),
    "sends a negative id": engine.change_ids(-5),
    "sends an id of 40 bits": engine.change_ids(2**39),
    "sends NaN as a log-probability": engine.change_logprobs(float("nan")),
    "sends +3 as a log-probability": engine.change_logprobs(3.0),
    "sends null as a log-probability": engine.change_logprobs(None),
    "echoes another prompt": engine.echo_other_prompt,
    "status 500 storm": engine.answer_status(500),
    "status 429 storm": engine.answer_status(429),
    "status 503 storm": engine.answer_status(503),
}

# A model may have more ids than its tokenizer, and may end its turn at once.
_UNDETECTABLE = {"sends an id past the vocabulary", "samples nothing"}

# ── processes ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def _kill_gateway(site: Site, seconds: float) -> None:
    await site.restart()


async def _stop_gateway(site: Site, seconds: float) -> None:
    """Stop it as systemd does: calls in flight are aborted or finished."""
    await site.restart(signal.SIGTERM)


async def _kill_worker(site: Site, seconds: float) -> None:
    site.server.kill_worker(site.rng)


async def _kill_all_workers(site: Site, seconds: float) -> None:
    for pid in children(site.pid):
        os.kill(pid, signal.SIGKILL)


async def _pause(pids: list[int], seconds: float) -> None:
    """Stop processes with SIGSTOP for a while."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def _pause_front(site: Site, seconds: float) -> None:
    await _pause([site.pid], seconds)


async def _pause_worker(site: Site, seconds: float) -> None:
    await _pause([site.rng.choice(children(site.pid))], seconds)


# ── limits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _limit(what: int, value: int) -> Inject:
    """Lower a resource limit of the running gateway for a while."""

    async def inject(site: Site, seconds: float) -> None:
        before = {pid: resource.prlimit(pid, what) for pid in site.pids}
        for pid, (_, hard) in before.items():
            resource.prlimit(pid, what, (value, hard))
        site.client_side.drop_all()  # new connections need new file descriptors
        try:
            await asyncio.sleep(seconds)
        finally:
            for pid, limits in before.items():
                if Path(f"/proc/{pid}").exists():
                    resource.prlimit(pid, what, limits)
        await site.ensure_running()

    return inject


async def _limit_memory(site: Site, seconds: float) -> None:
    """Give a worker less memory than it uses, so that the kernel kills it."""
    name, worker = f"chaos-{os.getpid()}", site.rng.choice(children(site.pid))
    cgroups.apply_limits(name, Resources(memory_mb=1), [worker])
    try:
        async with asyncio.timeout(scaled(30)):  # only new memory counts, so the worker must first get calls
            while worker in children(site.pid):
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise TimeoutError("the kernel did not kill the worker") from None
    finally:
        cgroups.remove_group(name)


def _explain_missing_cgroups() -> str | None:
    """Return why the memory of a process cannot be limited here."""
    if "memory_mb" in cgroups.enforceable_limits():
        return None
    return "memory limits need control groups that can be written (run as root)"


def _move_clock(offset_s: float) -> Inject:
    """Move the wall clock of the gateway, and move it back."""

    async def inject(site: Site, seconds: float) -> None:
        site.clock.write_text(str(offset_s))
        try:
            await asyncio.sleep(seconds)
        finally:
            site.clock.write_text("0")

    return inject


# ── the disk ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _fill_disk(site: Site, seconds: float) -> None:
    """Take up all space. SQLite's log is emptied first, because there is room in it for many turns."""
    assert site.disk is not None
    with closing(sqlite3.connect(site.disk.folder / "turngate.db", timeout=scaled(5))) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    filler = await asyncio.to_thread(site.disk.fill)
    try:
        await asyncio.sleep(2 * seconds)
    finally:
        filler.unlink()
    await site.ensure_running()


async def _freeze_disk(site: Site, seconds: float) -> None:
    assert site.disk is not None
    await site.disk.freeze(seconds)


async def _slow_disk(site: Site, seconds: float) -> None:
    assert site.disk is not None
    await site.disk.freeze(0.2, times=max(2, round(seconds / 0.3)))


async def _fail_disk(site: Site, seconds: float) -> None:
    """Make the file system read-only. The operator stops the gateway, repairs the disk, and starts the gateway again."""
    assert site.disk is not None
    site.disk.fail()
    await asyncio.sleep(seconds)
    site.server.kill()
    await asyncio.to_thread(site.disk.repair)
    site.server.start()


# ── PostgreSQL ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def _kill_postgres(site: Site, seconds: float) -> None:
    assert site.postgres is not None
    await asyncio.to_thread(site.postgres.kill)
    await asyncio.sleep(seconds)
    await asyncio.to_thread(site.postgres.start)


async def _pause_postgres(site: Site, seconds: float) -> None:
    assert site.postgres is not None
    await _pause([site.postgres.pid, *children(site.postgres.pid)], seconds)


async def _cut_postgres(site: Site, seconds: float) -> None:
    assert site.postgres_side is not None
    site.postgres_side.cut()
    try:
        await asyncio.sleep(seconds)
    finally:
        site.postgres_side.mend()


async def _outlast_lease(site: Site, seconds: float) -> None:
    """Cut the cell off for longer than its lease: it must stop serving, and serve again afterwards."""
    await _cut_postgres(site, max(seconds, 1.5 * LEASE_S))


# ── weights ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _report_wrong_version(site: Site, seconds: float) -> None:
    """Let the engine report an update that did not complete: it must not be used until it reports another version."""
    site.engine.documents["/weight_info"] = {"weight_version": "turngate: loading 7"}
    try:
        await site.restart()  # the gateway checks its engines when it starts
        async with httpx.AsyncClient() as client, asyncio.timeout(scaled(30)):
            while not await _answers(client, site.server.url):
                await asyncio.sleep(0.05)
        await asyncio.sleep(seconds)
    finally:
        del site.engine.documents["/weight_info"]


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    """Return whether a gateway answers, even if it says that it has no engine."""
    try:
        await client.get(f"{url}/health")
    except httpx.HTTPError:
        return False
    return True


async def _kill_behind_fence(site: Site, seconds: float) -> None:
    """Kill the gateway between the pause and the resume of a weight update."""
    headers = {"authorization": f"Bearer {ADMIN}"}
    async with httpx.AsyncClient(base_url=site.server.url, headers=headers, timeout=scaled(20)) as client:
        (await client.post("/admin/fence/pause", json={"mode": "hold"})).raise_for_status()
        await asyncio.sleep(seconds / 2)
        await site.restart()
        await site.server.ready()
        (await client.post("/admin/fence/resume", json={"version": None})).raise_for_status()


def list_faults() -> list[Fault]:
    """Return every fault that is injected while agents use a gateway, place by place."""
    client = [
        Fault(f"client: {name}", "single", _disturb("client_side", how), keep_alive=not how.repeat)
        for name, how in _NETWORK.items()
    ]
    wire = [
        Fault(f"engine: {name}", "single", _disturb("engine_side", how), may_break=False)
        for name, how in _NETWORK.items()
    ]
    wire += [Fault("engine: connections refused", "single", _refuse_connections, may_break=False)]
    lies = [
        Fault(f"engine {name}", "single", _misbehave(how), may_break=False, may_damage=name in _UNDETECTABLE)
        for name, how in _ENGINE.items()
    ]
    return [
        *client,
        *wire,
        *lies,
        Fault("gateway: kill -9", "single", _kill_gateway),
        Fault("gateway: SIGTERM", "single", _stop_gateway),
        Fault("gateway: SIGSTOP", "single", _pause_front),
        Fault("gateway: kill -9 during a weight update", "single", _kill_behind_fence),
        Fault("engine reports weights that did not load", "single", _report_wrong_version),
        Fault("gateway: 24 file descriptors", "single", _limit(resource.RLIMIT_NOFILE, 24)),
        Fault("gateway: files up to 64 kB", "single", _limit(resource.RLIMIT_FSIZE, 65_536)),
        Fault("clock: an hour ahead", "single", _move_clock(3600), may_break=False),
        Fault("clock: an hour back", "single", _move_clock(-3600), may_break=False),
        Fault("workers: kill -9 of a worker", "workers", _kill_worker),
        Fault("workers: kill -9 of all workers", "workers", _kill_all_workers),
        Fault("workers: kill -9 of the front", "workers", _kill_gateway),
        Fault("workers: SIGTERM of the front", "workers", _stop_gateway),
        Fault("workers: SIGSTOP of a worker", "workers", _pause_worker),
        Fault("workers: SIGSTOP of the front", "workers", _pause_front),
        Fault("workers: out of memory", "workers", _limit_memory, explain_missing=_explain_missing_cgroups),
        Fault("workers: client resets", "workers", _disturb("client_side", _NETWORK["reset"])),
        Fault(
            "workers: engine black hole", "workers", _disturb("engine_side", _NETWORK["black hole"]), may_break=False
        ),
        Fault("disk: full", "disk", _fill_disk),
        Fault("disk: does not answer", "disk", _freeze_disk, may_break=False),
        Fault("disk: slow", "disk", _slow_disk, may_break=False),
        Fault("disk: fails and becomes read-only", "disk", _fail_disk),
        Fault("cell: kill -9", "cell", _kill_gateway),
        Fault("cell: kill -9 of PostgreSQL", "cell", _kill_postgres),
        Fault("cell: SIGSTOP of PostgreSQL", "cell", _pause_postgres),
        Fault("cell: cut off from PostgreSQL", "cell", _cut_postgres),
        Fault("cell: cut off for longer than its lease", "cell", _outlast_lease),
    ]
