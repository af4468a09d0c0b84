"""Open, find, seal, cancel and delete sessions.

`Sessions` keeps a worker's open sessions in memory from their first use on. `eviction.py` drops the traces of idle sessions,
`housekeeping.py` seals idle sessions, and `stale_sessions.py` cancels sessions that no feed can use any more.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from turngate.common import clock
from turngate.common.sharding import SINGLE_SHARD, Shard, new_secret
from turngate.common.validation import explain_error
from turngate.errors import BadRequest, Conflict, NotFound, StoreError
from turngate.gateway.events import Events
from turngate.gateway.loading import SharedLoads, SlicedReader, TimeSlicer
from turngate.store.events import new_event
from turngate.store.projects import DEFAULT_PROJECT
from turngate.store.score_cache import locate_store_cache, remove_scores
from turngate.store.store import SessionRow, Store
from turngate.telemetry.logs import redact_known
from turngate.telemetry.metrics import Metrics
from turngate.trace.session import Session, SessionConfig, Status, check_rollout, check_session_id
from turngate.trace.signals import find_faults
from turngate.trace.tool_schema import check_tools
from turngate.types import STALE, SUPERSEDED, Mode, Sampling


class Sessions:
    """The sessions of one worker of a gateway."""

    def __init__(
        self,
        store: Store,
        events: Events,
        *,
        modes: tuple[Mode, ...] = ("exact",),
        models: tuple[str, ...] = (),
        vocabulary: str = "",
        shard: Shard = SINGLE_SHARD,
        metrics: Metrics | None = None,
        on_close: Callable[[str], None] = lambda session_id: None,
        on_end: Callable[[str], None] = lambda session_id: None,
        require_room: Callable[[], None] = lambda: None,
        project: str = DEFAULT_PROJECT,
        slicer: TimeSlicer | None = None,
    ) -> None:
        """`on_close` frees the engine's resources for a session. `on_end` is called for each session that ends without being deleted.

        `require_room` raises an error if no session may be opened at the moment.
        """
        self.modes = modes  # the modes this gateway serves; the first is the default
        self._models = models  # empty: any name
        self._vocabulary = vocabulary
        self._store = store
        self._events = events
        self._shard = shard  # sessions of other workers are not kept in memory here
        self._metrics = metrics or Metrics()
        self._on_close = on_close
        self._on_end = on_end
        self._require_room = require_room
        self._project = project
        self._reader = SlicedReader(store, slicer or TimeSlicer())
        self._loads: SharedLoads[str, Session] = SharedLoads()  # by session id
        self._started = clock.now()
        self._stopping = False  # if set, calls of sessions that are still being loaded must not start
        self._live: dict[str, Session] = {}
        self._ended: list[Session] = []  # ended sessions that the evictor has not collected yet
        self._by_secret: dict[bytes, str] = {
            secret: session_id for session_id, secret, _ in store.open_sessions() if shard.owns(session_id)
        }
        self._secret_of: dict[str, bytes] = {session_id: secret for secret, session_id in self._by_secret.items()}

    @property
    def default_mode(self) -> Mode:
        self._require_modes()
        return self.modes[0]

    @property
    def open_count(self) -> int:
        """Number of open sessions in this worker."""
        return len(self._secret_of)

    @property
    def evicted_count(self) -> int:
        """Number of this worker's open sessions whose trace is not in memory."""
        return len(self._secret_of) - sum(not session.is_evicted for session in self._live.values())

    def open(self, config: SessionConfig, session_id: str | None = None) -> tuple[Session, str]:
        """Open a session. Return it with its secret, which cannot be read again. Raise `Conflict` if the id is already used."""
        self._require_room()
        self._check_config(config)
        if session_id is None:
            session_id = self._shard.new_session_id()
        else:
            check_session_id(session_id, "id")
        secret = new_secret(session_id, "" if self._project == DEFAULT_PROJECT else self._project)
        digest = _digest(secret)
        opened = clock.now()
        event = new_event(session_id, "opened", {"mode": config.mode, "model": config.model})
        try:
            key = self._store.add_session(session_id, digest, config, opened, self._vocabulary, event)
        except KeyError:
            raise Conflict(f"session {session_id!r} already exists; choose a different id", param="id") from None
        session = Session(session_id, key, config, opened)
        session.vocabulary = self._vocabulary
        self._live[session_id] = session
        self._by_secret[digest] = session_id
        self._secret_of[session_id] = digest
        self._metrics.count("turngate_sessions_opened_total", config.mode)
        self._events.wake(session_id)
        return session, secret

    def _require_modes(self) -> None:
        if not self.modes:
            raise Conflict(
                "this gateway serves a shared store and opens no sessions; open them at the gateway of a cell (`turngate cell`)"
            )

    def _check_config(self, config: SessionConfig) -> None:
        """Validate constraints that the types of `SessionConfig` cannot express."""
        self._require_modes()
        if config.mode not in self.modes:
            raise BadRequest(
                f"mode {config.mode!r} is not served by this gateway (it serves: {', '.join(self.modes)})", param="mode"
            )
        if config.model and self._models and config.model not in self._models:
            raise BadRequest(
                f"model {config.model!r} is not served by this gateway (it serves: {', '.join(self._models)})",
                param="model",
            )
        if config.max_tokens is not None and config.max_tokens < 1:
            raise BadRequest(
                f"max_tokens must be 1 or more, not {config.max_tokens}; leave it out to use the agent's value",
                param="max_tokens",
            )
        try:
            msgspec.convert(config.sampling, Sampling)
        except msgspec.ValidationError as error:
            message, field = explain_error(error, Sampling)
            raise BadRequest(f"sampling.{message}", param=f"sampling.{field}") from None
        check_rollout(config.rollout)
        if config.attempt > 1 and not config.rollout:
            raise BadRequest(
                f"attempt {config.attempt} needs the name of its rollout; also set 'rollout'", param="rollout"
            )
        for field, wrong in find_faults(config.signals):
            raise BadRequest(f"{field}: {wrong}", param=field)
        check_tools(config.tools)

    # ── find ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def find(self, session_id: str) -> Session:
        """Return a session. If it is not in memory, load it from the store. Requests that need it in the meantime share the load."""
        live = self._live.get(session_id)
        return live if live is not None else await self._loads.join(session_id, partial(self._load, session_id))

    async def _load(self, session_id: str) -> Session:
        session = await self._reader.read(self.find_row(session_id))
        self._reader.find_row(session.key)
        if session.status == "open" and self._shard.owns(session_id):
            # Idle time starts now: the gateway may have been down for longer than the idle limit.
            session.last_used = clock.now()
            session.ending = "stopping" if self._stopping else ""
            self._live[session_id] = session
        return session

    def find_row(self, session_id: str) -> SessionRow:
        row = self._store.find(session_id)
        if row is None:
            raise NotFound(f"unknown session {redact_known(session_id)!r}")
        return row

    def find_live(self, session_id: str) -> Session | None:
        """Return the session if it is open and has been used since this worker started."""
        return self._live.get(session_id)

    async def find_by_secret(self, secret: str) -> Session | None:
        """Return the session with this secret, or None. Unless it is one of this worker's open sessions, its trace is not loaded.

        The lookup uses a hash, so that its timing reveals nothing about the secret.
        """
        digest = _digest(secret)
        session_id = self._by_secret.get(digest)
        if session_id is not None:
            return await self.find(session_id)
        row = self._store.find_secret(digest)
        return None if row is None else _load_closed_session(row)

    def find_id_by_secret(self, secret: str) -> str | None:
        """Return the id of the session with this secret, whichever worker owns it."""
        digest = _digest(secret)
        if (known := self._by_secret.get(digest)) is not None:
            return known
        row = self._store.find_secret(digest)
        return None if row is None else row.id

    def is_secret_of(self, secret: str, session_id: str) -> bool:
        digest = self._secret_of.get(session_id)
        if digest is None:
            row = self._store.find_secret(_digest(secret))
            return row is not None and row.id == session_id
        return secrets.compare_digest(digest, _digest(secret))

    def knows(self, session_id: str) -> bool:
        """Return whether the session exists, or a runner has announced events for it. A runner may do so before the session is opened."""
        return session_id in self._live or self._store.find(session_id) is not None or self._events.knows(session_id)

    def live(self) -> Iterable[Session]:
        """Return the sessions in memory: those that are open and have been used since this worker started."""
        return self._live.values()

    def open_digests(self) -> dict[str, bytes]:
        """Return the ids of the open sessions, each with the digest of its secret.

        The digest distinguishes a session from a later one with the same id.
        """
        return dict(self._secret_of)

    def is_open(self, session_id: str, digest: bytes) -> bool:
        """Return whether a session is still open. `digest` is the digest of its secret."""
        return self._secret_of.get(session_id) == digest

    def find_idle(self, now: float, idle_s: float) -> list[str]:
        """Return the ids of the open sessions that have been idle for more than `idle_s` seconds.

        The time counts from the last call, or from when this worker opened or loaded the session, if that was later. For a session that
        has not been loaded since this worker started, it counts from the worker's start.
        """
        return [session_id for session_id in self._secret_of if self.is_idle(session_id, now, idle_s)]

    def is_idle(self, session_id: str, now: float, idle_s: float) -> bool:
        """Return whether a session is open and has been idle for more than `idle_s` seconds (see `find_idle`).

        A session that is busy or is being loaded is not idle.
        """
        live = self._live.get(session_id)
        if live is not None:
            return not live.busy and now - live.last_used > idle_s
        return session_id in self._secret_of and session_id not in self._loads and now - self._started > idle_s

    def take_ended(self) -> list[Session]:
        """Return the sessions that have ended since this was last called. Their traces may still be in memory."""
        ended, self._ended = self._ended, []
        return ended

    # ── end ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def seal(self, session_id: str, stop: str = "") -> Session:
        """End a session and abort its calls in flight. Sealing a session again has no effect."""
        return await self.end(session_id, "sealed", stop)

    async def cancel(self, session_id: str) -> Session:
        return await self.end(session_id, "cancelled", "cancelled")

    async def delete(self, session_id: str) -> None:
        try:
            session = await self.end(session_id, "cancelled", "deleted")
        except StoreError:
            if session_id in self._live:
                raise
            session = _load_closed_session(self.find_row(session_id))  # a damaged trace must not prevent its deletion
        async with session.ending_lock:
            self._store.outbox.require_shipped(session.key, session_id)
            self._store.delete_session(session.key, new_event(session_id, "deleted", {}))
            self._forget(session)
        self._events.wake(session_id)
        await asyncio.to_thread(remove_scores, locate_store_cache(self._store), session_id)

    async def end(self, session_id: str, status: Status, stop: str) -> Session:
        session = await self.find(session_id)
        async with session.ending_lock:  # a second caller waits for the first
            if session.status != "open":
                return session
            # Calls in flight record the tokens sampled so far before the session is closed.
            await session.abort_calls(status)
            # If a limit was reached, it remains the stop reason, unless the session is stale or superseded.
            stop_reason = stop if stop in (STALE, SUPERSEDED) else session.stop or stop
            event = new_event(session_id, status, {"stop": stop_reason, "turns": session.turns})
            try:
                self._store.close_session(session.key, status, stop_reason, clock.now(), event)
            except StoreError:
                session.ending = ""  # the session did not end, so it must not look ended
                raise
            session.status, session.stop = status, stop_reason
            self._metrics.count("turngate_sessions_ended_total", status)
            self._forget(session)
            self._on_close(session.id)
        self._events.wake(session_id)
        if stop != "deleted":
            self._on_end(session_id)
        return session

    def _forget(self, session: Session) -> None:
        if self._live.pop(session.id, None) is not None:
            self._ended.append(session)
        digest = self._secret_of.pop(session.id, None)
        if digest is not None:
            self._by_secret.pop(digest, None)

    async def abort_all_calls(self) -> None:
        """Abort all calls, because the gateway is stopping or the project was deleted.

        Model calls record the tokens sampled so far. Agents are asked to retry their calls.
        """
        self._stopping = True
        await asyncio.gather(*(s.abort_calls("stopping") for s in list(self._live.values()) if s.busy))

    async def interrupt_calls(self) -> None:
        """Abort all model calls in flight, because the cell must stop serving for now.

        Agents retry these calls, which then wait until the cell serves again.
        """
        await asyncio.gather(*(s.interrupt_calls() for s in list(self._live.values()) if s.in_flight))

    def owns(self, session_id: str) -> bool:
        """Return whether the session belongs to this worker."""
        return self._shard.owns(session_id)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _load_closed_session(row: SessionRow) -> Session:
    """Build a session without its trace. That suffices to refuse calls to an ended session, or to delete a session with a damaged trace."""
    session = Session(row.id, row.key, row.config, row.opened)
    session.status, session.stop, session.vocabulary = row.status, row.stop, row.vocabulary
    return session
