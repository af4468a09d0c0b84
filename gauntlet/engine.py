"""The mock engine: a process that speaks what gateways need of vLLM, and says what the scenario tells it to say.

    python -m gauntlet.engine --port 8001

Prompts carry cues such as `[cue 3fa9.2]` in what the agent said last. The last cue in a prompt names the step; `POST /gauntlet/steps`
told the engine beforehand what is sampled at it, attempt by attempt. So no gateway has to pass anything on, and a request is
answered rightly in whatever order it comes. Prompts without a known cue (probes) get a short standard answer and are not logged.

`GET /gauntlet/log?rollout=…` is the truth: every generation with its prompt's length and digest, the ids that were sampled, how it
ended, and what of the agent's words was missing from the prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from gauntlet import proof
from gauntlet.speech import Heard, hear
from gauntlet.tokens import Json, Model, default_model

MODEL = "gauntlet"
MAX_MODEL_LEN = 262_144
_CUE = re.compile(r"\[cue ([0-9a-z]+\.[0-9]+)\]")
_BEGAN: web.RequestKey[float] = web.RequestKey("began", float)
_TAIL = 256  # tokens in which the last cue is looked for first
_OVERFLOW = (
    "This model's maximum context length is 8192 tokens. However, you requested 0 output tokens and your prompt "
    "contains at least 8193 input tokens, for a total of at least 8193 tokens. Please reduce the length of the input prompt."
)
_FAULTS: dict[int, tuple[str, str]] = {
    400: ("BadRequestError", _OVERFLOW),
    429: ("RateLimitError", "Too many requests"),
    500: ("InternalServerError", "EngineCore encountered an issue"),
    503: ("ServiceUnavailableError", "The server is overloaded"),
}


@dataclass(frozen=True)
class Behaviour:
    """What happens at one attempt of one step."""

    text: str = ""
    odd: bool = False  # tokenised as no tokenizer would
    finish: str = "stop"  # or "length": the model was cut off
    status: int = 0  # refuse with this status
    drop: bool = False  # hang up without a word
    cut_after: int | None = None  # hang up after so many tokens
    delay_s: float = 0.0  # before the first token
    pace_s: float = 0.0  # between tokens
    sees: tuple[str, ...] = ()  # what must stand in the prompt


@dataclass
class Generation:
    """One call, as the engine saw it."""

    cue: str
    attempt: int  # which of the step's behaviours it was
    prompt_tokens: int
    prompt_digest: int
    ids: list[int]
    state: str = "open"  # then whole, cut, aborted or refused
    unseen: list[str] = field(default_factory=list)
    seconds: float = 0.0  # the engine's own time, rendering and reading included


@dataclass(frozen=True)
class Told:
    """Everything about a generation that a reply may be made of."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    finish: str
    behaviour: Behaviour
    generation: Generation


class Refused(Exception):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(str(status))


class Dropped(Exception):
    """The connection is closed without an answer."""


class Engine:
    def __init__(self, model: Model) -> None:
        self.model = model
        self._steps: dict[str, list[Behaviour]] = {}
        self._attempts: dict[str, int] = {}
        self._log: dict[str, list[Generation]] = {}
        self._ids: dict[Behaviour, list[int]] = {}
        self._names: dict[int, str] = {}
        self._serial = itertools.count(1)

    # -- the script and the truth -------------------------------------------------

    def learn(self, steps: dict[str, list[Json]]) -> None:
        for cue, behaviours in steps.items():
            self._steps[cue] = [Behaviour(**{**each, "sees": tuple(each.get("sees", ()))}) for each in behaviours]

    def log(self, rollout: str) -> list[Json]:
        return [asdict(generation) for generation in self._log.get(rollout, [])]

    def forget(self, rollout: str) -> None:
        self._log.pop(rollout, None)
        for cue in [cue for cue in self._steps if cue.startswith(f"{rollout}.")]:
            del self._steps[cue]
            self._attempts.pop(cue, None)

    # -- generating ---------------------------------------------------------------

    def begin(self, prompt: list[int], max_tokens: int | None) -> Told:
        """Find the step, log the call, and say what will be sampled. Raises what goes wrong before the first token."""
        cue, text = self._cue(prompt)
        behaviours = self._steps.get(cue)
        if behaviours is None:
            return self._told(prompt, Behaviour(text="Hello."), Generation("", 0, 0, 0, []), max_tokens)
        attempt = self._attempts.get(cue, 0)
        self._attempts[cue] = attempt + 1
        attempt = min(attempt, len(behaviours) - 1)
        behaviour = behaviours[attempt]
        generation = Generation(cue, attempt, len(prompt), proof.digest(prompt), [])
        if behaviour.sees:
            text = self.model.decode(prompt)
            generation.unseen = [said for said in behaviour.sees if said not in text]
        self._log.setdefault(cue.partition(".")[0], []).append(generation)
        if behaviour.drop or behaviour.status:
            generation.state = "refused"
            raise Dropped if behaviour.drop else Refused(behaviour.status)
        return self._told(prompt, behaviour, generation, max_tokens)

    def _told(self, prompt: list[int], behaviour: Behaviour, generation: Generation, max_tokens: int | None) -> Told:
        ids, finish = self._sampled(behaviour), behaviour.finish
        if max_tokens is not None and max_tokens < len(ids):
            ids, finish = ids[:max_tokens], "length"
        return Told(prompt, ids, proof.logprobs(prompt, ids), finish, behaviour, generation)

    def _sampled(self, behaviour: Behaviour) -> list[int]:
        known = self._ids.get(behaviour)
        if known is None:
            encode = self.model.encode
            known = self.model.encode_oddly(behaviour.text, behaviour.text) if behaviour.odd else encode(behaviour.text)
            if behaviour.finish == "stop":
                known = [*known, self.model.stop]
            self._ids[behaviour] = known
        return known

    def _cue(self, prompt: list[int]) -> tuple[str, str]:
        """The last cue in the prompt. It stands near the end, so most of a long prompt need not be decoded."""
        size = _TAIL
        while True:
            text = self.model.decode(prompt[-size:])
            found = _CUE.findall(text)
            if found or size >= len(prompt):
                return (found[-1] if found else ""), text
            size *= 8

    async def tokens(self, told: Told) -> AsyncIterator[int]:
        """Indexes of the tokens as they are sampled. What the log says about the end is decided here."""
        generation, behaviour = told.generation, told.behaviour
        try:
            for n in range(len(told.ids)):
                pause = behaviour.delay_s if n == 0 else behaviour.pace_s
                if pause:
                    await asyncio.sleep(pause)
                if behaviour.cut_after is not None and n >= behaviour.cut_after:
                    generation.state = "cut"
                    raise Dropped
                generation.ids.append(told.ids[n])
                yield n
            generation.state = "whole"
        finally:
            if generation.state == "open":
                generation.state = "aborted"

    def name(self, token: int) -> str:
        if token not in self._names:
            self._names[token] = self.model.token(token)
        return self._names[token]

    def serial(self, kind: str) -> str:
        return f"{kind}-{next(self._serial):032x}"


class Reply:
    """A reply on its way: whole, or as events. One subclass for each API."""

    def __init__(self, engine: Engine, told: Told, body: Json) -> None:
        self.engine, self.told, self.body = engine, told, body

    def whole(self) -> Json:
        raise NotImplementedError

    def event(self, start: int, end: int, last: bool) -> list[Json]:
        """What goes out when the tokens from `start` to `end` are there."""
        raise NotImplementedError

    def usage(self) -> Json:
        prompt, sampled = len(self.told.prompt), len(self.told.ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": None,
        }

    def wants_usage(self) -> bool:
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    def names(self, start: int, end: int) -> list[str]:
        ids = self.told.ids[start:end]
        if self.body.get("return_tokens_as_token_ids"):
            return [f"token_id:{token}" for token in ids]
        return [self.engine.name(token) for token in ids]


class CompletionReply(Reply):
    """`/v1/completions`."""

    def __init__(self, engine: Engine, told: Told, body: Json) -> None:
        super().__init__(engine, told, body)
        self._head = {
            "id": engine.serial("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": MODEL,
        }

    def whole(self) -> Json:
        choice = self._choice(0, len(self.told.ids), True)
        return {**self._head, "choices": [choice], "usage": self.usage()}

    def event(self, start: int, end: int, last: bool) -> list[Json]:
        events: list[Json] = [{**self._head, "choices": [self._choice(start, end, last)]}]
        if last and self.wants_usage():
            events.append({**self._head, "choices": [], "usage": self.usage()})
        return events

    def _choice(self, start: int, end: int, last: bool) -> Json:
        told, ids = self.told, self.told.ids[start:end]
        asked = self.body.get("return_token_ids")
        logprobs = None
        if self.body.get("logprobs") is not None:
            names, values = self.names(start, end), told.logprobs[start:end]
            top = [{name: value} for name, value in zip(names, values, strict=True)]
            logprobs = {"text_offset": [0] * len(names), "token_logprobs": values, "tokens": names, "top_logprobs": top}
        return {
            "index": 0,
            "text": self.engine.model.decode(ids),
            "logprobs": logprobs,
            "finish_reason": told.finish if last else None,
            "stop_reason": None,
            "token_ids": ids if asked else None,
            "prompt_token_ids": told.prompt if asked and start == 0 else None,
        }


class GenerateReply(Reply):
    """`/inference/v1/generate`."""

    def whole(self) -> Json:
        return {
            "request_id": self.engine.serial("generate-tokens"),
            "choices": [self._choice(0, len(self.told.ids), True)],
            "prompt_logprobs": None,
            "kv_transfer_params": None,
            "usage": self.usage(),
        }

    def event(self, start: int, end: int, last: bool) -> list[Json]:
        return [{"request_id": "", "choices": [self._choice(start, end, last)]}]

    def _choice(self, start: int, end: int, last: bool) -> Json:
        content: list[Json] = [
            {"token": f"token_id:{token}", "token_id": token, "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in zip(self.told.ids[start:end], self.told.logprobs[start:end], strict=True)
        ]
        return {
            "index": 0,
            "token_ids": self.told.ids[start:end],
            "logprobs": {"content": content},
            "finish_reason": self.told.finish if last else None,
        }


class ChatReply(Reply):
    """`/v1/chat/completions`: the engine reads what was sampled."""

    def __init__(self, engine: Engine, told: Told, body: Json) -> None:
        super().__init__(engine, told, body)
        self._head: Json = {"id": engine.serial("chatcmpl"), "created": int(time.time()), "model": MODEL}
        self._asked = bool(body.get("return_token_ids") or (body.get("extra_body") or {}).get("return_token_ids"))
        self._sent = Heard()

    def whole(self) -> Json:
        heard = self._heard(len(self.told.ids), True)
        calls = [self._call(n, heard) for n in range(len(heard.calls))]
        message = {
            "role": "assistant",
            "content": heard.content or (None if calls else ""),
            "reasoning": heard.reasoning or None,
            "reasoning_content": heard.reasoning or None,
            "tool_calls": calls,
        }
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(0, len(self.told.ids)),
            "finish_reason": self._finish(heard),
            "stop_reason": None,
            "token_ids": self.told.ids if self._asked else None,
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": self.usage(),
            "prompt_logprobs": None,
            "prompt_token_ids": self.told.prompt if self._asked else None,
        }

    def event(self, start: int, end: int, last: bool) -> list[Json]:
        events: list[Json] = []
        if start == 0:
            prompt = {"prompt_token_ids": self.told.prompt} if self._asked else {}
            events.append({**self._chunk({"role": "assistant", "content": ""}), **prompt})
        heard = self._heard(end, last)
        event = self._chunk(self._delta(heard))
        choice = event["choices"][0]
        choice["logprobs"] = self._logprobs(start, end)
        choice["token_ids"] = self.told.ids[start:end] if self._asked else None
        if last:
            choice["finish_reason"] = self._finish(heard)
        self._sent = heard
        events.append(event)
        if last and self.wants_usage():
            events.append({**self._chunk({}), "choices": [], "usage": self.usage()})
        return events

    def _chunk(self, delta: Json) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _delta(self, heard: Heard) -> Json:
        delta: Json = {}
        reasoning = heard.reasoning[len(self._sent.reasoning) :]
        if reasoning:
            delta["reasoning"] = delta["reasoning_content"] = reasoning
        if content := heard.content[len(self._sent.content) :]:
            delta["content"] = content
        if new := range(len(self._sent.calls), len(heard.calls)):
            delta["tool_calls"] = [{"index": n, **self._call(n, heard)} for n in new]
        return delta

    def _call(self, n: int, heard: Heard) -> Json:
        name, arguments = heard.calls[n]
        function = {"name": name, "arguments": arguments}
        return {"id": f"chatcmpl-tool-{self._head['id'][-8:]}{n}", "type": "function", "function": function}

    def _heard(self, end: int, over: bool) -> Heard:
        ids = self.told.ids[:end]
        if over and self.told.finish == "stop":
            ids = ids[:-1]
        text = self.engine.model.decode(ids, special=False)
        return hear(text, tools=bool(self.body.get("tools")), over=over)

    def _finish(self, heard: Heard) -> str:
        return "tool_calls" if heard.calls and self.told.finish == "stop" else self.told.finish

    def _logprobs(self, start: int, end: int) -> Json | None:
        if not self.body.get("logprobs") or self.body.get("top_logprobs", 0) is None:
            return None
        values = zip(self.names(start, end), self.told.logprobs[start:end], strict=True)
        return {
            "content": [
                {"token": name, "logprob": value, "bytes": list(name.encode()), "top_logprobs": []}
                for name, value in values
            ]
        }


class SglangReply(Reply):
    """SGLang's `/generate`."""

    def whole(self) -> Json:
        told = self.told
        triples = [[value, token, None] for value, token in zip(told.logprobs, told.ids, strict=True)]
        return {
            "text": self.engine.model.decode(told.ids),
            "output_ids": told.ids,
            "meta_info": {
                "id": self.engine.serial("sglang"),
                "finish_reason": {"type": told.finish},
                "prompt_tokens": len(told.prompt),
                "completion_tokens": len(told.ids),
                "output_token_logprobs": triples,
            },
        }


class Api:
    """The routes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**30, middlewares=[_clock])
        app.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/chat/completions/render", self.render),
                web.post("/inference/v1/generate", self.generate),
                web.post("/generate", self.sglang),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.get("/v1/models", self.models),
                web.get("/health", self.health),
                web.get("/version", self.version),
                web.post("/gauntlet/steps", self.learn),
                web.get("/gauntlet/log", self.log),
                web.delete("/gauntlet/log", self.forget),
            ]
        )
        return app

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        ids = self._engine.model.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return await self._answer(request, body, ids, body.get("max_tokens", 16), CompletionReply)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        wanted = body.get("max_completion_tokens") or body.get("max_tokens")
        return await self._answer(request, body, self._rendered(body), wanted, ChatReply)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = body.get("sampling_params") or {}
        wanted = params.get("max_tokens", 16)
        return await self._answer(request, body, list(body["token_ids"]), wanted, GenerateReply)

    async def sglang(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = body.get("sampling_params") or {}
        return await self._answer(request, body, list(body["input_ids"]), params.get("max_new_tokens"), SglangReply)

    async def _answer(
        self, request: web.Request, body: Json, prompt: list[int], wanted: int | None, kind: type[Reply]
    ) -> web.StreamResponse:
        try:
            told = self._engine.begin(prompt, wanted)
        except Refused as refusal:
            return _failure(refusal.status)
        except Dropped:
            return _hang_up(request)
        reply = kind(self._engine, told, body)
        try:
            return await (self._stream(request, reply) if body.get("stream") else self._whole(request, reply))
        finally:
            told.generation.seconds = time.perf_counter() - request[_BEGAN]

    async def _whole(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        try:
            async for _ in self._engine.tokens(reply.told):
                pass
        except Dropped:
            return _hang_up(request)
        return web.json_response(reply.whole(), dumps=_dumps)

    async def _stream(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        told = reply.told
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        paced = told.behaviour.pace_s > 0 or told.behaviour.cut_after is not None
        start = 0
        try:
            async for n in self._engine.tokens(told):
                last = n + 1 == len(told.ids)
                if paced or last or n + 1 - start == 8:  # tokens that come at once share an event, as in a busy engine
                    events = reply.event(start, n + 1, last)
                    await response.write(b"".join(b"data: " + _dumps(event).encode() + b"\n\n" for event in events))
                    start = n + 1
        except Dropped:
            return _hang_up(request, response)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _rendered(self, body: Json) -> list[int]:
        variables = body.get("chat_template_kwargs") or {}
        model = self._engine.model
        return model.encode(model.render(body["messages"], body.get("tools"), **variables))

    async def render(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response([{"prompt_token_ids": self._rendered(body)}])

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self._engine.model.encode(body["prompt"]) if "prompt" in body else self._rendered(body)
        return web.json_response({"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids})

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"prompt": self._engine.model.decode(body["tokens"])})

    async def models(self, _: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "vllm", "max_model_len": MAX_MODEL_LEN}
        return web.json_response({"object": "list", "data": [card]})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def learn(self, request: web.Request) -> web.Response:
        self._engine.learn(await request.json())
        return web.json_response({})

    async def log(self, request: web.Request) -> web.Response:
        return web.json_response(self._engine.log(request.query["rollout"]))

    async def forget(self, request: web.Request) -> web.Response:
        self._engine.forget(request.query["rollout"])
        return web.json_response({})


@web.middleware
async def _clock(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Everything from here on is the engine's own time."""
    request[_BEGAN] = time.perf_counter()
    return await handler(request)


def _failure(status: int) -> web.Response:
    kind, message = _FAULTS[status]
    error = {"message": message, "type": kind, "param": "input_tokens" if status == 400 else None, "code": status}
    return web.json_response({"error": error}, status=status)


def _hang_up(request: web.Request, begun: web.StreamResponse | None = None) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return begun or web.Response()


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m gauntlet.engine", description="The Gauntlet's mock engine.")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args(arguments)
    app = Api(Engine(Model(default_model()))).app()
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, access_log=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
