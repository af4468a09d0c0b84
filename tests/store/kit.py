"""Stores on both databases, and small traces for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from turngate.store.events import NewEvent
from turngate.store.outcomes import RecordedOutcome
from turngate.store.shared.store import SharedStore
from turngate.store.shared.url import parse_database_url
from turngate.store.sqlite import NewTurn, Store
from turngate.trace.session import SessionConfig
from turngate.trace.tree import Context, ContextInfo, Sampled, SampledInfo
from turngate.types import Json

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


def put_outcome(store: Store, key: int, name: str, group: str, *, at: float = 2.0, **outcome: Any) -> bytes | None:
    written = RecordedOutcome(kind="graded", reward=1.0, group=group, **outcome).encode()
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
