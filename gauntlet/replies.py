"""What the mock engine answers: one kind of reply for each of its APIs, whole or as events."""

from __future__ import annotations

import time
from typing import ClassVar

from gauntlet.sampler import MODEL, Engine, Told
from gauntlet.speech import Heard, hear
from gauntlet.tokens import Json


class Reply:
    """A reply on its way: whole, or as events. One subclass for each API."""

    named: ClassVar[bool] = False  # its events have names, and no [DONE] comes after them

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
        self.head = {
            "id": engine.serial("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": MODEL,
        }

    def whole(self) -> Json:
        choice = self._choice(0, len(self.told.ids), True)
        return {**self.head, "choices": [choice], "usage": self.usage()}

    def event(self, start: int, end: int, last: bool) -> list[Json]:
        events: list[Json] = [{**self.head, "choices": [self._choice(start, end, last)]}]
        if last and self.wants_usage():
            events.append({**self.head, "choices": [], "usage": self.usage()})
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
        self.head: Json = {"id": engine.serial("chatcmpl"), "created": int(time.time()), "model": MODEL}
        self._asked = bool(body.get("return_token_ids") or (body.get("extra_body") or {}).get("return_token_ids"))
        self.sent = Heard()

    def whole(self) -> Json:
        heard = self.heard(len(self.told.ids), True)
        calls = [self.call(n, heard) for n in range(len(heard.calls))]
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
            "finish_reason": self.finish(heard),
            "stop_reason": None,
            "token_ids": self.told.ids if self._asked else None,
        }
        return {
            **self.head,
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
        heard = self.heard(end, last)
        event = self._chunk(self._delta(heard))
        choice = event["choices"][0]
        choice["logprobs"] = self._logprobs(start, end)
        choice["token_ids"] = self.told.ids[start:end] if self._asked else None
        if last:
            choice["finish_reason"] = self.finish(heard)
        self.sent = heard
        events.append(event)
        if last and self.wants_usage():
            events.append({**self._chunk({}), "choices": [], "usage": self.usage()})
        return events

    def _chunk(self, delta: Json) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self.head, "object": "chat.completion.chunk", "choices": [choice]}

    def _delta(self, heard: Heard) -> Json:
        delta: Json = {}
        reasoning = heard.reasoning[len(self.sent.reasoning) :]
        if reasoning:
            delta["reasoning"] = delta["reasoning_content"] = reasoning
        if content := heard.content[len(self.sent.content) :]:
            delta["content"] = content
        if new := range(len(self.sent.calls), len(heard.calls)):
            delta["tool_calls"] = [{"index": n, **self.call(n, heard)} for n in new]
        return delta

    def call(self, n: int, heard: Heard) -> Json:
        name, arguments = heard.calls[n]
        function = {"name": name, "arguments": arguments}
        return {"id": f"chatcmpl-tool-{self.head['id'][-8:]}{n}", "type": "function", "function": function}

    def heard(self, end: int, over: bool) -> Heard:
        ids = self.told.ids[:end]
        if over and self.told.finish == "stop":
            ids = ids[:-1]
        text = self.engine.model.decode(ids, special=False)
        return hear(text, tools=bool(self.body.get("tools")), over=over)

    def finish(self, heard: Heard) -> str:
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
