"""Serve the in-process engine to the cells of a cluster over HTTP, in the format of SGLang's API.

    async with EngineServer(engine, key, host="10.0.0.5") as server:
        ServeConfig(engine="sglang", engine_url=[server.url], …)      # the settings of a cell

Cells use their SGLang client (`engines/sglang.py`). Only the requests that this client needs for sampling are served. The trainer updates
the weights itself, while calls wait at the fence of the shared store.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType

import msgspec
import numpy as np
from aiohttp import web

from turngate.common.aio import run_to_completion
from turngate.engines.base import Chunk, Generate
from turngate.engines.local import LocalEngine
from turngate.errors import ConfigError, ContextOverflow, EngineRejected, TurngateError
from turngate.types import ID_DTYPE, Constraint, Sampling

_MAX_BODY = 64_000_000  # bytes
_STOP_S = 1.0  # how long calls in flight may continue when the server stops
_NO_TOP_K = -1


class _SamplingParams(msgspec.Struct):
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = _NO_TOP_K
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    sampling_seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    json_schema: str | None = None


class _GenerateBody(msgspec.Struct):
    input_ids: list[int]
    sampling_params: _SamplingParams
    rid: str = ""
    stream: bool = False
    extra_key: str = ""
    lora_path: str | None = None
    top_logprobs_num: int = 0
    return_prompt_token_ids: bool = False


class _AbortBody(msgspec.Struct):
    rid: str


class EngineServer(AbstractAsyncContextManager["EngineServer"]):
    """An HTTP server for one engine. Every request must carry the key as a bearer token."""

    def __init__(self, engine: LocalEngine, key: str, *, host: str, port: int = 0) -> None:
        """Create a server. It listens on `host`, which must be an address at which the cells can reach this machine."""
        self._engine = engine
        self._authorization = f"Bearer {key}".encode()
        self._host, self._port = host, port
        self._calls: dict[str, asyncio.Task[object]] = {}  # by request id
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        assert self._runner is not None, "the server is not open"
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def __aenter__(self) -> EngineServer:
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._check])
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.get("/health", self._show_health),
                web.get("/get_model_info", self._show_model),
                web.get("/get_server_info", self._show_server),
                web.get("/v1/loads", self._show_load),
            ]
        )
        # If a cell closes a connection, the call on that connection and its generation are cancelled.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_STOP_S, handler_cancellation=True)
        await self._runner.setup()
        try:
            await run_to_completion(web.TCPSite(self._runner, self._host, self._port).start())
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"engine_host: cannot listen on {self._host} ({error.strerror}); pass the address of a network interface of this "
                "machine that the cluster's nodes can reach",
                param="engine_host",
            ) from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await run_to_completion(self._runner.cleanup())

    @web.middleware
    async def _check(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._authorization):
            return _error_response(401, "the request does not have the key of this server")
        try:
            return await handler(request)
        except msgspec.MsgspecError as error:
            return _error_response(400, f"invalid request: {error}")
        except TurngateError as error:
            return _error_response(error.status, _describe(error))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read(), type=_GenerateBody)
        task = asyncio.current_task()
        assert task is not None
        self._calls[body.rid] = task
        try:
            async with self._engine.generate(build_request(body)) as chunks:
                if body.stream:
                    return await _send_stream(request, chunks)
                whole = _Reply()
                async for chunk in chunks:
                    whole.add(chunk)
                return _json_response(whole.encode())
        finally:
            self._calls.pop(body.rid, None)

    async def _abort(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=_AbortBody)
        if (task := self._calls.get(body.rid)) is not None:
            task.cancel()
        return _json_response(b"{}")

    async def _show_health(self, request: web.Request) -> web.Response:
        [health] = await self._engine.health()
        return _json_response(b"{}") if health.ok else _error_response(503, health.detail)

    async def _show_model(self, request: web.Request) -> web.Response:
        return _json_response(msgspec.json.encode({"model_path": self._engine.served}))

    async def _show_server(self, request: web.Request) -> web.Response:
        return _json_response(msgspec.json.encode({"context_length": self._engine.max_context}))

    async def _show_load(self, request: web.Request) -> web.Response:
        calls = len(self._calls)
        running = min(calls, self._engine.slots)
        rank = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": calls - running}
        return _json_response(msgspec.json.encode({"loads": [rank]}))


def build_request(body: _GenerateBody) -> Generate:
    """Convert a request body in SGLang's format to a `Generate` request. Raise `EngineRejected` if it names an adapter."""
    params = body.sampling_params
    if body.lora_path:
        raise EngineRejected(
            f"this engine has no adapter {body.lora_path!r}; it samples from the model that is being trained"
        )
    constraint = None
    if params.json_schema is not None:
        constraint = Constraint("json_schema", msgspec.json.decode(params.json_schema))
    return Generate(
        prompt=np.array(body.input_ids, ID_DTYPE),
        max_tokens=params.max_new_tokens,
        sampling=Sampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=0 if params.top_k == _NO_TOP_K else params.top_k,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            seed=params.sampling_seed,
            min_tokens=params.min_new_tokens,
        ),
        stop=params.stop,
        stop_ids=params.stop_token_ids,
        constraint=constraint,
        top_logprobs=body.top_logprobs_num,
        stream=body.stream,
        request_id=body.rid,
        cache_salt=body.extra_key,
        echo_prompt=body.return_prompt_token_ids,
    )


class _Reply:
    """One reply, which is sent as one or more messages. Each message contains the tokens since the previous one.

    A reply that is not streamed is a single message.
    """

    def __init__(self) -> None:
        self._total = 0
        self._chunks: list[Chunk] = []

    def add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._total += len(chunk.ids)

    def encode(self) -> bytes:
        """Encode the tokens since the previous message as a new message."""
        chunks, self._chunks = self._chunks, []
        ids = [token for chunk in chunks for token in chunk.ids]
        logprobs = [value for chunk in chunks for value in chunk.logprobs or [None] * len(chunk.ids)]
        finish = chunks[-1].finish if chunks else None
        meta = {
            "completion_tokens": self._total,
            "output_token_logprobs": [(value, token, None) for value, token in zip(logprobs, ids, strict=True)],
            "finish_reason": None if finish is None else {"type": finish},
        }
        prompt = next((chunk.prompt for chunk in chunks if chunk.prompt is not None), None)
        return msgspec.json.encode({"output_ids": ids, "meta_info": meta, "prompt_token_ids": prompt})


async def _send_stream(request: web.Request, chunks: AsyncIterator[Chunk]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    reply = _Reply()
    try:
        async for chunk in chunks:
            if not response.prepared:  # not earlier, so that an error before the first token can set the HTTP status
                await response.prepare(request)
            reply.add(chunk)
            await response.write(b"data: " + reply.encode() + b"\n\n")
    except TurngateError as error:
        if not response.prepared:
            raise
        message = {"error": {"message": _describe(error), "code": error.status}}
        await response.write(b"data: " + msgspec.json.encode(message) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _describe(error: TurngateError) -> str:
    """Return the message of an error. A context overflow is described in the words that SGLang's clients expect."""
    if isinstance(error, ContextOverflow):
        return f"The input ({error.size} tokens) is longer than the model's context length ({error.limit} tokens)."
    return error.message


def _error_response(status: int, message: str) -> web.Response:
    return _json_response(msgspec.json.encode({"error": {"message": message}}), status)


def _json_response(body: bytes, status: int = 200) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")
