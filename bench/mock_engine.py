"""A mock vLLM that uses almost no CPU. `overhead.py` starts it as a separate process.

    python bench/mock_engine.py --port 8001 --answers answers.json [--omit-prompt-ids]

It answers `POST /v1/completions` immediately, in the format of vLLM 0.32 (fields, order, nulls, one event per token), with ids that the
driver has prepared, in the requested form (`return_token_ids`, `return_tokens_as_token_ids`). It never parses the prompt, but compares its
bytes with the last request of the same session. A prompt counts as broken unless it consists of the last prompt, the last answer and
something new.

In addition to vLLM's routes, `GET /bench/report` returns what each session sent, and `GET /bench/pace/MS` sets the time between streamed
tokens. `GET /bench/fault/KIND` makes calls fail from now on: `reset` closes the connection, `error` answers 500, `slow` answers late, and
`none` ends it.
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
SLOW_S = 2.0
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_SESSION = re.compile(rb"\r\nx-session-id: *([^\r]+)", re.IGNORECASE)
_PROMPT = b'"prompt":['
_PLACEHOLDER = b'"@PROMPT@"'


class SampledTokens(NamedTuple):
    """Sampled tokens, and the form in which they are returned."""

    ids: list[int]
    logprobs: list[float]
    texts: list[str]  # one per token
    as_ids: bool  # `return_token_ids`
    as_names: bool  # `return_tokens_as_token_ids`

    def names(self) -> list[str]:
        return [f"token_id:{i}" for i in self.ids] if self.as_names else self.texts


class EncodedReply:
    """A serialized reply. The prompt's ids are inserted between its two halves."""

    def __init__(self, sampled: SampledTokens) -> None:
        self.full = _full_reply(sampled).split(_PLACEHOLDER)
        self.events = _events(sampled)
        self.first = self.events[0].split(_PLACEHOLDER)
        self.rest = b"".join(_chunk(event) for event in self.events[1:]) + b"0\r\n\r\n"


class Answer:
    """The reply of one turn, in every form."""

    def __init__(self, ids: list[int], logprobs: list[float], tokens: list[str]) -> None:
        self.ids = ",".join(map(str, ids)).encode()
        ways = itertools.product((False, True), repeat=2)
        self.encoded = {way: EncodedReply(SampledTokens(ids, logprobs, tokens, *way)) for way in ways}


class SessionLog:
    """Statistics about the requests of one session."""

    def __init__(self) -> None:
        self.turns = 0
        self.broken = 0
        self.prompt_tokens: list[int] = []
        self._expected = b""

    def record(self, prompt: bytes, answer: bytes) -> None:
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
        self.fault = "none"
        self.sessions: dict[str, SessionLog] = {}

    def document(self, path: str) -> bytes:
        if path.startswith("/bench/pace/"):
            self.pace_s = float(path.rpartition("/")[2]) / 1000
        if path.startswith("/bench/fault/"):
            self.fault = path.rpartition("/")[2]
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
        """Return the answer to a call. Calls without a session come from the driver and are not recorded."""
        named = _SESSION.search(head)
        if named is None:
            return self.answers[0]
        session = self.sessions.setdefault(named[1].decode(), SessionLog())
        answer = self.answers[session.turns % len(self.answers)]
        session.record(prompt, answer.ids)
        return answer


class Connection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read: list[bytes] = []
        self._size = 0
        self._wanted = 0  # bytes of the whole request; 0 before its head has arrived
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
        if self._engine.fault == "slow":
            asyncio.get_running_loop().call_later(SLOW_S, self._answer, head, body)
        elif self._engine.fault == "reset":
            self._transport.abort()
        elif self._engine.fault == "error":
            self._transport.write(_ERROR)
        else:
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        start = body.find(_PROMPT) + len(_PROMPT)
        end = body.find(b"]", start)
        prompt, rest = body[start:end], body[end:] + body[:start]
        as_ids = b'"return_token_ids":true' in rest
        answer = self._engine.answer(head, prompt)
        encoded = answer.encoded[as_ids, b'"return_tokens_as_token_ids":true' in rest]
        ids = b"[" + prompt + b"]" if as_ids and not self._engine.omit_prompt_ids else b"null"
        if b'"stream":true' not in rest:
            self._reply(ids.join(encoded.full))
        elif self._engine.pace_s:
            self._pacing = asyncio.create_task(self._stream_slowly(encoded, ids))
        else:
            self._transport.write(_STREAM_HEAD + _chunk(ids.join(encoded.first)) + encoded.rest)

    async def _stream_slowly(self, encoded: EncodedReply, ids: bytes) -> None:
        self._transport.write(_STREAM_HEAD + _chunk(ids.join(encoded.first)))
        for event in encoded.events[1:]:
            await asyncio.sleep(self._engine.pace_s)
            self._transport.write(_chunk(event))
        self._transport.write(b"0\r\n\r\n")

    def _reply(self, body: bytes) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )


_ERROR = b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _report(session: SessionLog) -> dict[str, object]:
    return {"turns": session.turns, "broken": session.broken, "prompt_tokens": session.prompt_tokens}


def _logprobs(offset: int, logprobs: list[float], names: list[str]) -> dict[str, object]:
    """Build vLLM's `CompletionLogProbs` for `logprobs: 0`, where the sampled token is the only alternative."""
    offsets = [offset]
    for name in names[:-1]:
        offsets.append(offsets[-1] + len(name))
    top = [{name: logprob} for name, logprob in zip(names, logprobs, strict=True)]
    return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": names, "top_logprobs": top}


def _full_reply(sampled: SampledTokens) -> bytes:
    choice = {
        "index": 0,
        "text": "".join(sampled.texts),
        "logprobs": _logprobs(0, sampled.logprobs, sampled.names()),
        "finish_reason": "stop",
        "stop_reason": sampled.ids[-1],
        "token_ids": sampled.ids if sampled.as_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": "@PROMPT@",
        "routed_experts": None,
    }
    # The gateway compares the number of sampled tokens, and does not read the length of the prompt.
    usage = {
        "prompt_tokens": 17_000,
        "total_tokens": 17_064,
        "completion_tokens": len(sampled.ids),
        "prompt_tokens_details": None,
    }
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


def _events(sampled: SampledTokens) -> list[bytes]:
    """Build one event per token, and the end of the stream."""
    events = []
    offset = 0
    names = sampled.names()
    for n, name in enumerate(names):
        last = n == len(names) - 1
        choice = {
            "index": 0,
            "text": sampled.texts[n],
            "logprobs": _logprobs(offset, sampled.logprobs[n : n + 1], [name]),
            "finish_reason": "stop" if last else None,
            "stop_reason": sampled.ids[-1] if last else None,
            "prompt_token_ids": None if n else "@PROMPT@",
            "token_ids": sampled.ids[n : n + 1] if sampled.as_ids else None,
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
    parser.add_argument("--omit-prompt-ids", action="store_true", help="never return the prompt's ids")
    args = parser.parse_args()
    answers = [Answer(**answer) for answer in json.loads(args.answers.read_text(encoding="utf-8"))]
    uvloop.run(_main(args.port, Engine(answers, omit_prompt_ids=args.omit_prompt_ids)))
