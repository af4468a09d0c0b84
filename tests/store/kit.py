"""Stores on both databases, and small traces for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from turngate.common.database_url import parse_database_url
from turngate.store.events import NewEvent, insert_event
from turngate.store.outcomes import RecordedOutcome
from turngate.store.shared.store import SharedStore
from turngate.store.store import _INSERT_CONTEXT, _INSERT_PREAMBLE, _INSERT_SAMPLED, NewTurn, Store, _node_row
from turngate.trace.session import SessionConfig
from turngate.trace.side_data import describe_arrays
from turngate.trace.tree import Context, ContextInfo, Sampled, SampledInfo
from turngate.types import Json, SideArray

OpenStore = Callable[[], Store]
_secrets = itertools.count()


def open_shared(url: str, **options: Any) -> SharedStore:
    return SharedStore(parse_database_url(url), **options)


def event(session: str, kind: str, at: float = 1.0, **data: Json) -> NewEvent:
    return NewEvent(session, kind, msgspec.json.encode(data), at)


def add_session(store: Store, name: str, at: float = 1.0, **config: Any) -> int:
    secret = f"{name}-{next(_secrets)}".encode()
    return store.add_session(name, secret, SessionConfig(**config), at, event=event(name, "opened", at))


def new_turn(key: int, number: int, name: str = "", at: float = 1.0, finish: str = "stop") -> NewTurn:
    """Build a turn that does not depend on other turns. Its nodes are 2n+1 and 2n+2."""
    context = Context(2 * number + 1, None, np.arange(3, dtype=np.int32), ContextInfo(b"p", b"m" * 16, "u", False))
    info = SampledInfo(b"m", b"", b"", finish, number, number, 0.0, at)
    sampled = Sampled(2 * number + 2, context, np.arange(2, dtype=np.int32), np.zeros(2, np.float32), info)
    announced = event(name, "turn", at, sampled_tokens=2, finish=finish) if name else None
    return NewTurn(key, context, b"[]", sampled, b'{"role":"assistant"}', (b"digest", b"[]", b"{}"), announced)


def turn_with(key: int, number: int, *arrays: SideArray, name: str = "") -> NewTurn:
    """Build a turn with side data."""
    turn = new_turn(key, number, name)
    info = msgspec.structs.replace(turn.sampled.info, side=describe_arrays(arrays))
    old = turn.sampled
    sampled = Sampled(old.id, old.parent, old.ids, old.logprobs, info)
    return msgspec.structs.replace(turn, sampled=sampled, side=arrays)


def put_outcome(store: Store, key: int, name: str, group: str, *, at: float = 2.0, **outcome: Any) -> bytes | None:
    written = RecordedOutcome(**{"kind": "graded", "reward": 1.0, "group": group, **outcome}).encode()
    return store.outcomes.put(key, written, event(name, "outcome", at, group=group), replace=True)


def finish_rollout(store: Store, name: str, group: str, *, at: float = 2.0) -> int:
    """Record a session with one turn and an outcome, and return its key."""
    key = add_session(store, name, at)
    store.commit([new_turn(key, 0, name, at)])
    store.close_session(key, "sealed", "", at, event(name, "sealed", at))
    put_outcome(store, key, name, group, at=at)
    return key


def sqlite_opener(folder: Path) -> OpenStore:
    return lambda: Store(folder)


def copy_sessions(source: Store, target: Store) -> None:
    """Copy all sessions, oldest first. Their keys are assigned anew, so their checksums are computed anew."""
    for row in reversed(source.sessions(limit=1000)):
        events = source.events.page(row.id, 0, 10_000)
        session, messages = source.load(row), source.messages(row.key)
        key = target.add_session(row.id, row.id.encode(), row.config, row.opened, row.vocabulary)
        with target._writing() as db:
            for digest, preamble in source.preambles(row.key).items():
                db.execute(_INSERT_PREAMBLE, (key, digest, *preamble))
            for node in session.trace.nodes:
                cells = _node_row(key, node, messages[node.id])
                db.execute(
                    *((_INSERT_CONTEXT, cells) if isinstance(node, Context) else (_INSERT_SAMPLED, (*cells, key)))
                )
            for one in events:
                if one.kind != "outcome":
                    insert_event(db, NewEvent(one.session, one.kind, msgspec.json.encode(one.data), one.time))
        target.close_session(key, row.status, row.stop, row.closed or 0.0)
        outcome = source.outcomes.find(row.key)
        if isinstance(outcome, RecordedOutcome):
            (announced,) = [one for one in events if one.kind == "outcome"]
            data = msgspec.json.encode(announced.data)
            target.outcomes.put(key, outcome.encode(), NewEvent(row.id, "outcome", data, announced.time), replace=False)
    with source._reading() as db:
        settings = db.execute(
            "SELECT name, value FROM settings WHERE name LIKE 'tokenizer:%' OR name LIKE 'renderer:%'"
        )
        target.set_settings(dict(settings.fetchall()))
