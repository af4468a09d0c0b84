"""Model calls over HTTP, in every dialect: find the session, run the turn, and stream or collect the reply.

Only this module renders errors of model calls in the dialect's format. A non-streaming reply collects a streamed one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import msgspec

from turngate.dialects import Dialect, WireRequest
from turngate.dialects.prefix_cache import FrameCache, PrefixCache
from turngate.errors import Conflict, Stopping, StoreError, TurngateError
from turngate.gateway.recording import TurnRecorder
from turngate.gateway.sessions import Sessions
from turngate.gateway.turn import TurnPipeline
from turngate.server.asgi import (
    ClientDisconnect,
    DisconnectWatch,
    EventStream,
    Receive,
    Scope,
    Send,
    parse_headers,
    parse_query,
    read_body,
    respond,
)
from turngate.server.auth import Auth
from turngate.server.routing import RouteMatch, client_host
from turngate.telemetry.logs import set_log_context
from turngate.telemetry.metrics import CallTiming, Metrics
from turngate.telemetry.spans import current_tracer
from turngate.trace.session import CallError, Session
from turngate.trace.signals import read_signals
from turngate.trace.tree import Trace
from turngate.types import Call, Done, KeepAlive, ReplyEvent

log = logging.getLogger("turngate")


class ModelCalls:
    def __init__(
        self,
        pipeline: TurnPipeline,
        recorder: TurnRecorder,
        sessions: Sessions,
        auth: Auth,
        metrics: Metrics,
        *,
        max_body: int,
        alive_s: float,
    ) -> None:
        self._pipeline = pipeline
        self._recorder = recorder
        self._sessions = sessions
        self._auth = auth
        self._metrics = metrics
        self._max_body = max_body
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
        """Serve one call. `session_id` is the session named in the path, if any."""
        dialect = match.dialect
        try:
            headers, query = parse_headers(scope), parse_query(scope)
            key = dialect.read_key(headers, query)
            if prime and session_id is not None and self._auth.trusts(key, client_host(scope)):
                session = self._sessions.find(session_id)
            else:
                session = self._auth.session(key, session_id)
            set_log_context(session.id, session.config.metadata)  # the task serves only this call
            body = await read_body(receive, headers, self._max_body)
            timing = CallTiming(time.perf_counter())
            wire = WireRequest(body, headers, query, match.verb, match.model)
            call = self._prefix_cache(session, dialect).decode(wire)
            if session.config.signals:
                signals = read_signals(session.config.signals, headers, call)
                call = msgspec.structs.replace(call, signals=signals)
            with DisconnectWatch(receive) as watch, _RenderInternalErrors():
                if match.verb == "count":
                    await self._count(session, call, dialect, send, watch)
                else:
                    await self._turn(session, call, dialect, send, watch, timing)
        except TurngateError as error:
            self._metrics.count("turngate_call_errors_total", dialect.name, error.boundary, error.kind)
            await respond_error(send, dialect, error)
        except ClientDisconnect:
            return

    async def _turn(
        self, session: Session, call: Call, dialect: Dialect, send: Send, watch: DisconnectWatch, timing: CallTiming
    ) -> None:
        if (tracer := current_tracer()) is not None:
            model = self._pipeline.model_name(session, call)
            timing.span = tracer.start_turn(session.id, session.config.metadata, dialect.name, model)
        try:
            await (self._stream if call.stream else self._collect)(session, call, dialect, send, watch, timing)
        except TurngateError as error:
            if timing.span is not None:
                timing.span.set_error(error.kind)
            raise
        finally:
            self._metrics.observe_call(dialect.name, timing, time.perf_counter())
            if timing.span is not None:
                timing.span.end()

    def _prefix_cache(self, session: Session, dialect: Dialect) -> PrefixCache:
        """Return the cache of messages that the session has sent in this dialect. It is dropped when the trace is evicted."""
        if session.status != "open":
            # The session ended while the call was being sent. The call will be rejected, so the trace need not be loaded.
            return PrefixCache(dialect, self._frames)
        try:
            caches = self._prefix_caches.setdefault(session.trace, {})
        except StoreError as error:  # recorded, so that the failure is not attributed to the agent
            session.last_error = CallError(error.boundary, error.kind, error.message)
            raise
        if dialect.name not in caches:
            caches[dialect.name] = PrefixCache(dialect, self._frames)
        return caches[dialect.name]

    async def _collect(
        self, session: Session, call: Call, dialect: Dialect, send: Send, watch: DisconnectWatch, timing: CallTiming
    ) -> None:
        done: ReplyEvent | None = None

        async def keep(events: Sequence[ReplyEvent]) -> None:
            nonlocal done
            done = events[-1]

        with _ExplainCancellation(session, watch):
            await self._pipeline.run(session, call, keep, timing)
            assert isinstance(done, Done), "a turn ends with Done or an error"
            with self._mark_undelivered(session, done):
                await respond(send, 200, dialect.encode_reply(call, done), _request_id_header(dialect))

    async def _count(self, session: Session, call: Call, dialect: Dialect, send: Send, watch: DisconnectWatch) -> None:
        with _ExplainCancellation(session, watch):
            await respond(
                send, 200, dialect.encode_count(await self._pipeline.count(session, call)), _request_id_header(dialect)
            )

    async def _stream(
        self, session: Session, call: Call, dialect: Dialect, send: Send, watch: DisconnectWatch, timing: CallTiming
    ) -> None:
        encoder = dialect.open_stream(call)
        headers = [(b"content-type", encoder.media.encode()), *_request_id_header(dialect)]

        async def tell(events: Sequence[ReplyEvent]) -> None:
            data = b"".join([encoder.event(event) for event in events])
            if isinstance(events[-1], Done):
                with self._mark_undelivered(session, events[-1]):
                    await stream.write(data, last=True)
            elif data:  # an empty write would restart the keep-alive timer
                await stream.write(data)

        with EventStream(send, encoder.begin, lambda: encoder.event(KeepAlive()), self._alive_s, headers) as stream:
            try:
                with _ExplainCancellation(session, watch), _RenderInternalErrors():
                    await self._pipeline.run(session, call, tell, timing)
            except TurngateError as error:
                if not stream.started and not dialect.sends_in_stream(error):
                    raise
                self._metrics.count("turngate_call_errors_total", dialect.name, error.boundary, error.kind)
                if timing.span is not None:
                    timing.span.set_error(error.kind)
                await stream.write(encoder.error(error), last=True)

    def _mark_undelivered(self, session: Session, done: Done) -> _MarkUndelivered:
        return _MarkUndelivered(self._recorder, session, done)


# Classes instead of generator functions: every call enters these contexts, and generator-based ones are several times slower.


class _MarkUndelivered:
    """A context manager that marks a stored turn as undelivered if its end cannot be sent to the agent."""

    def __init__(self, recorder: TurnRecorder, session: Session, done: Done) -> None:
        self._recorder, self._session, self._done = recorder, session, done

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, asyncio.CancelledError | ClientDisconnect) and self._done.node is not None:
            self._recorder.mark_undelivered(self._session, self._done.node)


class _RenderInternalErrors:
    """A context manager that converts an unexpected exception to an error that the dialect can render."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, TurngateError | ClientDisconnect):
            log.error("a model call failed unexpectedly", exc_info=error)
            raise TurngateError("internal error; see the gateway's log for details") from error


class _ExplainCancellation:
    """A context manager that converts a cancellation to the error for its cause: the client disconnected, or the session ended."""

    def __init__(self, session: Session, watch: DisconnectWatch) -> None:
        self._session, self._watch = session, watch

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, asyncio.CancelledError) or not (self._watch.disconnected or self._session.ending):
            return
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        if self._watch.disconnected:
            raise ClientDisconnect from None
        if self._session.ending == "stopping":
            raise Stopping("the gateway is stopping; retry this call in a moment") from None
        raise Conflict(f"this session is {self._session.ending}; the call was aborted") from None


async def respond_error(send: Send, dialect: Dialect, error: TurngateError) -> None:
    headers = _request_id_header(dialect)
    if not error.retry_safe:
        headers.append((b"x-should-retry", b"false"))
    if error.status == 429:
        headers.append((b"retry-after", b"1"))
    if error.status >= 500:
        log.warning("%s error: %s", error.boundary, error.message)
    await respond(send, dialect.error_status(error), dialect.encode_error(error), headers)


def _request_id_header(dialect: Dialect) -> list[tuple[bytes, bytes]]:
    """Return the request id in the header that the provider's SDK expects, if any."""
    return (
        [(dialect.request_id_header.encode(), f"req_{os.urandom(12).hex()}".encode())]
        if dialect.request_id_header
        else []
    )
