"""A batch of the Python API on a Ray cluster, run by `test_api.py` with the Python of the part `ray`. Prints its results as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

import turngate as tg


async def main(address: str, url: str, model: str, tasks: str) -> None:
    results = await tg.batch(
        tasks,
        n=2,
        model=model,
        agent="shell",
        options={"command": "exec python3 -"},
        sandbox="local",
        cluster=address,
        data=url,
        concurrency=2,
    )
    found = [
        {
            "task": one.task_id,
            "group": one.group,
            "kind": one.kind,
            "reward": one.reward,
            "session": one.session,
            "text": [turn.text for turn in one.turns],
            "tokens": sum(len(turn.pieces) for turn in one.turns),
            "stdout": one.logs["stdout"],
            "rows": len(one.rows),
            "notes": [*one.notes],
        }
        for one in results
    ]
    print(json.dumps({"results": found, "advantages": results.advantages()}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
