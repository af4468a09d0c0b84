"""A stand-in for vLLM that costs almost nothing, as a process of its own. Started by `overhead.py`; of no other use.

    python bench/mock_engine.py --port 8001 --answers answers.json [--omit-prompt-ids]

It answers `POST /v1/completions` at once, in the shape that vLLM 0.32 has (fields, order, nulls, one event per token), with ids
that the driver worked out beforehand, told in the way that was asked for (`return_token_ids`, `return_tokens_as_token_ids`).
It never parses the prompt: it compares it, as bytes, with what the same session sent last. A prompt that is not exactly the
last prompt, the last answer and something new is counted as broken.

Besides vLLM's routes: `GET /bench/report` says what each session sent; `GET /bench/pace/MS` sets the time between streamed tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
from pathlib import Path
from typing import NamedTuple

import uvloop

MODEL = "bench"
MAX_MODEL_LEN = 1_000_000
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_SESSION = re.compile(rb"\r\nx-session-id: *([^\r]+)", re.IGNORECASE)
_PROMPT = b'"prompt":['
_PLACE = b'"@PROMPT@"'


class Told(NamedTuple):
    """What was sampled, and how it is told."""

    ids: list[int]
    logprobs: list[float]
    texts: list[str]  # of each token
    as_ids: bool  # `return_token_ids`
    as_names: bool  # `return_tokens_as_token_ids`

    def names(self) -> list[str]:
        return [f"token_id:{i}" for i in self.ids] if self.as_names else self.texts


class Wire:
    """A reply, serialised. The prompt's ids go between its two halves."""

    def __init__(self, told: Told) -> None:
        self.whole = _whole(told).split(_PLACE)
        self.events = _events(told)
        self.first = self.events[0].split(_PLACE)
        self.rest = b"".join(_chunk(event) for event in self.events[1:]) + b"0\r\n\r\n"


class Answer:
    """One turn's reply, in each way to tell it."""

    def __init__(self, ids: list[int], logprobs: list[float], tokens: list[str]) -> None:
        self.ids = ",".join(map(str, ids)).encode()
        ways = itertools.product((False, True), repeat=2)
        self.wires = {way: Wire(Told(ids, logprobs, tokens, *way)) for way in ways}


class Seen:
    """What one session has sent."""

    def __init__(self) -> None:
        self.turns = 0
        self.broken = 0
        self.prompt_tokens: list[int] = []
        self._expected = b""

    def take(self, prompt: bytes, answer: bytes) -> None:
        if not prompt.startswith(self._expected) or len(prompt) == len(self._expected):
            self.broken += 1
        self.turns += 1
        self.prompt_tokens.append(prompt.count(b",") + 1)
        self._expected = prompt + b"," + answer + b","


class Engine:
    def __init__(self, answers: list[Answer], *, omit_prompt_ids: bool) -> None:
        self.answers = answers
        self.omit_prompt_ids = omit_prompt_ids
        self.pace_s = 0.0
        self.sessions: dict[str, Seen] = {}

    def document(self, path: str) -> bytes:
        if path.startswith("/bench/pace/"):
            self.pace_s = float(path.rpartition("/")[2]) / 1000
        if path == "/bench/report":
            seen = {name: _report(session) for name, session in self.sessions.items()}
            self.sessions = {}
            return _json(seen)
        if path == "/v1/models":
            card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "vllm", "max_model_len": MAX_MODEL_LEN}
            return _json({"object": "list", "data": [card]})
        if path == "/weight_info":
            return _json({"weight_version": "default"})
        return _json({})

    def answer(self, head: bytes, prompt: bytes) -> Answer:
        """Calls that name no session are not followed: they are the driver's own."""
        named = _SESSION.search(head)
        if named is None:
            return self.answers[0]
        session = self.sessions.setdefault(named[1].decode(), Seen())
        answer = self.answers[session.turns % len(self.answers)]
        session.take(prompt, answer.ids)
        return answer


class Connection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read: list[bytes] = []
        self._size = 0
        self._wanted = 0  # bytes of the whole request; 0: its head is not there yet
        self._head = 0
        self._pacing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as it always is
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._pacing is not None:
            self._pacing.cancel()

    def data_received(self, data: bytes) -> None:
        self._read.append(data)
        self._size += len(data)
        if not self._wanted:
            read = b"".join(self._read)
            self._read = [read]
            self._head = read.find(b"\r\n\r\n") + 4
            if self._head < 4:
                return
            length = _LENGTH.search(read, 0, self._head)
            self._wanted = self._head + (int(length[1]) if length else 0)
        if self._size >= self._wanted:
            request, head = b"".join(self._read), self._head
            self._read, self._size, self._wanted = [], 0, 0
            self._serve(request[:head], request[head:])

    def _serve(self, head: bytes, body: bytes) -> None:
        method, path, _ = head.split(b" ", 2)
        if method == b"GET":
            self._reply(self._engine.document(path.decode()))
            return
        start = body.find(_PROMPT) + len(_PROMPT)
        end = body.find(b"]", start)
        prompt, rest = body[start:end], body[end:] + body[:start]
        as_ids = b'"return_token_ids":true' in rest
        answer = self._engine.answer(head, prompt)
        wire = answer.wires[as_ids, b'"return_tokens_as_token_ids":true' in rest]
        ids = b"[" + prompt + b"]" if as_ids and not self._engine.omit_prompt_ids else b"null"
        if b'"stream":true' not in rest:
            self._reply(ids.join(wire.whole))
        elif self._engine.pace_s:
            self._pacing = asyncio.create_task(self._stream_slowly(wire, ids))
        else:
            self._transport.write(_STREAM_HEAD + _chunk(ids.join(wire.first)) + wire.rest)

    async def _stream_slowly(self, wire: Wire, ids: bytes) -> None:
        self._transport.write(_STREAM_HEAD + _chunk(ids.join(wire.first)))
        for event in wire.events[1:]:
            await asyncio.sleep(self._engine.pace_s)
            self._transport.write(_chunk(event))
        self._transport.write(b"0\r\n\r\n")

    def _reply(self, body: bytes) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _report(session: Seen) -> dict[str, object]:
    return {"turns": session.turns, "broken": session.broken, "prompt_tokens": session.prompt_tokens}


def _logprobs(offset: int, logprobs: list[float], names: list[str]) -> dict[str, object]:
    """vLLM's `CompletionLogProbs` for `logprobs: 0`: the sampled token is its own only alternative."""
    offsets = [offset]
    for name in names[:-1]:
        offsets.append(offsets[-1] + len(name))
    top = [{name: logprob} for name, logprob in zip(names, logprobs, strict=True)]
    return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": names, "top_logprobs": top}


def _whole(told: Told) -> bytes:
    choice = {
        "index": 0,
        "text": "".join(told.texts),
        "logprobs": _logprobs(0, told.logprobs, told.names()),
        "finish_reason": "stop",
        "stop_reason": told.ids[-1],
        "token_ids": told.ids if told.as_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": "@PROMPT@",
        "routed_experts": None,
    }
    # The prompt's length is not counted for `usage`, which the gateway does not read.
    usage = {"prompt_tokens": 17_000, "total_tokens": 17_064, "completion_tokens": 64, "prompt_tokens_details": None}
    response = {
        **_HEAD,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": "vllm-0.32.0",
        "usage": usage,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }
    return _json(response)


def _events(told: Told) -> list[bytes]:
    """One for each token, and the end."""
    events = []
    offset = 0
    names = told.names()
    for n, name in enumerate(names):
        last = n == len(names) - 1
        choice = {
            "index": 0,
            "text": told.texts[n],
            "logprobs": _logprobs(offset, told.logprobs[n : n + 1], [name]),
            "finish_reason": "stop" if last else None,
            "stop_reason": told.ids[-1] if last else None,
            "prompt_token_ids": None if n else "@PROMPT@",
            "token_ids": told.ids[n : n + 1] if told.as_ids else None,
        }
        event = {**_HEAD, "choices": [choice], **({"system_fingerprint": "vllm-0.32.0"} if last else {})}
        events.append(b"data: " + _json(event) + b"\n\n")
        offset += len(name)
    return [*events, b"data: [DONE]\n\n"]


_HEAD = {"id": "cmpl-" + "5a" * 16, "object": "text_completion", "created": 1_760_000_000, "model": MODEL}


async def _main(port: int, engine: Engine) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A mock vLLM for bench/overhead.py.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--answers", type=Path, required=True, help="JSON: a list of {ids, logprobs, tokens}")
    parser.add_argument("--omit-prompt-ids", action="store_true", help="never send the prompt's ids back")
    args = parser.parse_args()
    made = [Answer(**answer) for answer in json.loads(args.answers.read_text(encoding="utf-8"))]
    uvloop.run(_main(args.port, Engine(made, omit_prompt_ids=args.omit_prompt_ids)))
