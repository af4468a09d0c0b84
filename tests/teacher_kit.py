"""A stand-in for a vLLM or SGLang server that scores ids. Each score follows from the ids before and at its token."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from tests.kit import tokenizer
from turngate.engines.scripted import derive_logprobs


def expected_scores(ids: list[int]) -> list[float]:
    """Return the stand-in's log-probability of each token. The first one, which has none, is NaN."""
    return [math.nan, *(score - 0.25 for score in derive_logprobs(np.array(ids[:1], np.int32), ids[1:]))]


def expected_top(token: int, score: float, top_k: int) -> list[tuple[int, float]]:
    """Return the stand-in's most likely tokens where it gives `score` to `token`. They are others than the token itself."""
    return [(token + n + 1, score * (n + 1) / (top_k + 2)) for n in range(top_k)]


class TeacherServer:
    """What the stand-in received, and how it misbehaves. `change` may change the reply to a scoring call."""

    def __init__(self) -> None:
        self.url = ""
        self.scored: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.fail_after: int | None = None  # answer with 503 after this many scoring calls
        self.redirect_to = ""  # answer every call with a redirect to this URL
        self.raw: bytes | None = None  # send these bytes instead of a response, and close the connection
        self.decodes = True
        self.shift = 0  # a vocabulary with other ids
        self.change: Callable[[list[Any]], None] = lambda scores: None
        self.lock = threading.Lock()
        self.running = self.most_running = 0

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "teacher"}]}
        if path == "/detokenize":
            shifted = [token + self.shift for token in body["tokens"]]
            return (200, {"prompt": tokenizer().decode(shifted)}) if self.decodes else (404, {"detail": "Not Found"})
        with self.lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            number = len(self.scored)
            self.scored.append(body)
        try:
            if self.fail_after is not None and number >= self.fail_after:
                return 503, {"error": {"message": "the engine is dead"}}
            return 200, self.score_vllm(body) if path == "/v1/completions" else self.score_sglang(body)
        finally:
            with self.lock:
                self.running -= 1

    def score_vllm(self, body: Any) -> Any:
        ids, top_k = body["prompt"], body["prompt_logprobs"]
        scores: list[Any] = [None]
        for own, logprob in list(zip(ids, expected_scores(ids), strict=True))[1:]:
            tops = expected_top(own, logprob, top_k)
            entry = {str(token): {"logprob": score, "rank": n + 1} for n, (token, score) in enumerate(tops)}
            scores.append({**entry, str(own): {"logprob": logprob, "rank": top_k + 1}})
        self.change(scores)
        return {"choices": [{"prompt_logprobs": scores}]}

    def score_sglang(self, body: Any) -> Any:
        ids, top_k = body["input_ids"], body["top_logprobs_num"]
        scores: list[Any] = [[None, ids[0], None]]
        tops: list[Any] = [None]
        for own, logprob in list(zip(ids, expected_scores(ids), strict=True))[1:]:
            scores.append([logprob, own, None])
            tops.append([[score, token, None] for token, score in expected_top(own, logprob, top_k)])
        self.change(scores)
        return {"meta_info": {"input_token_logprobs": scores, **({"input_top_logprobs": tops} if top_k else {})}}


@contextmanager
def serve_teacher() -> Iterator[TeacherServer]:
    state = TeacherServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def reply(self, body: Any) -> None:
            state.keys.add(self.headers.get("authorization"))
            status, answer = state.answer(self.path, body)
            if state.raw is not None:
                self.wfile.write(state.raw)
                return
            payload = json.dumps(answer).encode()
            self.send_response(307 if state.redirect_to else status)
            if state.redirect_to:
                self.send_header("location", state.redirect_to + self.path.removeprefix("/v1"))
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()
