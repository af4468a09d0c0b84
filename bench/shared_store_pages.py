"""Measure the page's queries on a shared store: the first request, which reads all rollouts, and then each route.

python bench/shared_store_pages.py postgresql://user@host/database
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import statistics
import time

import httpx

from turngate.config import ServeConfig
from turngate.server.app import Gateway

LIMIT_MS = 200.0
ROUNDS = 5


def list_paths(session: str, group: str) -> list[str]:
    lists = [
        "overview",
        "rollouts",
        "rollouts?sort=reward",
        "rollouts?text=t17",
        "groups",
        f"group?name={group}",
        "training",
        "failures",
    ]
    return lists + [f"rollouts/{session}{part}" for part in ("", "/tree", "/messages", "/events")]


async def measure(url: str) -> bool:
    os.environ.setdefault("TURNGATE_ADMIN_KEY", secrets.token_hex(16))
    gateway = Gateway(ServeConfig(data=url))
    await gateway.start()
    slowest = 0.0
    try:
        transport = httpx.ASGITransport(gateway)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=600) as client:
            own = {"x-turngate-page": "1"}
            (await client.post("/page/login", json={"key": gateway.admin_key}, headers=own)).raise_for_status()
            began = time.perf_counter()
            found = (await client.get("/page/api/rollouts")).raise_for_status().json()
            first = found["rollouts"][0]
            print(f"first request, {found['total']} rollouts: {time.perf_counter() - began:.1f} s")
            for path in list_paths(first["id"], first.get("group", "")):
                times = []
                for _ in range(ROUNDS):
                    began = time.perf_counter()
                    response = (await client.get(f"/page/api/{path}")).raise_for_status()
                    times.append((time.perf_counter() - began) * 1000)
                slowest = max(slowest, statistics.median(times))
                print(
                    f"{path:45} {response.status_code}  median {statistics.median(times):7.1f} ms  worst {max(times):7.1f} ms"
                )
    finally:
        await gateway.stop()
    print(f"slowest median: {slowest:.0f} ms; the limit is {LIMIT_MS:.0f} ms")
    return slowest < LIMIT_MS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    raise SystemExit(0 if asyncio.run(measure(parser.parse_args().url)) else 1)


if __name__ == "__main__":
    main()
