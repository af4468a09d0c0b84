"""Replies of the mock engine, for each of its APIs, in full or as events."""

from __future__ import annotations

import time
from typing import ClassVar

from gauntlet.extras import encode_experts, sampling_masks, score_prompt, version_spans
from gauntlet.reply_format import ParsedReply, parse_reply
from gauntlet.sampler import MODEL, Engine, Sample
from gauntlet.tokens import Json


class Reply:
    """A reply, in full or as events. Each API has a subclass."""

    named: ClassVar[bool] = False  # events have names, and no [DONE] follows them

    def __init__(self, engine: Engine, sample: Sample, body: Json) -> None:
        self.engine, self.sample, self.body = engine, sample, body

    def full(self) -> Json:
        raise NotImplementedError

    def event(self, start: int, end: int, last: bool) -> list[Json]:
        """Return the events to send once the tokens from `start` to `end` are sampled."""
        raise NotImplementedError

    def usage(self) -> Json:
        prompt, sampled = len(self.sample.prompt), len(self.sample.ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": None,
        }

    def wants_usage(self) -> bool:
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    def names(self, start: int, end: int) -> list[str]:
        ids = self.sample.ids[start:end]
        if self.body.get("return_tokens_as_token_ids"):
            return [f"token_id:{token}" for token in ids]
        return [self.engine.name(token) for token in ids]


class CompletionReply(Reply):
    """`/v1/completions`."""

    def __init__(self, engine: Engine, sample: Sample, body: Json) -> None:
        super().__init__(engine, sample, body)
        self.head = {
            "id": engine.new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": MODEL,
        }

    def full(self) -> Json:
        choice = self._choice(0, len(self.sample.ids), True)
        return {**self.head, "choices": [choice], "usage": self.usage()}

    def event(self, start: int, end: int, last: bool) -> list[Json]:
        events: list[Json] = [{**self.head, "choices": [self._choice(start, end, last)]}]
        if last and self.wants_usage():
            events.append({**self.head, "choices": [], "usage": self.usage()})
        return events

    def _choice(self, start: int, end: int, last: bool) -> Json:
        sample, ids = self.sample, self.sample.ids[start:end]
        asked = self.body.get("return_token_ids")
        logprobs = None
        if self.body.get("logprobs") is not None:
            names, values = self.names(start, end), sample.logprobs[start:end]
            top = [{name: value} for name, value in zip(names, values, strict=True)]
            logprobs = {"text_offset": [0] * len(names), "token_logprobs": values, "tokens": names, "top_logprobs": top}
        return {
            "index": 0,
            "text": self.engine.model.decode(ids),
            "logprobs": logprobs,
            "finish_reason": sample.finish if last else None,
            "stop_reason": None,
            "token_ids": ids if asked else None,
            "prompt_token_ids": sample.prompt if asked and start == 0 else None,
            **({} if self.body.get("prompt_logprobs") is None else {"prompt_logprobs": score_prompt(sample.prompt)}),
        }


class GenerateReply(Reply):
    """`/inference/v1/generate`."""

    def full(self) -> Json:
        return {
            "request_id": self.engine.new_id("generate-tokens"),
            "choices": [self._choice(0, len(self.sample.ids), True)],
            "prompt_logprobs": None,
            "kv_transfer_params": None,
            "usage": self.usage(),
        }

    def event(self, start: int, end: int, last: bool) -> list[Json]:
        return [{"request_id": "", "choices": [self._choice(start, end, last)]}]

    def _choice(self, start: int, end: int, last: bool) -> Json:
        content: list[Json] = [
            {"token": f"token_id:{token}", "token_id": token, "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in zip(self.sample.ids[start:end], self.sample.logprobs[start:end], strict=True)
        ]
        choice: Json = {
            "index": 0,
            "token_ids": self.sample.ids[start:end],
            "logprobs": {"content": content},
            "finish_reason": self.sample.finish if last else None,
        }
        if self.engine.extras.masks:
            choice["sampling_mask"] = sampling_masks(self.sample)[start:end]
        if last:
            choice["weight_versions"] = version_spans(self.sample.generation.versions)
            if self.engine.extras.experts:
                first = (self.body.get("sampling_params") or {}).get("routed_experts_prompt_start") or 0
                choice["routed_experts"] = encode_experts(self.sample, first, self.engine.extras.experts)
        return choice


class ChatReply(Reply):
    """`/v1/chat/completions`, where the engine parses the sampled text."""

    def __init__(self, engine: Engine, sample: Sample, body: Json) -> None:
        super().__init__(engine, sample, body)
        self.head: Json = {"id": engine.new_id("chatcmpl"), "created": int(time.time()), "model": MODEL}
        self._returns_ids = bool(body.get("return_token_ids") or (body.get("extra_body") or {}).get("return_token_ids"))
        self.sent = ParsedReply()

    def full(self) -> Json:
        parsed = self.parse(len(self.sample.ids), True)
        calls = [self.call(n, parsed) for n in range(len(parsed.calls))]
        message = {
            "role": "assistant",
            "content": parsed.content or (None if calls else ""),
            "reasoning": parsed.reasoning or None,
            "reasoning_content": parsed.reasoning or None,
            "tool_calls": calls,
        }
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(0, len(self.sample.ids)),
            "finish_reason": self.finish(parsed),
            "stop_reason": None,
            "token_ids": self.sample.ids if self._returns_ids else None,
        }
        return {
            **self.head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": self.usage(),
            "prompt_logprobs": None,
            "prompt_token_ids": self.sample.prompt if self._returns_ids else None,
        }

    def event(self, start: int, end: int, last: bool) -> list[Json]:
        events: list[Json] = []
        if start == 0:
            prompt = {"prompt_token_ids": self.sample.prompt} if self._returns_ids else {}
            events.append({**self._chunk({"role": "assistant", "content": ""}), **prompt})
        parsed = self.parse(end, last)
        event = self._chunk(self._delta(parsed))
        choice = event["choices"][0]
        choice["logprobs"] = self._logprobs(start, end)
        choice["token_ids"] = self.sample.ids[start:end] if self._returns_ids else None
        if last:
            choice["finish_reason"] = self.finish(parsed)
        self.sent = parsed
        events.append(event)
        if last and self.wants_usage():
            events.append({**self._chunk({}), "choices": [], "usage": self.usage()})
        return events

    def _chunk(self, delta: Json) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self.head, "object": "chat.completion.chunk", "choices": [choice]}

    def _delta(self, parsed: ParsedReply) -> Json:
        delta: Json = {}
        reasoning = parsed.reasoning[len(self.sent.reasoning) :]
        if reasoning:
            delta["reasoning"] = delta["reasoning_content"] = reasoning
        if content := parsed.content[len(self.sent.content) :]:
            delta["content"] = content
        if new := range(len(self.sent.calls), len(parsed.calls)):
            delta["tool_calls"] = [{"index": n, **self.call(n, parsed)} for n in new]
        return delta

    def call(self, n: int, parsed: ParsedReply) -> Json:
        name, arguments = parsed.calls[n]
        function = {"name": name, "arguments": arguments}
        return {"id": f"chatcmpl-tool-{self.head['id'][-8:]}{n}", "type": "function", "function": function}

    def parse(self, end: int, complete: bool) -> ParsedReply:
        ids = self.sample.ids[:end]
        if complete and self.sample.finish == "stop":
            ids = ids[:-1]
        text = self.engine.model.decode(ids, special=False)
        return parse_reply(text, tools=bool(self.body.get("tools")), complete=complete)

    def finish(self, parsed: ParsedReply) -> str:
        return "tool_calls" if parsed.calls and self.sample.finish == "stop" else self.sample.finish

    def _logprobs(self, start: int, end: int) -> Json | None:
        if not self.body.get("logprobs") or self.body.get("top_logprobs", 0) is None:
            return None
        values = zip(self.names(start, end), self.sample.logprobs[start:end], strict=True)
        return {
            "content": [
                {"token": name, "logprob": value, "bytes": list(name.encode()), "top_logprobs": []}
                for name, value in values
            ]
        }


class SglangReply(Reply):
    """SGLang's `/generate`."""

    def full(self) -> Json:
        sample = self.sample
        triples = [[value, token, None] for value, token in zip(sample.logprobs, sample.ids, strict=True)]
        return {
            "text": self.engine.model.decode(sample.ids),
            "output_ids": sample.ids,
            "meta_info": {
                "id": self.engine.new_id("sglang"),
                "finish_reason": {"type": sample.finish},
                "prompt_tokens": len(sample.prompt),
                "completion_tokens": len(sample.ids),
                "output_token_logprobs": triples,
            },
        }
