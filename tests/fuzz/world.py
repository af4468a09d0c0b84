"""A gateway to send random requests to, in this process, and the checks of each reply.

A reply is never a 5xx other than a 503 with a reason, its body is what the OpenAPI document says, an error names the field that was wrong,
nothing is logged as an error, no step of the event loop computes for long, and a request needs memory in proportion to its size.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode

import jsonschema
import msgspec
import numpy as np
from hypothesis import strategies as st
from starlette.requests import Request

from tests.exact.invariants import check_invariants
from tests.fuzz.json_values import encode
from tests.fuzz.requests import FuzzRequest
from tests.kit import Running, gateway, say, user
from tests.speed import scaled
from turngate.engines.gate import Gate
from turngate.errors import NotFound, StoreError
from turngate.verify import VerifyOptions, verify
from turngate.verify.store_reader import SessionReader

Json = Any
LATE_S = 0.05  # the longest that a step of the event loop may compute
MEMORY_FACTOR = 40  # bytes that a request may need per byte of its body …
TRACE_FACTOR = 12  # … per byte of its reply or, if it is about a session, of the trace that the reply is built from …
MEMORY_BASE = 3_000_000  # … and in addition
_ANSWER_S = 20.0  # a request that takes longer hangs
_ADMIN = (("authorization", "Bearer $admin"),)
_WAIT_S = 0.15  # how long to stay with a request that waits for something that never comes
_WAITING = ("/tools/{name}", "/deliveries", "/events", "/gate/take", "/retry", "/fence/pause", "/weights", "/remove")
_FIELD_ERRORS = (400, 422)


class Finding(AssertionError):
    """A reply that breaks a rule."""


class Damage(msgspec.Struct, frozen=True):
    """A column to overwrite with an SQL expression, in which COLUMN is its old value."""

    table: str
    column: str
    value: str


DAMAGES = st.builds(
    Damage,
    st.just("nodes") | st.sampled_from(["sessions", "preambles", "outcomes", "events", "refusals", "attempts"]),
    st.sampled_from(
        ["ids", "logprobs", "info", "messages", "parent", "kind", "checksum", "delivered", "tools", "kwargs"]
    )
    | st.sampled_from(["config", "status", "stop", "vocabulary", "opened", "closed", "outcome", "data", "kind", "time"])
    | st.sampled_from(
        ["status", "message", "call", "repeated", "state", "attempt", "rollout", "id", "session", "recorded"]
    ),
    st.sampled_from(
        ["NULL", "''", "'x'", "x'ff'", "x''", "5", "-1", "1e308", "9223372036854775807", "zeroblob(10)", "'{'", "'{}'"]
    )
    | st.sampled_from(["'[]'", "x'c1'", "x'80'", "x'90'", "CAST(x'7bff' AS TEXT)", "CAST('null' AS BLOB)", "'sealed'"])
    | st.sampled_from(["substr(COLUMN, 1, 3)", "COLUMN || COLUMN", "substr(COLUMN, 2)", "CAST(COLUMN AS TEXT)"])
    | st.binary(max_size=8).map(lambda raw: f"x'{raw.hex()}'"),
)
_SESSION, _PAGE = "/admin/sessions/{id}", "/page/api/rollouts/{id}"
READERS = (
    *("/admin/sessions", _SESSION, f"{_SESSION}/trace", f"{_SESSION}/samples?all=1", f"{_SESSION}/events?wait=0"),
    *("/page/api/overview", "/page/api/rollouts", "/page/api/groups", "/page/api/failures", "/page/api/training"),
    "/page/api/training/entropy",
    *(_PAGE, f"{_PAGE}/tree", f"{_PAGE}/messages", f"{_PAGE}/tokens", f"{_PAGE}/export?format=rows"),
    *(f"{_PAGE}/export?format=messages", f"{_PAGE}/export?format=trace"),
    *("/sessions", "/sessions/{id}", "/sessions/{id}/rollout", "/v1/rollouts/{id}/trajectory"),
)


class Reply(msgspec.Struct):
    status: int = 0
    headers: dict[str, str] = {}
    body: bytes = b""
    complete: bool = False


class World:
    """A running gateway with a session, a sealed one, a feed and a project. Close it at the end."""

    def __init__(self, *, gated: bool = False, late_s: float = LATE_S) -> None:
        self.late_s = late_s
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._log = _ErrorLog()
        self.document: Json = None
        self._names: dict[str, str] = {}
        self.gateway: Running = self.run(self._start(gated))
        gc.freeze()  # a collection of what exists by now is not the fault of a request
        self._validators: dict[tuple[str, str, str], Any] = {}
        self.statuses: Counter[int] = Counter()  # of all replies

    def run(self, work: Any) -> Any:
        return self._runner.run(work)

    async def _start(self, gated: bool) -> Running:
        asyncio.get_running_loop().set_exception_handler(self._log.on_loop_error)
        logging.getLogger().addHandler(self._log)
        engine = Gate() if gated else None
        g = await self._stack.enter_async_context(
            gateway(lambda request, n: say("Hello."), engine=engine, max_body_mb=1, max_context=200_000)
        )
        self.document = (await g.admin.get("/openapi.json")).json()
        (await g.admin.post("/admin/projects", json={"name": "blue"})).raise_for_status()
        await g.admin.put("/admin/feeds/grpo", json={"n": 2})
        key = (await g.admin.post("/admin/keys", json={"project": "blue", "scopes": ["traces"]})).json()
        sealed = await g.open(metadata={"group": "g"})
        if not gated:
            await g.ask(sealed.key, "Hi")
        await g.seal(sealed.id)
        await g.admin.put(f"/admin/sessions/{sealed.id}/outcome", json={"kind": "graded", "reward": 1.0, "group": "g"})
        self._names = {
            "$admin": g.app.admin_key,
            "$sealed": sealed.id,
            "$feed": "grpo",
            "$project": "blue",
            "$tool": "ask",
            "$prefix": key["prefix"],
            "$group": "g",
            "$response": "resp_none",
        }
        return g

    async def _stop(self) -> None:
        await self._stack.aclose()
        logging.getLogger().removeHandler(self._log)

    def close(self) -> None:
        self.run(self._stop())
        self._runner.close()

    # ── one request ─────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, request: FuzzRequest, *, memory: bool = False) -> None:
        """Send a request, and raise `Finding` if the reply breaks a rule."""
        try:
            self._check(request, memory)
        except Finding as finding:
            finding.add_note(f"{request!r}"[:4000])
            raise

    def _check(self, request: FuzzRequest, memory: bool) -> None:
        self.run(self._restore())
        self._log.records.clear()
        with _measure_memory(memory) as peak, _LoopWatch(enabled=not memory) as watch:
            reply = self.run(self._send(request))
        self.statuses[reply.status] += 1
        self._check_reply(request, reply)
        if self._log.records:
            raise Finding(f"an error was logged: {self._log.records[0]}")
        if watch.longest > self.late_s:
            raise Finding(f"a step of the event loop computed for {watch.longest * 1000:.0f} ms: {watch.slowest}")
        if memory:
            self._check_memory(request, len(reply.body), peak())

    def _check_memory(self, request: FuzzRequest, reply: int, used: int) -> None:
        allowed = MEMORY_BASE + MEMORY_FACTOR * len(request.body)
        if used <= allowed + TRACE_FACTOR * reply:
            return
        trace = self._measure_trace(request)
        if used > allowed + TRACE_FACTOR * max(reply, trace):
            sizes = f"a request of {len(request.body)} bytes with a reply of {reply} bytes"
            about = f", about a session with a trace of {trace} bytes," if trace else ""
            raise Finding(f"{sizes}{about} needed {used} bytes of memory")

    def _measure_trace(self, request: FuzzRequest) -> int:
        """Return the size of the trace of the session in the request's path, or 0 if the path has none."""
        names = zip(request.operation.split("/"), request.path.split("/"), strict=False)
        session = next((self._fill(value) for name, value in names if name == "{id}"), "")
        trace = FuzzRequest("GET", f"/admin/sessions/{session}/trace", (), _ADMIN, b"", "/admin/sessions/{id}/trace")
        reply = self.run(self._send(trace))
        return len(reply.body) if reply.status == 200 else 0

    async def _restore(self) -> None:
        """Undo what an earlier request has ended, so that the next one gets further."""
        g, app = self.gateway, self.gateway.app
        if app.fence.paused:
            await app.updates.resume(None, None)
        session = app.sessions.find_live(self._names.get("$open", ""))
        if session is None or session.status != "open" or session.turns > 50:
            tool = {"name": "ask", "description": "Ask.", "schema": {"type": "object"}, "wait_s": 5}
            opened = await g.open(tools=[tool], rollout="")
            self._names |= {"$open": opened.id, "$secret": opened.key}
        if app.page.login.expiry_of(self._names.get("$login", "")) is None:
            scope = {"type": "http", "headers": [], "client": ("10.0.0.1", 1)}
            self._names["$login"] = app.page.login.log_in(Request(scope), app.admin_key)[0]
        if app.projects.ring.find_project("blue") is None:
            await g.admin.post("/admin/projects", json={"name": "blue"})

    async def _send(self, request: FuzzRequest) -> Reply:
        reply, gone, first = Reply(), asyncio.Event(), asyncio.Event()
        body = [self._fill_bytes(request.body)]

        async def receive() -> Json:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Json) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            else:
                reply.body += message.get("body", b"")
                reply.complete = not message.get("more_body", False)
                first.set()

        serving = asyncio.create_task(self.gateway.app(self._scope(request), receive, send))  # type: ignore[arg-type]
        waits = request.operation.endswith(_WAITING) or "wait" in dict(request.query)
        await asyncio.wait({serving}, timeout=_WAIT_S if waits else scaled(_ANSWER_S))
        if not serving.done():
            gone.set()
            await asyncio.wait({serving}, timeout=_WAIT_S)
        if not serving.done():
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            if not waits:
                raise Finding("the request hangs")
            return reply
        if (error := serving.exception()) is not None:
            raise Finding(f"unhandled {error!r}") from error
        if reply.headers.get("content-type", "").startswith("application/json") and request.operation.endswith(
            "/responses"
        ):
            with suppress(ValueError, KeyError, TypeError):
                self._names["$response"] = json.loads(reply.body)["id"]
        return reply

    def _scope(self, request: FuzzRequest) -> Json:
        path = self._fill(request.path)
        headers = [(n.encode(), self._fill(v).encode("latin-1", "replace")) for n, v in request.headers]
        query = urlencode([(name, self._fill(value)) for name, value in request.query], errors="surrogatepass")
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [*headers, (b"host", b"gateway"), (b"content-length", str(len(request.body)).encode())],
            "client": ("10.0.0.1", 1),
            "server": ("gateway", 80),
        }

    def _fill(self, text: str) -> str:
        for name, value in self._names.items():
            text = text.replace(name, value)
        return text

    def _fill_bytes(self, body: bytes) -> bytes:
        return body.replace(b"$response", self._names["$response"].encode()) if b"$response" in body else body

    # ── damaged rows, and trees ─────────────────────────────────────────────────────────────────────────────────────

    def check_damaged_row(self, damage: Damage) -> None:
        """Damage a row of a new session, and read the session in every way. Errors name it, and the lists stay readable."""
        self.run(self._restore())
        session = self.run(self._record_session())
        row = self.gateway.app.store.find(session)
        assert row is not None
        try:
            self._damage(session, damage)
            for path in READERS:
                self._read(session, path)
            with SessionReader(Path(self.gateway.app.config.data)) as reader, suppress(NotFound):
                verify(reader, session, VerifyOptions())
        except Exception as error:
            error.add_note(str(damage))
            raise
        finally:
            self._remove_session(row.key, session)

    async def _record_session(self) -> str:
        opened = await self.gateway.open(metadata={"group": "g"})
        tools = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
        reply = await self.gateway.ask(opened.key, "Hi", tools=tools)
        messages = [user("Hi"), {"role": "assistant", "content": reply.content}, user("Go on.")]
        await self.gateway.ask(opened.key, messages, tools=tools)
        await self.gateway.http(opened.key).post("/v1/chat/completions", json={"messages": 5})  # a refused call
        await self.gateway.seal(opened.id)
        await self.gateway.admin.put(f"/admin/sessions/{opened.id}/outcome", json={"kind": "graded", "reward": 1.0})
        return opened.id

    def _damage(self, session: str, damage: Damage) -> None:
        key = {"sessions": "key=(SELECT key FROM sessions WHERE id=:id)"}
        with suppress(StoreError), self.gateway.app.store._writing() as db:
            columns = {row[1] for row in db.execute(f"PRAGMA table_info({damage.table})")}
            owner = key.get(damage.table, "session IN (:id, (SELECT key FROM sessions WHERE id=:id))")
            if damage.column in columns:
                value = damage.value.replace("COLUMN", damage.column)
                db.execute(f"UPDATE {damage.table} SET {damage.column}={value} WHERE {owner}", {"id": session})

    def _read(self, session: str, path: str) -> None:
        headers = (("authorization", "Bearer $admin"), ("cookie", "turngate_page=$login"))
        address, _, query = path.partition("?")
        pairs = tuple(tuple(pair.split("=")) for pair in query.split("&") if pair)
        request = FuzzRequest("GET", address.replace("{id}", session), pairs, headers, b"", address)  # type: ignore[arg-type]
        self._log.records.clear()
        reply = self.run(self._send(request))
        self.statuses[reply.status] += 1
        if reply.status >= 500:
            error = json.loads(reply.body)["error"]["message"] if reply.status == 503 else ""
            if session not in error:
                raise Finding(f"{path}: status {reply.status}, {reply.body[:300]!r} does not name session {session}")
        if "{id}" not in path and reply.status != 200:
            raise Finding(f"{path}: status {reply.status}: {reply.body[:300]!r}")
        if self._log.records:
            raise Finding(f"{path}: an error was logged: {self._log.records[0]}")

    def _remove_session(self, key: int, session: str) -> None:
        with self.gateway.app.store._writing() as db:
            for table, column in (
                ("nodes", "session"),
                ("outcomes", "session"),
                ("refusals", "session"),
                ("sessions", "key"),
            ):
                db.execute(f"DELETE FROM {table} WHERE {column}=?", (key,))
            for table in ("events", "attempts"):
                db.execute(f"DELETE FROM {table} WHERE session=?", (session,))

    def check_tree(self, histories: list[Json]) -> None:
        """Send several histories in one session. The tree holds exactly what the engine received."""
        self.run(self._send_histories(histories))

    async def _send_histories(self, histories: list[Json]) -> None:
        opened = await self.gateway.open()
        client = self.gateway.http(opened.key)
        for messages in histories:
            reply = await client.post("/v1/chat/completions", content=encode({"model": "m", "messages": messages}))
            if reply.status_code >= 500:
                raise Finding(f"status {reply.status_code}: {reply.text[:300]}")
            self.statuses[reply.status_code] += 1
        engine = self.gateway.engine
        received = [np.asarray(one.prompt) for one in engine.received if one.session == opened.id]
        check_invariants(await self.gateway.app.sessions.find(opened.id), received)

    # ── the rules ───────────────────────────────────────────────────────────────────────────────────────────────

    def _check_reply(self, request: FuzzRequest, reply: Reply) -> None:
        if not reply.status or not reply.complete or reply.status == 499:
            return  # it was still waiting, or noticed that the client is gone
        described = self.document["paths"][request.operation][request.method.lower()]["responses"]
        if reply.status >= 500 and not (reply.status == 503 and len(reply.body) > 30):
            raise Finding(f"status {reply.status}: {reply.body[:300]!r}")
        if 300 <= reply.status < 400:
            return
        is_error = reply.status >= 400
        if not is_error and str(reply.status) not in described:
            raise Finding(f"status {reply.status} is not in the document")
        status = "default" if is_error and request.operation != "/health" else next(iter(described))
        (media,) = described[status]["content"]
        if media != "application/json" or len(reply.body) > 50_000:
            return
        if reply.headers.get("content-type") != "application/json":
            if is_error:
                raise Finding(f"an error of type {reply.headers.get('content-type')}: {reply.body[:200]!r}")
            return
        document = json.loads(reply.body)
        uses_other_dialect = {"anthropic-version", "x-goog-api-key"} & dict(request.headers).keys()
        if not (
            is_error and (uses_other_dialect or reply.status == 404)
        ):  # a path that no route has may be any dialect's
            self._validate(request, status, described[status]["content"][media]["schema"], document)
        if reply.status in _FIELD_ERRORS and isinstance(error := document.get("error"), dict) and "param" in error:
            self._check_field(request, error)

    def _validate(self, request: FuzzRequest, status: str, schema: Json, document: Json) -> None:
        key = (request.method, request.operation, status)
        if key not in self._validators:
            whole = {**schema, "components": self.document["components"]}
            self._validators[key] = jsonschema.Draft202012Validator(whole)
        error = next(self._validators[key].iter_errors(document), None)
        if error is not None:
            raise Finding(f"the reply is not what the document says: {error.message[:300]}")

    def _check_field(self, request: FuzzRequest, error: Json) -> None:
        if error["param"] is None and not error["message"].lower().startswith(
            ("the body", "the request", "the arguments")
        ):
            raise Finding(f"the error names no field: {error['message'][:300]}")


class _ErrorLog(logging.Handler):
    """The errors that were logged, and those of tasks that are never awaited."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.records.append(self.format(record))

    def on_loop_error(self, loop: object, context: Json) -> None:
        self.records.append(str(context))


class _LoopWatch:
    """A context manager that measures the CPU time of each step of the event loop."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self.longest = 0.0
        self.slowest = ""

    def __enter__(self) -> _LoopWatch:
        if self._enabled:
            gc.disable()  # the garbage of this process is not that of a gateway, which also collects it less often
            self._original = asyncio.events.Handle._run
            asyncio.events.Handle._run = self._run_step  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            gc.enable()
            asyncio.events.Handle._run = self._original  # type: ignore[method-assign]

    @property
    def _run_step(self) -> Any:
        original = self._original

        def run(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            original(handle)
            used = time.thread_time() - began
            if used > self.longest:
                self.longest, self.slowest = used, repr(handle)[:200]

        return run


@contextmanager
def _measure_memory(enabled: bool) -> Iterator[Any]:
    if not enabled:
        yield lambda: 0
        return
    gc.collect()
    tracemalloc.start()
    try:
        yield lambda: peak
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
