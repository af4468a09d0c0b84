"""Helpers for tests of the whole app: a real gateway on a real port, and turns for its scripted engine.

    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        reply = await g.client(session.key).chat.completions.create(model="m", messages=[user("Hi")])
        [turn] = await g.turns(session.id)

Nothing is mocked: the `Gateway` is the one that `turngate serve` runs, uvicorn serves it in the test's own loop, and the clients
are OpenAI's own. Only the engine is scripted; a script counts the calls of each session separately.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import socket
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
import openai
import pytest
import uvicorn

import turngate.server.engine_factory
from tests.needs import require, uses
from tests.speed import scaled
from tools import parts
from turngate.config import ServeConfig
from turngate.engines.base import Chunk, Engine, Generate
from turngate.engines.scripted import Script, Scripted, ScriptedTurn
from turngate.render import BUILTIN_TOKENIZER, Renderer, Tokenizer, load_renderer
from turngate.server.app import Gateway
from turngate.server.run import GatewayWebSocket
from turngate.trace.session import Session

Json = Any
T = TypeVar("T")
REAL_TOKENIZERS = ("qwen3", "qwen2_5", "llama3_1", "deepseek_v3")  # `python tools/parts.py tokenizers` makes them
# New databases sync often, and a disk may be slow. tools/tier.py sets the variable and fails if the folder is not empty at the end.
_FOLDER = "turngate-test-"  # the process id of its owner follows
MEMORY_FOLDER = os.environ.get("TURNGATE_TEST_MEMORY") or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)

# Loading a tokenizer and certifying its template takes at least half a second; the result has no state.
_load = turngate.server.engine_factory.load_renderer = cache(load_renderer)  # type: ignore[attr-defined]


def in_every_mode(modes: Iterable[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that runs a test in each mode of a client. `make test` runs two of its cases."""
    ways = pytest.mark.parametrize("way", modes)
    return lambda test: pytest.mark.sample(2)(ways(test))


# ── model output ─────────────────────────────────────────────────────────────────────────────────────────────


def renderer(folder: Path = BUILTIN_TOKENIZER) -> Renderer:
    return _load(folder, model="", family="auto")[0]


def tokenizer(folder: Path = BUILTIN_TOKENIZER) -> Tokenizer:
    return renderer(folder).tokenizer


@uses("tokenizers")
def real_tokenizer(family: str) -> Path:
    """The folder of one of `REAL_TOKENIZERS`."""
    require("tokenizers")
    return parts.cache() / "tokenizers" / family


def say(text: str, *, folder: Path = BUILTIN_TOKENIZER, close: bool = True, **how: Any) -> ScriptedTurn:
    """A turn in which the model says `text`. `close=False` cuts it short; `how` sets other fields of `ScriptedTurn`."""
    speaker = renderer(folder)
    ids = speaker.tokenizer.encode(text)
    return ScriptedTurn(
        [*ids, speaker.stop_ids[0]] if close else ids, **({"finish": "length"} if not close else {}) | how
    )


def say_pieces(pieces: Sequence[str], **how: Any) -> ScriptedTurn:
    """A turn from pieces that are tokenized separately, to place the boundaries between tokens."""
    ids = [i for piece in pieces for i in tokenizer().encode(piece)]
    return ScriptedTurn([*ids, renderer().stop_ids[0]], **how)


def calls(*named: tuple[str, Json]) -> str:
    """Tool calls in the format of the builtin template."""
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in named
    )


class Gated(Scripted):
    """An engine that pauses each turn after some tokens until `gate` is set."""

    def __init__(self, script: Script | Sequence[ScriptedTurn], tokens: int = 0, **options: Any) -> None:
        super().__init__(script, **options)
        self.tokens = tokens
        self.gate = asyncio.Event()
        self.waiting = 0  # generations that wait for the gate

    @asynccontextmanager
    async def generate(self, request: Generate) -> AsyncIterator[AsyncIterator[Chunk]]:
        async with super().generate(request) as chunks:
            yield self._pause(chunks)

    async def _pause(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        count = 0
        while True:
            if count >= self.tokens:
                self.waiting += 1
                try:
                    await self.gate.wait()
                finally:
                    self.waiting -= 1
            try:
                chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            count += len(chunk.ids)
            yield chunk


# ── agent input ─────────────────────────────────────────────────────────────────────────────────────────────


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def result(call: ToolCall, text: str) -> Json:
    """A tool result message."""
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def tool(name: str = "read_file", **properties: Json) -> Json:
    """A function tool in OpenAI's form."""
    parameters = {"type": "object", "properties": properties or {"path": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


CLIENT_MODES = ("async", "async stream", "sync", "sync stream")  # of the openai client


class ToolCall(NamedTuple):
    """A tool call as the agent receives it."""

    id: str
    name: str
    arguments: str


class Reply(NamedTuple):
    """A reply as an agent reads it, streamed or not."""

    content: str
    reasoning: str
    calls: list[ToolCall]
    finish: str | None
    usage: Json

    def message(self) -> Json:
        """The assistant's message as an agent puts it into its history."""
        wire: Json = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            wire["reasoning_content"] = self.reasoning
        if self.calls:
            wire["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.calls
            ]
        return wire


def read_reply(reply: Json) -> Reply:
    """Read a reply that was not streamed."""
    [choice] = reply.choices
    message = choice.message
    made = [ToolCall(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()]
    reasoning = getattr(message, "reasoning", None) or ""
    return Reply(message.content or "", reasoning, made, choice.finish_reason, reply.usage)


def join_chunks(chunks: Sequence[Json]) -> Reply:
    """Read a streamed reply, joining its chunks as agents do."""
    content, reasoning, finish, usage = "", "", None, None
    made: dict[int, ToolCall] = {}
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            finish = choice.finish_reason or finish
            for part in choice.delta.tool_calls or ():
                known = made.get(part.index, ToolCall("", "", ""))
                made[part.index] = ToolCall(
                    known.id or part.id,
                    known.name + (part.function.name or ""),
                    known.arguments + (part.function.arguments or ""),
                )
    return Reply(content, reasoning, [made[n] for n in sorted(made)], finish, usage)


# ── the gateway ─────────────────────────────────────────────────────────────────────────────────────────────────────


class OpenSession(NamedTuple):
    id: str
    key: str


class Running:
    """A running gateway, used over HTTP. `app` gives access to its internals."""

    def __init__(self, app: Gateway, root: str, stack: AsyncExitStack) -> None:
        self.app = app
        self.root = root
        self.base_url = root + "/v1"
        self._stack = stack
        self._http: Any = None
        self.admin: httpx.AsyncClient = self.http(key=app.admin_key)

    @property
    def engine(self) -> Scripted:
        assert isinstance(self.app.engine, Scripted)
        return self.app.engine

    @property
    def gated(self) -> Gated:
        assert isinstance(self.app.engine, Gated)
        return self.app.engine

    @property
    def database(self) -> Path:
        return self.app.store.database.path

    def live(self, session_id: str) -> Session:
        """Return an open session that the gateway has in memory."""
        session = self.app.sessions.find_live(session_id)
        assert session is not None
        return session

    def http(self, key: str = "") -> httpx.AsyncClient:
        """A plain HTTP client, for what the openai client cannot send or show."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        client = httpx.AsyncClient(
            base_url=self.root, headers=headers, timeout=scaled(60), verify=False, trust_env=False
        )
        self._stack.push_async_callback(client.aclose)
        return client

    def client(self, key: str, base_url: str = "", **options: Any) -> openai.AsyncOpenAI:
        if self._http is None:  # shared by all clients; without TLS, since loading certificates takes 50 ms
            self._http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
            self._stack.push_async_callback(self._http.aclose)
        options = {"max_retries": 0, "timeout": scaled(60), **options}
        return openai.AsyncOpenAI(api_key=key, base_url=base_url or self.base_url, http_client=self._http, **options)

    def sync_client(self, key: str, **options: Any) -> openai.OpenAI:
        """A blocking client: call it with `asyncio.to_thread`, since the gateway runs in the test's own loop."""
        http = openai.DefaultHttpxClient(verify=False, trust_env=False)
        self._stack.callback(http.close)
        options = {"max_retries": 0, "timeout": scaled(60), "base_url": self.base_url, **options}
        return openai.OpenAI(api_key=key, http_client=http, **options)

    def start(self, work: Awaitable[T]) -> asyncio.Task[T]:
        """Start a task that is cancelled when the gateway stops."""
        task = asyncio.create_task(_wait_for(work))
        self._stack.push_async_callback(_cancel, task)
        return task

    async def ask(self, key: str, messages: Json, mode: str = "async", **request: Any) -> Reply:
        """Send one chat completion in one of `CLIENT_MODES`. `messages`: a list, or the text of a user message."""
        request |= {"messages": [user(messages)] if isinstance(messages, str) else messages}
        request.setdefault("model", "m")
        if mode.endswith("stream"):
            request |= {"stream": True}
            request.setdefault("stream_options", {"include_usage": True})
        match mode:
            case "async":
                return read_reply(await self.client(key).chat.completions.create(**request))
            case "async stream":
                return join_chunks([c async for c in await self.client(key).chat.completions.create(**request)])
            case "sync":
                create = self.sync_client(key).chat.completions.create
                return read_reply(await asyncio.to_thread(lambda: create(**request)))
            case _:
                create = self.sync_client(key).chat.completions.create
                return join_chunks(await asyncio.to_thread(lambda: list(create(**request))))

    async def open(self, **config: Json) -> OpenSession:
        opened = await self._request("POST", "/admin/sessions", json=config)
        return OpenSession(opened["id"], opened["api_key"])

    async def show(self, session_id: str) -> Json:
        return await self._request("GET", f"/admin/sessions/{session_id}")

    async def trace(self, session_id: str) -> Json:
        return await self._request("GET", f"/admin/sessions/{session_id}/trace")

    async def turns(self, session_id: str) -> list[Json]:
        """The sampled nodes of the trace, oldest first."""
        return [node for node in (await self.trace(session_id))["nodes"] if node["kind"] == "sampled"]

    async def samples(self, session_id: str, *, keep_empty: bool = False) -> list[Json]:
        path = f"/admin/sessions/{session_id}/samples" + ("?all=1" if keep_empty else "")
        rows: list[Json] = (await self._request("GET", path))["samples"]
        return rows

    async def seal(self, session_id: str) -> Json:
        return await self._request("POST", f"/admin/sessions/{session_id}/seal")

    async def cancel(self, session_id: str) -> Json:
        return await self._request("POST", f"/admin/sessions/{session_id}/cancel")

    async def pause(self, mode: str = "hold") -> Json:
        return await self._request("POST", "/admin/fence/pause", json={"mode": mode})

    async def resume(self, version: int | None = None) -> Json:
        return await self._request("POST", "/admin/fence/resume", json={"version": version})

    async def _request(self, method: str, path: str, **request: Any) -> Json:
        response = await self.admin.request(method, path, **request)
        assert response.is_success, f"{method} {path}: {response.status_code} {response.text}"
        return response.json()

    @contextmanager
    def locked_database(self) -> Iterator[None]:
        """Block other writers, so that commits wait. Only for `durability="disk"`, which commits in a thread."""
        with closing(sqlite3.connect(self.database, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield
            finally:
                db.execute("ROLLBACK")

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Query the database file over a separate connection."""
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as db:
            return db.execute(query, values).fetchall()


@contextmanager
def count_cycles() -> Iterator[Counter[str]]:
    """Count the objects of turngate that the block leaves in reference cycles, by type. They stay in memory until a garbage collection."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(type(o).__qualname__ for o in gc.garbage if type(o).__module__.startswith("turngate."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Create a temporary folder, in memory if possible. If this process is killed, the next run of the tests removes it."""
    with tempfile.TemporaryDirectory(prefix=f"{_FOLDER}{os.getpid()}-", dir=MEMORY_FOLDER) as name:
        yield Path(name)


def sweep_memory_folders() -> None:
    """Remove the folders of processes that were killed."""
    for folder in Path(MEMORY_FOLDER or tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        owner = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def gateway(
    script: Script | Sequence[ScriptedTurn] = (),
    *,
    engine: Engine | None = None,
    observe: str = "",
    data: Path | str | None = None,
    **config: Any,
) -> AsyncIterator[Running]:
    """Run a gateway with a scripted engine on a free port. `config`: any setting of `turngate serve`.

    `data`: a folder to keep, for a gateway that restarts, or the URL of a shared store. `observe`: the kind of endpoint at `engine_url` to
    observe instead of running an engine.
    """
    async with AsyncExitStack() as stack:
        folder = data or stack.enter_context(memory_folder())
        settings = ServeConfig(data=str(folder), **config, **({"engine": observe} if observe else {})).check()
        app = Gateway(settings, engine=None if observe else engine or Scripted(script))
        await app.start()
        stack.push_async_callback(app.stop)
        port = await stack.enter_async_context(_serve(app))
        yield Running(app, f"http://127.0.0.1:{port}", await stack.enter_async_context(AsyncExitStack()))


@asynccontextmanager
async def _serve(app: Gateway) -> AsyncIterator[int]:
    """Run uvicorn as `turngate serve` does, but without signal handlers and polling delays. Yield the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws=GatewayWebSocket,
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,  # longer than clients keep idle connections: they must not use one that is being closed
        )
    )
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[listener])
    try:
        yield listener.getsockname()[1]
    finally:
        for part in server.servers:
            part.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        tasks = list(server.server_state.tasks)
        _, late = await asyncio.wait(tasks, timeout=2) if tasks else ((), ())
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)


async def _wait_for(work: Awaitable[T]) -> T:
    return await work


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait until a condition holds."""
    limit = scaled(seconds)
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"condition did not hold within {limit:.0f} s"
        await asyncio.sleep(0.002)
