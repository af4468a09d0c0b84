"""Serve model calls over HTTP, in every dialect: find the session, run the turn, and stream or collect the reply.

Errors are rendered here, in the dialect's format. Streamed and collected replies come from the same pipeline.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast
from weakref import WeakKeyDictionary

import msgspec
from starlette.requests import Request

from turngate.common.sharding import SESSION_PATH
from turngate.dialects import Dialect, WireRequest
from turngate.dialects.base import StorableStream
from turngate.dialects.prefix_cache import FrameCache, PrefixCache
from turngate.errors import Conflict, StoreError, TurngateError
from turngate.gateway.loading import TraceLoader
from turngate.gateway.recording import TurnRecorder
from turngate.gateway.refusals import is_refusal
from turngate.gateway.replies import ReplyArchive, SessionReplies
from turngate.gateway.sessions import Sessions
from turngate.gateway.turn import TurnPipeline
from turngate.server.asgi import (
    ClientDisconnect,
    DisconnectWatch,
    EventStream,
    HangUp,
    Receive,
    Scope,
    Send,
    parse_headers,
    parse_query,
    respond,
)
from turngate.server.auth import Auth
from turngate.server.request_body import read_content
from turngate.server.routing import RouteMatch
from turngate.telemetry.logs import set_log_context
from turngate.telemetry.metrics import CallTiming, Metrics
from turngate.telemetry.spans import current_tracer
from turngate.trace.session import CallError, Session, raise_if_paused
from turngate.trace.signals import read_signals
from turngate.trace.tree import Trace
from turngate.types import Call, Done, KeepAlive, ReplyEvent

log = logging.getLogger("turngate")


class Exchange(msgspec.Struct, frozen=True):
    """One model call, with everything that is needed to answer it."""

    session: Session
    call: Call
    dialect: Dialect
    send: Send
    hang_up: HangUp
    timing: CallTiming
    replies: SessionReplies
    open_stream: Callable[..., EventStream] = EventStream


class ModelCalls:
    def __init__(
        self,
        pipeline: TurnPipeline,
        recorder: TurnRecorder,
        archive: ReplyArchive,
        sessions: Sessions,
        loader: TraceLoader,
        auth: Auth,
        metrics: Metrics,
        *,
        max_body: int,
        alive_s: float,
    ) -> None:
        self._pipeline = pipeline
        self._recorder = recorder
        self._archive = archive
        self._sessions = sessions
        self._loader = loader
        self._auth = auth
        self._metrics = metrics
        self.max_body = max_body
        self._alive_s = alive_s
        self._frames = FrameCache()
        self._prefix_caches: WeakKeyDictionary[Trace, dict[str, PrefixCache]] = WeakKeyDictionary()  # by dialect name

    async def serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        match: RouteMatch,
        session_id: str | None = None,
        *,
        prime: bool = False,
    ) -> None:
        """Serve one call. `session_id` is the session that the path names, if any."""
        dialect = match.dialect
        session: Session | None = None
        body = b""
        try:
            headers, query = parse_headers(scope), parse_query(scope)
            session = await self.find_session(scope, dialect, headers, query, session_id, prime=prime)
            set_log_context(session.id, session.config.metadata)  # the task serves only this call
            body = await read_content(receive, headers, self.max_body)
            timing = CallTiming(time.perf_counter())
            replies = SessionReplies(self._archive, session, self.max_body)
            wire = WireRequest(body, headers, query, match.verb, match.model, earlier=replies)
            if session.is_evicted:
                await self.load_trace(session)
            call = self.decode(session, dialect, wire)
            with DisconnectWatch(receive) as watch, RenderInternalErrors():
                exchange = Exchange(session, call, dialect, send, watch, timing, replies)
                await (self._count if match.verb == "count" else self.run_turn)(exchange)
        except TurngateError as error:
            counted = session if match.verb != "count" else None
            error = self.count_error(dialect, error, counted, body)
            await respond_error(send, dialect, error)
        except ClientDisconnect:
            return

    async def find_session(
        self,
        scope: Scope,
        dialect: Dialect,
        headers: Mapping[str, str],
        query: Mapping[str, str],
        session_id: str | None,
        *,
        prime: bool,
    ) -> Session:
        """Return the session that the caller's key grants access to. A prime-rl client may be allowed to omit the key."""
        if prime and session_id is not None and self._auth.trusts(scope):
            return await self._sessions.find(session_id)
        return await self._auth.session(dialect.read_key(headers, query), session_id)

    async def load_trace(self, session: Session) -> None:
        """Load the trace of an evicted session. A failure becomes the session's last error, so that the agent is not blamed for it."""
        try:
            await self._loader.load(session)
        except StoreError as error:
            session.last_error = CallError(error.boundary, error.kind, error.message)
            raise

    def decode(self, session: Session, dialect: Dialect, wire: WireRequest) -> Call:
        call = self._prefix_cache(session, dialect).decode(wire)
        if session.config.signals:
            call = msgspec.structs.replace(call, signals=read_signals(session.config.signals, wire.headers, call))
        return call

    def admit(self, session: Session, call: Call) -> None:
        """Raise an error if the session or the gateway cannot serve this call. The session's limits are not checked."""
        self._pipeline.admit(session, call)

    def count_error(
        self, dialect: Dialect, error: TurngateError, session: Session | None, body: bytes = b""
    ) -> TurngateError:
        """Count a failed call and, if the call was refused, record the refusal for `session`. Return the error to answer with."""
        if session is not None:
            error = self._record_refusal(session, dialect, error, body)
        self._metrics.count("turngate_call_errors_total", dialect.name, error.boundary, error.kind)
        return error

    async def run_turn(self, exchange: Exchange) -> None:
        """Run one turn and deliver its reply. Errors that could not be sent within the reply are raised."""
        session, dialect, timing = exchange.session, exchange.dialect, exchange.timing
        if (tracer := current_tracer()) is not None:
            model = self._pipeline.model_name(session, exchange.call)
            timing.span = tracer.start_turn(session.id, session.config.metadata, dialect.name, model)
        try:
            await (self._stream if exchange.call.stream else self._collect)(exchange)
        except TurngateError as error:
            if timing.span is not None:
                timing.span.set_error(error.kind)
            raise
        finally:
            self._metrics.observe_call(dialect.name, timing, time.perf_counter())
            if timing.span is not None:
                timing.span.end()

    def _prefix_cache(self, session: Session, dialect: Dialect) -> PrefixCache:
        """Return the cache of the messages that the session has sent in this dialect. It is dropped when the trace is evicted."""
        if session.status != "open":
            # The session ended while the call was being sent. The call will be rejected, so the trace need not be loaded.
            return PrefixCache(dialect, self._frames)
        caches = self._prefix_caches.setdefault(session.trace, {})
        if dialect.name not in caches:
            caches[dialect.name] = PrefixCache(dialect, self._frames)
        return caches[dialect.name]

    async def _collect(self, exchange: Exchange) -> None:
        session, call, dialect = exchange.session, exchange.call, exchange.dialect
        done: ReplyEvent | None = None

        async def keep(events: Sequence[ReplyEvent]) -> None:
            nonlocal done
            done = events[-1]

        with _ExplainCancellation(session, exchange.hang_up):
            await self._pipeline.run(session, call, keep, exchange.timing)
            assert isinstance(done, Done), "a turn ends with Done or an error"
            with self._mark_undelivered(session, done):
                if exchange.replies.keeps(call):
                    encoder = cast(StorableStream, dialect.open_stream(call))
                    body = encoder.whole(done)
                    await exchange.replies.add(call, done, encoder.record())
                else:
                    body = dialect.encode_reply(call, done)
                await respond(exchange.send, 200, body, request_id_header(dialect))

    async def _count(self, exchange: Exchange) -> None:
        session, dialect = exchange.session, exchange.dialect
        with _ExplainCancellation(session, exchange.hang_up):
            body = dialect.encode_count(await self._pipeline.count(session, exchange.call))
            await respond(exchange.send, 200, body, request_id_header(dialect))

    async def _stream(self, exchange: Exchange) -> None:
        session, call, dialect, timing = exchange.session, exchange.call, exchange.dialect, exchange.timing
        encoder = dialect.open_stream(call)
        headers = [(b"content-type", encoder.media.encode()), *request_id_header(dialect)]

        async def tell(events: Sequence[ReplyEvent]) -> None:
            data = b"".join([encoder.event(event) for event in events])
            if isinstance(events[-1], Done):
                with self._mark_undelivered(session, events[-1]):
                    if exchange.replies.keeps(call):
                        await exchange.replies.add(call, events[-1], cast(StorableStream, encoder).record())
                    await stream.write(data, last=True)
            elif data:  # an empty write would restart the keep-alive timer
                await stream.write(data)

        def begin() -> bytes:
            return encoder.begin(timing.prompt_usage)

        def alive() -> bytes:
            return encoder.event(KeepAlive())

        with exchange.open_stream(exchange.send, begin, alive, self._alive_s, headers) as stream:
            try:
                with _ExplainCancellation(session, exchange.hang_up), RenderInternalErrors():
                    await self._pipeline.run(session, call, tell, timing)
            except TurngateError as error:
                if not stream.started and not dialect.sends_in_stream(error):
                    raise
                error = self.count_error(dialect, error, session, call.body)
                if timing.span is not None:
                    timing.span.set_error(error.kind)
                await stream.write(encoder.error(error), last=True)

    async def refuse_unserved(self, request: Request, dialect: Dialect, error: TurngateError) -> TurngateError:
        """Record a model call to an unknown route as refused, if the call belongs to a session. Return the error to answer with."""
        named = SESSION_PATH.match(request.url.path.encode("utf-8", "surrogatepass"))
        session_id = named[1].decode("utf-8", "surrogatepass") if named is not None else None
        try:
            session = await self._auth.session(dialect.read_key(request.headers, request.query_params), session_id)
        except TurngateError:
            return error
        return self._record_refusal(session, dialect, error, b"")

    def _record_refusal(self, session: Session, dialect: Dialect, error: TurngateError, body: bytes) -> TurngateError:
        """Record the call as refused if the call itself caused the error. Return the error to answer with.

        If the refusal cannot be recorded, return the store's error instead. The agent may then retry the call.
        """
        if not is_refusal(error) or session.status != "open" or session.ending:
            return error
        try:
            self._recorder.record_refusal(session, dialect.error_status(error), error.message, body)
        except StoreError as failure:
            session.last_error = CallError(failure.boundary, failure.kind, failure.message)
            return failure
        return error

    def _mark_undelivered(self, session: Session, done: Done) -> _MarkUndelivered:
        return _MarkUndelivered(self._recorder, session, done)


# These context managers are classes, because every call enters them and generator functions would be several times slower.


class _MarkUndelivered:
    """A context manager that marks a stored turn as undelivered if the end of its reply cannot be sent to the agent."""

    def __init__(self, recorder: TurnRecorder, session: Session, done: Done) -> None:
        self._recorder, self._session, self._done = recorder, session, done

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        lost = isinstance(error, asyncio.CancelledError | ClientDisconnect | StoreError)
        if lost and self._done.node is not None:
            self._recorder.mark_undelivered(self._session, self._done.node)


class RenderInternalErrors:
    """A context manager that converts an unexpected exception into an error that the dialect can render."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, TurngateError | ClientDisconnect):
            log.error("a model call failed unexpectedly", exc_info=error)
            raise TurngateError("internal error; see the gateway's log for details") from error


class _ExplainCancellation:
    """A context manager that converts a cancellation into the error for its cause, such as a disconnected client or an ended session."""

    def __init__(self, session: Session, hang_up: HangUp) -> None:
        self._session, self._hang_up = session, hang_up

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, asyncio.CancelledError) or not (self._hang_up.disconnected or self._session.ending):
            return
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        if self._hang_up.disconnected:
            raise ClientDisconnect from None
        raise_if_paused(self._session.ending)
        raise Conflict(f"this session is {self._session.ending}; the call was aborted") from None


async def respond_error(send: Send, dialect: Dialect, error: TurngateError) -> None:
    headers = request_id_header(dialect)
    if not error.retry_safe:
        headers.append((b"x-should-retry", b"false"))
    if error.status == 429 and error.retry_safe:
        headers.append((b"retry-after", b"1"))
    if error.status >= 500:
        log.warning("%s error: %s", error.boundary, error.message)
    await respond(send, dialect.error_status(error), dialect.encode_error(error), headers)


def request_id_header(dialect: Dialect) -> list[tuple[bytes, bytes]]:
    """Return a new request id in the header that the provider's SDK reads, or no header if the SDK reads none."""
    return (
        [(dialect.request_id_header.encode(), f"req_{os.urandom(12).hex()}".encode())]
        if dialect.request_id_header
        else []
    )
