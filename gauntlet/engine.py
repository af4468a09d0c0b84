"""The mock engine: a process that implements the parts of vLLM's API that gateways need, and samples what the scenario says.

    python -m gauntlet.engine --port 8001

`POST /gauntlet/steps` sets what to sample. `GET /gauntlet/log?rollout=…` returns the ground truth: every generation with the length and
digest of its prompt, the sampled ids, how it ended, and which expected text was missing from the prompt.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from gauntlet import native_apis
from gauntlet.replies import ChatReply, CompletionReply, GenerateReply, Reply, SglangReply
from gauntlet.sampler import MODEL, UNSERVED_MODEL, ConnectionDropped, Engine, Extras, RequestRefused
from gauntlet.tokens import Json, Model, model_folder

MAX_MODEL_LEN = 262_144
_BEGAN: web.RequestKey[float] = web.RequestKey("began", float)
_OVERFLOW = (
    "This model's maximum context length is 8192 tokens. However, you requested 0 output tokens and your prompt "
    "contains at least 8193 input tokens, for a total of at least 8193 tokens. Please reduce the length of the input prompt."
)
_FAULTS: dict[int, tuple[str, str]] = {
    400: ("BadRequestError", _OVERFLOW),
    404: ("NotFoundError", f"The model `{UNSERVED_MODEL}` does not exist."),
    429: ("RateLimitError", "Too many requests"),
    500: ("InternalServerError", "EngineCore encountered an issue"),
    503: ("ServiceUnavailableError", "The server is overloaded"),
}


class Api:
    """The HTTP routes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**30, middlewares=[_record_start])
        app.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/responses", self.responses),
                web.post("/v1/messages", self.messages),
                web.post("/v1/chat/completions/render", self.render),
                web.post("/inference/v1/generate", self.generate),
                web.post("/generate", self.sglang),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.get("/version", self.version),
                web.post("/pause", self.pause),
                web.post("/resume", self.resume),
                web.post("/update_weight_version", self.update_weight_version),
                web.post("/collective_rpc", self.acknowledge),
                web.post("/reset_prefix_cache", self.acknowledge),
                web.get("/weight_info", self.weight_info),
                web.post("/gauntlet/extras", self.set_extras),
                web.post("/gauntlet/steps", self.add_steps),
                web.get("/gauntlet/log", self.log),
                web.delete("/gauntlet/log", self.forget),
            ]
        )
        return app

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        prompt = body["prompt"]
        ids = self._engine.model.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return await self._answer(request, body, ids, body.get("max_tokens", 16), CompletionReply)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
        return await self._answer(request, body, self._render_ids(body), max_tokens, ChatReply)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        chat = native_apis.responses_to_chat(body)
        return await self._answer(
            request, body, self._render_ids(chat), body.get("max_output_tokens"), native_apis.ResponsesReply
        )

    async def messages(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        chat = native_apis.messages_to_chat(body)
        return await self._answer(request, body, self._render_ids(chat), body["max_tokens"], native_apis.MessagesReply)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        params = body.get("sampling_params") or {}
        max_tokens = params.get("max_tokens", 16)
        return await self._answer(request, body, list(body["token_ids"]), max_tokens, GenerateReply)

    async def sglang(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        params = body.get("sampling_params") or {}
        return await self._answer(request, body, list(body["input_ids"]), params.get("max_new_tokens"), SglangReply)

    async def _answer(
        self, request: web.Request, body: Json, prompt: list[int], max_tokens: int | None, kind: type[Reply]
    ) -> web.StreamResponse:
        if body.get("model") == UNSERVED_MODEL:
            return _error_response(404)
        temperature = (body.get("sampling_params") or body).get("temperature")
        try:
            sample = self._engine.start_generation(prompt, max_tokens, 1.0 if temperature is None else temperature)
        except RequestRefused as refusal:
            return _error_response(refusal.status)
        except ConnectionDropped:
            return _hang_up(request)
        reply = kind(self._engine, sample, body)
        try:
            return await (self._stream(request, reply) if body.get("stream") else self._whole(request, reply))
        finally:
            sample.generation.seconds = time.perf_counter() - request[_BEGAN]

    async def _whole(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        try:
            async for _ in self._engine.sample_tokens(reply.sample):
                pass
        except ConnectionDropped:
            return _hang_up(request)
        return web.Response(body=orjson.dumps(reply.full()), content_type="application/json")

    async def _stream(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        sample = reply.sample
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        paced = sample.behavior.pace_s > 0 or sample.behavior.cut_after is not None
        start = 0
        try:
            async for n in self._engine.sample_tokens(sample):
                last = n + 1 == len(sample.ids)
                if paced or last or n + 1 - start == 8:  # tokens without a pause share an event, as in a busy engine
                    events = reply.event(start, n + 1, last)
                    await response.write(b"".join(_encode_event(reply, event) for event in events))
                    start = n + 1
        except ConnectionDropped:
            return _hang_up(request, response)
        if not reply.named:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _render_ids(self, body: Json) -> list[int]:
        variables = body.get("chat_template_kwargs") or {}
        model = self._engine.model
        return model.encode(model.render(body["messages"], body.get("tools"), **variables))

    async def render(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        return web.json_response([{"prompt_token_ids": self._render_ids(body)}])

    async def tokenize(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        ids = self._engine.model.encode(body["prompt"]) if "prompt" in body else self._render_ids(body)
        return web.json_response({"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids})

    async def detokenize(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        return web.json_response({"prompt": self._engine.model.decode(body["tokens"])})

    async def models(self, _: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "vllm", "max_model_len": MAX_MODEL_LEN}
        return web.json_response({"object": "list", "data": [card]})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def pause(self, _: web.Request) -> web.Response:
        self._engine.running.clear()
        return web.json_response({})

    async def resume(self, _: web.Request) -> web.Response:
        self._engine.running.set()
        return web.json_response({})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        self._engine.version = orjson.loads(await request.read())["new_version"]
        return web.json_response({})

    async def weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._engine.version})

    async def acknowledge(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def set_extras(self, request: web.Request) -> web.Response:
        self._engine.extras = Extras(**orjson.loads(await request.read()))
        self._engine.version = "default"
        return web.json_response({})

    async def add_steps(self, request: web.Request) -> web.Response:
        self._engine.add_steps(orjson.loads(await request.read()))
        return web.json_response({})

    async def log(self, request: web.Request) -> web.Response:
        return web.json_response(self._engine.log(request.query["rollout"]))

    async def forget(self, request: web.Request) -> web.Response:
        self._engine.forget(request.query["rollout"])
        return web.json_response({})


@web.middleware
async def _record_start(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Record when the request arrived, to measure the engine's own time."""
    request[_BEGAN] = time.perf_counter()
    return await handler(request)


def _error_response(status: int) -> web.Response:
    kind, message = _FAULTS[status]
    error = {"message": message, "type": kind, "param": "input_tokens" if status == 400 else None, "code": status}
    return web.json_response({"error": error}, status=status)


def _hang_up(request: web.Request, begun: web.StreamResponse | None = None) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return begun or web.Response()


def _encode_event(reply: Reply, event: Json) -> bytes:
    name = f"event: {event['type']}\n".encode() if reply.named else b""
    return name + b"data: " + orjson.dumps(event) + b"\n\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m gauntlet.engine", description="Run the Gauntlet's mock engine.")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args(arguments)
    app = Api(Engine(Model(model_folder()))).app()
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, access_log=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
