"""Whole sessions as JSON: the tree with ids, log-probabilities and messages, and the training rows.

Encoding a long session takes most of a second. A separate thread reads the session from the store and encodes it, so that the event loop is
not blocked. The thread reads a consistent snapshot, even while turns are being written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from turngate.client.protocol import SessionTrace, TraceContext, TracePreamble, TraceSideData, TraceTurn
from turngate.errors import NotFound, StoreError
from turngate.store.location import open_store_for_reading
from turngate.store.outcomes import RecordedOutcome
from turngate.store.reader import StoreReader
from turngate.store.store import Store
from turngate.telemetry.logs import redact_known
from turngate.trace.roles import RoleDecision, decide_roles
from turngate.trace.sample import Sample, TrainingPolicy, add_turn_rewards, build_samples
from turngate.trace.session import Session
from turngate.trace.tree import Context, Sampled
from turngate.trace.turn_rewards import TurnReward
from turngate.types import SideArray, encode_array
from turngate.verify import RowSource

T = TypeVar("T")


class SessionView(msgspec.Struct, frozen=True):
    """A stored session with its messages and tools."""

    session: Session
    texts: Mapping[int, bytes]  # JSON by node id: a list of messages for a context, one message for a turn
    preambles: Mapping[bytes, tuple[bytes, bytes]]  # tools and template arguments as JSON, by digest
    side: Mapping[int, Sequence[SideArray]] = {}  # by node id, if requested
    turn_rewards: tuple[TurnReward, ...] = ()  # from its outcome

    def encode_trace(self) -> bytes:
        """Encode the whole tree in the format of `GET /admin/sessions/{id}/trace`.

        Nodes are encoded one by one, so that other threads can run between them.
        """
        session = self.session
        decisions = decide_roles(session.trace)
        trace = SessionTrace(
            session=session.id,
            status=session.status,
            stop=session.stop,
            config=session.config,
            vocabulary=session.vocabulary,
            preambles={
                digest.hex(): TracePreamble(msgspec.Raw(tools), msgspec.Raw(kwargs))
                for digest, (tools, kwargs) in self.preambles.items()
            },
            nodes=[
                encode_piece(
                    _context_to_wire(node, self.texts)
                    if isinstance(node, Context)
                    else _turn_to_wire(node, self.texts, decisions[node.id])
                )
                for node in session.trace.nodes
            ],
            refused=session.trace.refused,
        )
        return encode_json(trace)

    def samples(
        self,
        *,
        keep_empty: bool = False,
        policy: TrainingPolicy | None = None,
        side: Mapping[int, Sequence[SideArray]] | None = None,
        masks: bool = False,
    ) -> list[Sample]:
        """Return the training rows. `side` is the side data to add to them, by node id.

        With `masks`, turns that can be trained only with their sampling masks also count as trained, even if `side` does not include
        the masks.
        """
        policy = policy or self.session.config.policy
        rows = build_samples(self.session.trace, policy, keep_empty=keep_empty, side=side, masks=masks)
        return add_turn_rewards(rows, self.turn_rewards)


class SessionViews:
    """Builds session views in a separate thread. Call `close` to end it."""

    def __init__(self, store: Store) -> None:
        self._reader = StoreReader(store, "looks")

    def close(self) -> None:
        self._reader.close()

    async def build(self, session_id: str, make: Callable[[SessionView], T], side: Collection[str] = ()) -> T:
        """Load a session in the thread, call `make` with its view, and return the result. `side` names the side data to load.

        `make` should work in small steps, because a long call into C code blocks all threads.
        """

        def query(store: Store) -> T:
            with store.snapshot():
                view = load_session_view(store, session_id, side)
            return make(view)

        return await self._reader.run(query)

    async def read(self, query: Callable[[Store], T]) -> T:
        """Run a query in the thread, over one snapshot of the store."""

        def run(store: Store) -> T:
            with store.snapshot():
                return query(store)

        return await self._reader.run(run)

    async def shapes(self, first: int, last: int) -> dict[int, tuple[int, int]]:
        """Return the numbers of turns and roots of each session, by key, for keys from `first` through `last`.

        Sessions without nodes are omitted.
        """
        return await self._reader.run(lambda store: store.shapes(first, last))


def load_session_view(store: Store, session_id: str, side: Collection[str] = ()) -> SessionView:
    row = store.find(session_id)
    if row is None:
        raise NotFound(f"unknown session {redact_known(session_id)!r}")
    # Load the trace before the messages. Otherwise, a node that is added in between would be in the trace without its messages.
    session = store.load(row)
    preambles = store.preambles(row.key)
    if not all(_is_json(tools, list | dict) and _is_json(kwargs, dict) for tools, kwargs in preambles.values()):
        raise StoreError(
            f"session {session_id}: its tools or template arguments are damaged on disk, so its trace cannot be used; restore the store "
            "from a backup, or delete the session"
        )
    outcome = store.outcomes.find(row.key)
    rewards = (outcome.turn_rewards or ()) if isinstance(outcome, RecordedOutcome) else ()
    return SessionView(session, store.messages(row.key), preambles, store.side_data.load(session, side), rewards)


def _is_json(stored: object, kind: Any) -> bool:
    if not isinstance(stored, bytes):
        return False
    try:
        msgspec.json.decode(stored, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def encode_json(value: object) -> bytes:
    return msgspec.json.encode(value, enc_hook=encode_array)


def encode_piece(value: object) -> msgspec.Raw:
    """Encode a value, so that it can be inserted into a larger JSON document without being encoded again."""
    return msgspec.Raw(encode_json(value))


def _context_to_wire(node: Context, texts: Mapping[int, bytes]) -> TraceContext:
    return TraceContext(
        id=node.id,
        parent=None if node.parent is None else node.parent.id,
        ids=node.ids,
        messages=msgspec.Raw(texts[node.id]),
        preamble=node.info.preamble.hex(),
        cause=node.info.cause,
        detail=node.info.detail or msgspec.UNSET,
        dialect=node.info.dialect,
        signals={name: value for name, value in msgspec.structs.asdict(node.info.signals).items() if value},
    )


def _turn_to_wire(node: Sampled, texts: Mapping[int, bytes], decision: RoleDecision) -> TraceTurn:
    info = node.info
    return TraceTurn(
        id=node.id,
        parent=node.parent.id,
        role=decision.role,
        evidence=decision.describe(),
        ids=node.ids,
        logprobs=node.logprobs,
        message=msgspec.Raw(texts[node.id]),
        finish=info.finish,
        cause=info.cause,
        version_start=info.version_start,
        version_end=info.version_end,
        started=info.started,
        ended=info.ended,
        sampling=msgspec.Raw(info.sampling or b"null"),
        biases=info.biases,
        capture=info.capture,
        fault=info.fault,
        engine=info.engine,
        lost=info.lost,
        cached=info.cached if info.cached >= 0 else msgspec.UNSET,
        version_runs=info.version_runs or msgspec.UNSET,
        side=tuple(TraceSideData(*msgspec.structs.astuple(side)) for side in info.side) or msgspec.UNSET,
        delivered=node.delivered,
    )


@contextmanager
def open_row_source(data: str | Path) -> Iterator[RowSource]:
    """Yield a function that builds a session's training rows as the gateway does. A gateway may be using the store at the same time."""
    store = open_store_for_reading(data)

    def build_rows(session_id: str, everything: bool) -> list[Sample]:
        view = load_session_view(store, session_id)
        return view.samples(keep_empty=everything, side=store.side_data.load(view.session))

    try:
        yield build_rows
    finally:
        store.close()
