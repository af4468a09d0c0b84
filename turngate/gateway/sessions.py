"""Every verb on sessions: open, find, list, show, seal, cancel, delete, record, announce; and the fence. The admin API and the
compatibility APIs call only this. Traces and rows are in `shown.py`, host tools in `hosttools.py`, feeds in `feed.py`."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from turngate.client.protocol import PauseMode
from turngate.common.sharding import SINGLE_SHARD, Shard, new_secret
from turngate.common.validation import explain_error
from turngate.engines.weights import Load
from turngate.errors import BadRequest, Conflict, NotFound, StoreError, TurngateError
from turngate.gateway.events import Events
from turngate.gateway.eviction import Rest
from turngate.gateway.feeds import Feeds, group_of, is_stale, oldest_allowed
from turngate.gateway.fence import Fence
from turngate.gateway.host_tools import HostTools
from turngate.store.beside import NewEvent, happened
from turngate.store.outcome import DAMAGED, Recorded
from turngate.store.sqlite import SessionRow, Store
from turngate.telemetry.logs import redact_known
from turngate.telemetry.metrics import Metrics
from turngate.trace.host_tools import checked
from turngate.trace.roles import roles
from turngate.trace.session import Session, SessionConfig, Status
from turngate.trace.signals import faults
from turngate.trace.tree import Sampled, Trace
from turngate.types import STALE, Json, Message, Mode, Sampling
from turngate.views.session import Looks

log = logging.getLogger("turngate")
_SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
ANNOUNCED = 16 * 1024  # bytes of an event that somebody else tells
_PRUNE_S = 3600.0
_HELD = "fence_held"  # settings: until when calls are held at most; empty: they are not
_FOREVER = "inf"
_LOADING = "weights_loading"


class Control:
    """Owns the live sessions."""

    def __init__(
        self,
        store: Store,
        fence: Fence,
        events: Events,
        *,
        modes: tuple[Mode, ...] = ("exact",),
        models: tuple[str, ...] = (),
        vocabulary: str = "",
        idle_s: float = 24 * 3600,
        rest_s: float = 60.0,
        event_days: float = 0.0,
        log_turns: bool = False,
        release: Callable[[str], None] = lambda session_id: None,
        shard: Shard = SINGLE_SHARD,
        ended: Callable[[str], None] = lambda session_id: None,
        metrics: Metrics | None = None,
    ) -> None:
        self._modes = modes  # what this gateway can serve; the first is the default
        self._models = models  # empty: any name
        self._vocabulary = vocabulary
        self._store = store
        self._fence = fence
        self.events = events
        self.tools = HostTools(store, events)
        self.feeds = Feeds(store, events, fence)
        self.looks = Looks(store)
        self._cancelling: set[asyncio.Task[None]] = set()  # of sessions that are stale
        self._idle_s = idle_s
        self._event_s = event_days * 86400
        self._log_turns = log_turns
        self._release = release
        self._shard = shard  # other workers' sessions are theirs alone
        self._ended = ended
        self._metrics = metrics or Metrics()
        self._started = time.time()
        self._live: dict[str, Session] = {}
        self.rest = Rest(store, self._live, rest_s)
        self._by_secret: dict[bytes, str] = {
            secret: session_id for session_id, secret, _ in store.open_sessions() if shard.owns(session_id)
        }
        self._secret_of: dict[str, bytes] = {session_id: secret for secret, session_id in self._by_secret.items()}

    # ── sessions ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def modes(self) -> tuple[Mode, ...]:
        """That can be served here."""
        return self._modes

    @property
    def default_mode(self) -> Mode:
        return self._modes[0]

    @property
    def open_count(self) -> int:
        """How many sessions of this worker's are open."""
        return len(self._secret_of)

    @property
    def resting_count(self) -> int:
        """How many of those have nothing of their trace in memory."""
        return len(self._secret_of) - sum(not session.at_rest for session in self._live.values())

    def open(self, config: SessionConfig, session_id: str | None = None) -> tuple[Session, str]:
        """A new session and its secret, which is shown here and never again."""
        if config.mode not in self._modes:
            raise BadRequest(
                f"mode: {config.mode!r} is not served here, only {' and '.join(self._modes)}", param="mode"
            )
        if session_id is None:
            session_id = self._shard.new_session_id()
        elif not _SESSION_ID.fullmatch(session_id):
            raise BadRequest(
                "id: must be 1 to 128 letters, digits, '-', '_', '.' or ':', starting with a letter or digit",
                param="id",
            )
        if config.model and self._models and config.model not in self._models:
            raise BadRequest(
                f"model: this gateway serves {', '.join(self._models)}, not {config.model!r}", param="model"
            )
        if config.max_tokens is not None and config.max_tokens < 1:
            raise BadRequest(
                f"max_tokens: {config.max_tokens} must be 1 or more; leave it out for no limit", param="max_tokens"
            )
        _check_sampling(config)
        for field, wrong in faults(config.signals):
            raise BadRequest(f"{field}: {wrong}", param=field)
        checked(config.tools)
        secret = new_secret(session_id)
        digest = _digest(secret)
        opened = time.time()
        event = happened(session_id, "opened", {"mode": config.mode, "model": config.model})
        try:
            key = self._store.add_session(session_id, digest, config, opened, self._vocabulary, event)
        except KeyError:
            raise Conflict(f"id: a session {session_id!r} exists already; choose another id", param="id") from None
        session = Session(session_id, key, config, opened)
        session.vocabulary = self._vocabulary
        self._live[session_id] = session
        self._by_secret[digest] = session_id
        self._secret_of[session_id] = digest
        self._metrics.count("turngate_sessions_opened_total", config.mode)
        self.events.wake(session_id)
        return session, secret

    def by_secret(self, secret: str) -> Session | None:
        """The session that this secret opens. Looked up by its hash, so that timing tells nothing about it."""
        digest = _digest(secret)
        session_id = self._by_secret.get(digest)
        if session_id is not None:
            return self.find(session_id)
        row = self._store.find_secret(digest)
        return None if row is None else _ended(row)

    def id_of_secret(self, secret: str) -> str | None:
        """The session whose secret this is, whoever owns it."""
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

    def find(self, session_id: str) -> Session:
        session = self._live.get(session_id)
        if session is None:
            session = self._store.load(self._row(session_id))
            if session.status == "open" and self._shard.owns(session_id):
                # Idle time counts from now: the gateway may have been down for longer than any agent is idle.
                session.last_used = time.time()
                self._live[session_id] = session
        return session

    def knows(self, session_id: str) -> bool:
        """Whether there is such a session, or something was told of it before it is opened."""
        return session_id in self._live or self._store.find(session_id) is not None or self.events.knows(session_id)

    def listing(
        self, *, status: str | None = None, before: int | None = None, limit: int = 100
    ) -> list[dict[str, Json]]:
        rows = self._store.sessions(status=status, before=before, limit=limit)
        outcomes = self._store.outcomes.of(rows[-1].key, rows[0].key) if rows else {}
        return [self._summary(row, outcomes.get(row.key), row.damaged) for row in rows]

    def live(self, session_id: str) -> Session | None:
        """One that was used since the gateway was started, and is open."""
        return self._live.get(session_id)

    async def show(self, session_id: str) -> dict[str, Json]:
        session = self._live.get(session_id)
        if session is not None and not session.at_rest:
            return self.described(session)
        # Its trace is not in memory, and need not be after this.
        try:
            stored = await self.looks.at(session_id, lambda shown: shown.session)
        except StoreError:
            if (session := self._live.get(session_id)) is None:
                raise
            return self.described(session)
        session = self._live.get(session_id)
        if session is not None and (not session.at_rest or session.key != stored.key):
            # By now its trace is in memory, and may know more; or another one has its id.
            return self.described(session)
        return self.described(session or stored, stored.trace)

    def described(self, session: Session, trace: Trace | None = None) -> dict[str, Json]:
        """`trace`: as it was read for this, where it is not in memory. Where it cannot be read back, the rest is told."""
        outcome = self._store.outcomes.of(session.key, session.key).get(session.key)
        lost = outcome is None and bool(self._store.outcomes.damaged(session.key, session.key))
        told = {
            **self._summary(self._row(session.id), outcome, DAMAGED if lost else ""),
            "stop": session.stop,
            "turns": session.turns,
            "sampled_tokens": session.sampled_tokens,
            "in_flight": session.in_flight,
            "last_error": session.last_error,
            "unheard_s": round(session.unheard.seconds, 3),
            "last_used": session.last_used,
        }
        try:
            trace = trace or session.trace
        except StoreError as error:
            return {**told, "tokens": None, "roles": None, "forks": None, "unreadable": error.message}
        forks = [{"node": n.id, "cause": n.info.cause} for n in trace.nodes if n.info.cause is not None]
        return {**told, "tokens": trace.tokens(), "roles": dict(Counter(roles(trace).values())), "forks": forks}

    async def seal(self, session_id: str, stop: str = "") -> Session:
        """End a session; calls in flight are aborted. Sealing twice is fine."""
        return await self._end(session_id, "sealed", stop)

    async def cancel(self, session_id: str) -> Session:
        return await self._end(session_id, "cancelled", "cancelled")

    async def delete(self, session_id: str) -> None:
        try:
            session = await self._end(session_id, "cancelled", "deleted")
        except StoreError:
            if session_id in self._live:
                raise
            session = _ended(self._row(session_id))  # its trace is damaged: a reason to be rid of it
        async with session.ending_lock:
            self._store.delete_session(session.key, happened(session_id, "deleted", {}))
            self._forget(session)
        self.events.wake(session_id)

    def record(self, session_id: str, outcome: Recorded, *, replace: bool = False) -> None:
        """How the rollout ended: once, and not before its session has. The same again is fine."""
        written = outcome.check()
        row = self._row(session_id)
        live = self._live.get(session_id)
        if (live.status if live else row.status) == "open":
            raise Conflict(f"session {session_id} is still open; seal it first, then record how it ended")
        event = happened(session_id, "outcome", outcome.facts())
        before = self._store.outcomes.put(row.key, written, event, replace=replace)
        if before is not None and before != written and not replace:
            raise Conflict(f"session {session_id} has another outcome already; replace it with ?replace=1")
        if before is None:
            self._metrics.count_outcome(outcome.kind, outcome.reward)
        self.events.wake(session_id)
        self.feeds.wake()

    def announce(self, session_id: str, kind: str, data: dict[str, Json]) -> int:
        """Something that whoever runs a rollout has to tell, perhaps before its session is opened. Its place in the stream."""
        if session_id and not _SESSION_ID.fullmatch(session_id):
            raise BadRequest(f"session: {session_id[:200]!r} cannot be the id of a session", param="session")
        size = len(msgspec.json.encode(data))
        if size > ANNOUNCED:
            raise BadRequest(f"data: has {size} bytes, the limit is {ANNOUNCED}", param="data")
        return self.events.add(session_id, kind, data)

    async def _end(self, session_id: str, status: Status, stop: str) -> Session:
        session = self.find(session_id)
        async with session.ending_lock:  # whoever ends it second waits for the first
            if session.status != "open":
                return session
            # Calls in flight record what they have before the session is closed for good.
            await session.abort_calls(status)
            # A limit that it met stays the reason, but what is stale is of no use however far it came.
            told = stop if stop == STALE else session.stop or stop
            event = happened(session_id, status, {"stop": told, "turns": session.turns})
            try:
                self._store.close_session(session.key, status, told, time.time(), event)
            except StoreError:
                session.ending = ""  # it did not end, and must not look as if it had
                raise
            session.status, session.stop = status, told
            self._metrics.count("turngate_sessions_ended_total", status)
            self._forget(session)
            self._release(session.id)
        self.events.wake(session_id)
        if stop != "deleted":
            self._ended(session_id)
        return session

    def _forget(self, session: Session) -> None:
        if self._live.pop(session.id, None) is not None:
            self.rest.ended(session)
        digest = self._secret_of.pop(session.id, None)
        if digest is not None:
            self._by_secret.pop(digest, None)

    def undelivered(self, session: Session, node_id: int) -> None:
        """The turn is stored, but the agent was gone when its last byte was to be sent."""
        for node in () if session.at_rest else reversed(session.trace.nodes):
            if node.id == node_id and isinstance(node, Sampled):
                node.delivered = False
                break
        self._store.mark_undelivered(session.key, node_id)

    def notify(self, session: Session, kind: str, data: dict[str, Any]) -> None:
        """Called by the pipeline for each turn, which is written with its event already, and for each limit."""
        message = data.pop("message", None)
        if kind == "turn":
            self.events.wake(session.id)
        else:
            self.events.add(session.id, kind, data)
        if self._log_turns and isinstance(message, Message):
            log.info(
                "session %s %s %s content=%d reasoning=%d calls=%d",
                session.id,
                kind,
                data,
                len(message.content),
                len(message.reasoning),
                len(message.tool_calls),
            )

    async def stop(self) -> None:
        """The gateway goes down: calls in flight record what they have, and their agents are told to come back."""
        await asyncio.gather(*(s.abort_calls("stopping") for s in list(self._live.values()) if s.busy))

    async def close(self) -> None:
        """Nothing goes on by itself any more; the store may be closed."""
        for task in list(self._cancelling):
            task.cancel()
        await asyncio.gather(*self._cancelling, return_exceptions=True)
        await asyncio.to_thread(self.feeds.close)
        await asyncio.to_thread(self.looks.close)

    async def expire_idle(self) -> None:
        """Runs for as long as the gateway: puts sessions to rest that nobody used for a moment, seals those that nobody used for a
        while, and removes what is too old to keep."""
        pruned = 0.0
        while True:
            await asyncio.sleep(min(self.rest.every_s, self._idle_s / 4))
            await self.rest.sweep(time.time())
            if self._event_s and self._shard.number == 0 and time.time() - pruned > _PRUNE_S:
                pruned = time.time()
                self._prune(pruned - self._event_s)
            for session_id in self.idle(time.time()):
                try:
                    await self.seal(session_id, "idle")
                except TurngateError as error:
                    log.warning("session %s could not be expired: %s", session_id, error.message)

    def _prune(self, before: float) -> None:
        try:
            if removed := self.events.prune(before):
                log.info("%d events were older than event_days and are removed", removed)
        except TurngateError as error:
            log.warning("old events could not be removed: %s", error.message)

    def idle(self, now: float) -> list[str]:
        """Sessions that nobody used for too long. The clock of one that was not called since the start runs from there."""
        unused = [s for s in self._live.values() if not s.busy]
        live = [s.id for s in unused if now - s.last_used > self._idle_s]
        unseen = [s for s in self._secret_of if s not in self._live] if now - self._started > self._idle_s else []
        return live + unseen

    # ── fence ───────────────────────────────────────────────────────────────────────────────────────────────────

    def fence(self) -> dict[str, Json]:
        state = {"version": self._fence.version, "paused": self._fence.paused, "in_flight": self._fence.in_flight}
        return {**state, "model": self._fence.model} if self._fence.model else state

    @property
    def version(self) -> int:
        return self._fence.version

    @property
    def is_paused(self) -> bool:
        return self._fence.paused

    def check_version(self, version: int | None, model: str | None) -> None:
        self._fence.check(version, model)

    async def hold(self) -> None:
        """New calls wait from now on."""
        await self._fence.pause("hold")

    async def drained(self) -> None:
        await self._fence.drained()

    def paused(self, mode: PauseMode, *, restarted: bool = False) -> None:
        """It stands, whether that can be written down or not. `restarted`: it did when the gateway was stopped, and does again."""
        try:
            self.events.add("", "fence", {"paused": True, "mode": mode, **({"restarted": True} if restarted else {})})
        except StoreError as error:
            log.warning("a pause is not in the events: %s", error.message)

    def note_held(self, until: float | None) -> None:
        """Before calls are held: a gateway that is started again in the middle of it holds them too, until a moment at most."""
        self._store.set_setting(_HELD, _FOREVER if until is None else repr(until))

    def held_until(self) -> float | None:
        """Until when calls were to be held, as the store has it: infinity where there is no limit; None: they were not."""
        noted = self._store.setting(_HELD)
        return float(noted) if noted else None

    def note_open(self, version: int, event: NewEvent | None = None) -> None:
        """The version and that calls go on at it, in one: one without the other would label what is sampled wrongly."""
        self._store.set_settings({"policy_version": str(version), _HELD: "", _LOADING: ""}, event)

    def resume(self, version: int | None, model: str | None = None, *, expired: bool = False) -> dict[str, Json]:
        """`expired`: whoever had paused did not come back in time."""
        self._fence.check(version, model)
        new = self._fence.version if version is None else version
        facts: dict[str, Json] = {"paused": False, "version": new}
        facts |= {"model": model} if model else {}
        facts |= {"expired": True} if expired else {}
        self.note_open(new, happened("", "fence", facts))
        self._fence.resume(version, model)
        self.events.wake("")
        self.version_rose()
        return self.fence()

    def weights(self, version: int) -> Load | None:
        """What the engines have at a version, where that is known."""
        noted = self._store.setting(f"weights:{version}")
        return msgspec.json.decode(noted, type=Load) if noted else None

    def was_frozen(self) -> bool:
        """Whether engines were paused, and nobody has woken them since."""
        return self._store.setting("engines_frozen") == "1"

    def note_frozen(self, frozen: bool) -> None:
        self._store.set_setting("engines_frozen", "1" if frozen else "")

    def note_weights(self, load: Load) -> None:
        """Before the version is in force: a crash in between leaves nothing that is half."""
        self._store.set_setting(f"weights:{load.version}", msgspec.json.encode(load).decode())

    def note_loading(self, load: Load) -> None:
        """The same, before engines load it: from now until the next resume some of them may have it, whatever version is in force."""
        noted = msgspec.json.encode(load).decode()
        self._store.set_settings({f"weights:{load.version}": noted, _LOADING: noted})

    def loading(self) -> Load | None:
        """What engines may have that is not in force: a load that came to no end."""
        noted = self._store.setting(_LOADING)
        return msgspec.json.decode(noted, type=Load) if noted else None

    def version_rose(self) -> None:
        """The policy is another one: sessions that no feed could use any more are cancelled, beside whatever else goes on."""
        try:
            bounds = self.feeds.bounds()
        except StoreError as error:
            log.warning("stale sessions cannot be looked for: %s", error.message)
            return
        if not any(bound is not None for _, bound in bounds):
            return
        task = asyncio.create_task(self._cancel_stale(bounds, self._fence.version))
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def _cancel_stale(self, bounds: list[tuple[str, int | None]], version: int) -> None:
        """Whoever runs such a rollout learns of it from the stream of events, and can begin another one at once."""
        for session_id, secret in list(self._secret_of.items()):
            await asyncio.sleep(0)  # there may be thousands, and turns go on meanwhile
            try:
                live = self._live.get(session_id)
                row = None if live is not None else self._store.find(session_id)
                config = live.config if live is not None else row.config if row is not None else None
                group = None if config is None else group_of(config)
                oldest = None if group is None else oldest_allowed(group, bounds, version)
                stale = oldest is not None and await self._is_stale(session_id, oldest)
                if stale and self._secret_of.get(session_id) == secret:  # it is still open, and still this one
                    await self._end(session_id, "cancelled", STALE)
            except TurngateError as error:
                log.warning("session %s could not be looked at for its age: %s", session_id, error.message)

    async def _is_stale(self, session_id: str, oldest: int) -> bool:
        live = self._live.get(session_id)
        if live is not None and not live.at_rest:
            return is_stale(live, oldest)
        return await self.looks.at(session_id, lambda shown: is_stale(shown.session, oldest))

    def _row(self, session_id: str) -> SessionRow:
        row = self._store.find(session_id)
        if row is None:
            raise NotFound(f"there is no session {redact_known(session_id)!r}")
        return row

    def _summary(self, row: SessionRow, outcome: bytes | None, damaged: str) -> dict[str, Json]:
        live = self._live.get(row.id)
        return {
            **({"damaged": damaged} if damaged else {}),
            "id": row.id,
            "key": row.key,
            "status": live.status if live else row.status,
            "stop": live.stop if live else row.stop,
            "opened": row.opened,
            "closed": row.closed,
            "config": row.config,
            "outcome": None if outcome is None else msgspec.Raw(outcome),
        }


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _ended(row: SessionRow) -> Session:
    """An ended session without its trace: enough to tell an agent that it is over, rather than that its key is wrong."""
    session = Session(row.id, row.key, row.config, row.opened)
    session.status, session.stop, session.vocabulary = row.status, row.stop, row.vocabulary
    return session


def _check_sampling(config: SessionConfig) -> None:
    try:
        msgspec.convert(config.sampling, Sampling)
    except msgspec.ValidationError as error:
        message, field = explain_error(error, Sampling)
        raise BadRequest(f"sampling.{message}", param=f"sampling.{field}") from None
