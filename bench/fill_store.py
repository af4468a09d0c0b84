"""Fill a data folder with many recorded sessions, for measurements: `python bench/fill_store.py FOLDER [--turns 1000000]`.

A gateway records a few sessions of 20 turns and a long one. Then copies of the short ones are added, each with its own id, times, task,
group and reward, and with valid checksums, so `turngate verify` accepts them. Texts are short: a million turns need about 3 GB.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import orjson
import uvloop
from agent import Agent, Http, _dumps, tool_result
from overhead import QWEN3, Bench, _admin
from processes import Gateway

from turngate.store.archived_session import ARCHIVED_TABLES, ArchivedSession, read_session
from turngate.store.attempts import AttemptRow
from turngate.store.checksums import node_checksum
from turngate.store.outcomes import RecordedOutcome
from turngate.store.shipment import NODE_COLUMNS, SESSION_COLUMNS, SESSION_TABLES
from turngate.store.store import Store
from turngate.trace.session import SessionConfig
from turngate.trace.tree import SampledInfo
from turngate.types import Message

LONG = "long"  # id of the long session
TURNS = 20  # of a short session
LONG_TURNS = 1000
TEMPLATES = 8
GROUP = 8  # sessions per group
BATCH = 200  # sessions per transaction
STEP_S = 10.0  # between the openings of two copies
_OPENED, _CLOSED = 3, 4  # columns of an archived session
_info = msgspec.msgpack.Decoder(SampledInfo)


class ShortAgent(Agent):
    """An agent whose prompts and tool results are short."""

    def __init__(self, http: Http, session: str, key: str, seed: int) -> None:
        super().__init__(http, session, key, stream=seed % 2 == 1, seed=seed)
        self.conversation = [Message("system", "You are a coding agent."), Message("user", f"Fix task {seed}.")]
        self._messages = [_dumps({"role": m.role, "content": m.content}) for m in self.conversation]

    def _run_tool(self) -> str:
        return tool_result(self._seed, len(self.sizes))[:300]


async def open_agent(gateway: Gateway, seed: int, **body: object) -> ShortAgent:
    settings = {"model": "bench", "metadata": {"agent": "bench", "task": f"task-{seed % 500}"}, **body}
    opened = await _admin(gateway, "POST", "/admin/sessions", 201, orjson.dumps(settings))
    return ShortAgent(await Http.connect(gateway.port), opened["id"], opened["api_key"], seed)


async def end_agent(gateway: Gateway, agent: ShortAgent, reward: float) -> None:
    agent.close()
    await _admin(gateway, "POST", f"/admin/sessions/{agent.session}/seal", 200, b"{}")
    outcome = {"kind": "graded", "reward": reward, "resolved": reward == 1.0, "group": "recorded", "task": "task"}
    await _admin(gateway, "PUT", f"/admin/sessions/{agent.session}/outcome", 200, orjson.dumps(outcome))


async def record_sessions(gateway: Gateway) -> list[str]:
    """Record the long session and the templates of the copies. Return the ids of the templates."""
    agents = [await open_agent(gateway, seed) for seed in range(TEMPLATES)]
    for _ in range(TURNS):
        await asyncio.gather(*(agent.turn() for agent in agents))
    long = await open_agent(gateway, TEMPLATES, id=LONG)
    for _ in range(LONG_TURNS):
        await long.turn()
    for agent in (*agents, long):
        await end_agent(gateway, agent, 1.0)
    return [agent.session for agent in agents]


def copy_session(template: ArchivedSession, number: int, shift_s: float) -> ArchivedSession:
    """Return a copy of a session with another id, task, group and reward, moved in time."""
    name, group, task = f"copy-{number:08d}", f"group-{number // GROUP:07d}", f"task-{number // GROUP % 500}"
    session = list(template.session)
    session[0], session[1] = name, hashlib.sha256(name.encode()).digest()
    config = msgspec.json.decode(session[2], type=SessionConfig)
    metadata = {"agent": ("pi", "codex", "claude-code")[number % 3], "task": task, "group": group}
    session[2] = msgspec.json.encode(msgspec.structs.replace(config, metadata=metadata))
    session[_OPENED] += shift_s
    session[_CLOSED] += shift_s
    assert template.outcome is not None
    recorded, written = template.outcome
    reward = float(number % 3 == 0)
    outcome = msgspec.structs.replace(
        msgspec.json.decode(written, type=RecordedOutcome),
        group=group,
        task=task,
        reward=reward,
        resolved=reward == 1.0,
    )
    announced = msgspec.json.encode(outcome.event_data())
    events = [
        (at + shift_s, kind, announced if kind == "outcome" else data) for at, kind, data in template.tables["events"]
    ]
    attempts = [
        msgspec.structs.replace(one, session=name, rollout=name, started=one.started + shift_s)
        for one in template.attempts
    ]
    return ArchivedSession(
        tuple(session),
        [_move_node(node, shift_s) for node in template.nodes],
        {**template.tables, "events": events},
        attempts,
        (recorded + shift_s, outcome.encode()),
    )


def _move_node(node: tuple[Any, ...], shift_s: float) -> tuple[Any, ...]:
    number, parent, kind, ids, logprobs, packed, *rest = node
    if kind == "sampled":
        info = _info.decode(packed)
        moved = msgspec.structs.replace(info, started=info.started + shift_s, ended=info.ended + shift_s)
        packed = msgspec.msgpack.encode(moved)
    return (number, parent, kind, ids, logprobs, packed, *rest)


def add_copies(data: Path, templates: list[str], turns: int) -> int:
    """Write copies of the templates until the store has this many turns. Return the number of copies."""
    copies = max(0, turns - LONG_TURNS) // TURNS
    began = time.monotonic()
    with closing(Store(data)) as store:
        read, first = read_templates(store, templates)
        for start in range(0, copies, BATCH):
            numbers = range(start, min(start + BATCH, copies))
            batch = {first + n: copy_session(read[n % len(read)], n, -STEP_S * (copies - n)) for n in numbers}  # by key
            with store.database.writing() as db:
                for table, columns, rows in list_rows(batch):
                    marks = ",".join("?" * len(columns))
                    db.executemany(f"INSERT INTO {table} ({','.join(columns)}) VALUES ({marks})", rows)  # type: ignore[attr-defined]
            if start // BATCH % 25 == 24:
                print(f"{start + BATCH:,} of {copies:,} sessions, {time.monotonic() - began:.0f} s", flush=True)
    return copies


def read_templates(store: Store, names: list[str]) -> tuple[list[ArchivedSession], int]:
    """Return the templates, and the first free session key."""
    read = []
    with closing(store.open_reader()) as reader, reader.snapshot(), reader.database.reading() as db:
        for name in names:
            row = reader.find(name)
            assert row is not None
            read.append(read_session(db, row.key))
        (newest,) = db.execute("SELECT max(key) FROM sessions").fetchone()
    return read, newest + 1


def list_rows(batch: dict[int, ArchivedSession]) -> Iterator[tuple[str, Sequence[str], list[tuple[Any, ...]]]]:
    """Yield the rows of sessions by table, with the names of the columns."""
    yield "sessions", ("key", *SESSION_COLUMNS), [(key, *one.session) for key, one in batch.items()]
    nodes = [
        (key, *cells, delivered, node_checksum(key, *cells))
        for key, one in batch.items()
        for *cells, delivered in one.nodes
    ]
    yield "nodes", ("session", *NODE_COLUMNS), nodes
    for table, columns in SESSION_TABLES.items():
        rows = [(key, *row) for key, one in batch.items() for row in one.tables.get(table, ())]
        yield table, ("session", *columns), rows
    outcomes = [(key, *one.outcome) for key, one in batch.items() if one.outcome is not None]
    yield "outcomes", ("session", "recorded", "outcome"), outcomes
    attempts = [msgspec.structs.astuple(row) for one in batch.values() for row in one.attempts]
    yield "attempts", AttemptRow.__struct_fields__, attempts
    events = [(one.id, *row) for one in batch.values() for row in one.tables["events"]]
    yield "events", ("session", *ARCHIVED_TABLES["events"]), events


def fill(bench: Bench, data: Path, turns: int) -> None:
    began = time.monotonic()
    data.parent.mkdir(parents=True, exist_ok=True)
    gateway = Gateway(data.parent, bench.engine, bench.tokenizer, data.name)
    try:
        templates = uvloop.run(record_sessions(gateway))
    finally:
        gateway.stop()
    copies = add_copies(data, templates, turns)
    size = sum(file.stat().st_size for file in data.glob("turngate.db*")) / 1e9
    print(f"{turns:,} turns in {copies:,} sessions, {size:.2f} GB, written in {time.monotonic() - began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill a data folder with many recorded sessions.")
    parser.add_argument("folder", type=Path, help="a new data folder")
    parser.add_argument("--turns", type=int, default=1_000_000)
    args = parser.parse_args()
    if args.folder.exists():
        raise SystemExit(f"{args.folder} already exists; choose a new folder")
    with tempfile.TemporaryDirectory(prefix="turngate-bench-") as folder, Bench(Path(folder), QWEN3) as bench:
        fill(bench, args.folder.absolute(), args.turns)


if __name__ == "__main__":
    main()
