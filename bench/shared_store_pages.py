"""Measure every query of the page, the lists of the admin API, and `turngate show`, on a shared store.

    python bench/shared_store_pages.py postgresql://user@host/database

Each round requests every route once, so that no route benefits from a request just before. The first request after a start and the first
round are printed separately. The exit status is 1 if the median of a route is over the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx

from turngate.cli.show import load_from_store
from turngate.config import ServeConfig
from turngate.errors import NotFound
from turngate.server.app import Gateway

LIMIT_MS = 200.0


def list_paths(session: str, group: str, total: int, newest: int) -> list[str]:
    lists = [
        "overview",
        "rollouts",
        *(f"rollouts?sort={sort}" for sort in ("-reward", "turns", "-seconds", "task", "-version", "status")),
        f"rollouts?offset={total // 2}",
        f"rollouts?offset={max(0, total - 50)}",
        "rollouts?class=agent+failed",
        "rollouts?class=graded&agent=bench&task=t17",
        f"rollouts?group={group}",
        "rollouts?q=t17",
        "rollouts?q=nothing+has+this+text",
        "groups",
        "groups?sort=-mean_reward",
        "groups?q=g12",
        f"group?name={group}",
        f"group/evidence?name={group}",
        "training",
        f"training?group={group[:3]}",
        "failures",
    ]
    parts = (
        "",
        "/tree",
        "/messages",
        "/tokens",
        "/export?format=rows",
        "/export?format=messages",
        "/export?format=trace",
    )
    page = [f"/page/api/{path}" for path in [*lists, *(f"rollouts/{session}{part}" for part in parts)]]
    page += [f"/page/api/export?group={group}&format=rows"]
    admin = ["sessions", "sessions?limit=1000", "feeds", f"events?wait=0&after={newest - 100}"]
    admin += [f"sessions/{session}{part}" for part in ("", "/trace", "/samples", "/events?wait=0")]
    return [*page, *(f"/admin/{path}" for path in admin), "/metrics"]


@asynccontextmanager
async def serve(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """Start a gateway on the store and log in, without any other request."""
    os.environ.setdefault("TURNGATE_ADMIN_KEY", secrets.token_hex(16))
    gateway = Gateway(ServeConfig(data=url))
    await gateway.start()
    headers = {"x-turngate-page": "1", "authorization": f"Bearer {gateway.admin_key}"}
    try:
        transport = httpx.ASGITransport(gateway)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", timeout=600, headers=headers
        ) as client:
            (await client.post("/page/login", json={"key": gateway.admin_key})).raise_for_status()
            yield client
    finally:
        await gateway.stop()


async def ask(client: httpx.AsyncClient, path: str) -> float:
    """Send one request, and return its duration in milliseconds."""
    began = time.perf_counter()
    (await client.get(path)).raise_for_status()
    return (time.perf_counter() - began) * 1000


async def wait_until_listed(client: httpx.AsyncClient) -> dict[str, int]:
    """Wait until the lists of a store that was just filled or migrated are complete."""
    began = time.perf_counter()
    while True:
        found = (await client.get("/page/api/overview")).raise_for_status().json()
        if not found["incomplete"] and not found["behind"]:
            break
        await asyncio.sleep(0.5)
    if (took := time.perf_counter() - began) > 1:
        print(f"the lists were filled in {took:.0f} s")
    return dict(found)


async def measure(url: str, rounds: int) -> bool:
    async with serve(url) as client:
        found = await wait_until_listed(client)
        one = (await client.get("/page/api/rollouts?class=graded")).json()["rollouts"][20]
    print(f"{found['rollouts']} rollouts in {found['groups']} groups")
    session = one["id"]
    paths = list_paths(session, one["group"], found["rollouts"], found["cursor"])
    async with serve(url) as client:
        first = await ask(client, "/page/api/rollouts")
        print(f"{'first request after a start':55} {first:8.1f} ms")
        times: dict[str, list[float]] = {path: [] for path in paths}
        for _ in range(rounds):
            for path in paths:
                times[path].append(await ask(client, path))
    slowest = first
    for path, taken in times.items():
        taken, started = sorted(taken[1:]), taken[0]
        slowest = max(slowest, statistics.median(taken))
        print(f"{path:55} p50 {statistics.median(taken):7.1f}  worst {taken[-1]:7.1f}  first round {started:7.1f} ms")
    for wanted in (session, session[:-1], "last"):
        taken = [read_for_show(url, wanted) for _ in range(rounds)]
        slowest = max(slowest, statistics.median(taken))
        print(
            f"turngate show {wanted:41} p50 {statistics.median(taken):7.1f}  worst {max(taken):7.1f} ms without starting Python"
        )
    print(f"slowest median: {slowest:.0f} ms; the limit is {LIMIT_MS:.0f} ms")
    return slowest < LIMIT_MS


def read_for_show(url: str, wanted: str) -> float:
    """Return how many milliseconds `turngate show` takes to read a session, including connecting to the store."""
    began = time.perf_counter()
    with suppress(NotFound):  # a prefix may match several
        load_from_store(url, wanted)
    return (time.perf_counter() - began) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    raise SystemExit(0 if asyncio.run(measure(options.url, options.rounds)) else 1)


if __name__ == "__main__":
    main()
