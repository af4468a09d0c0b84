"""Stand-ins for the four kinds of observed endpoint, with the wire formats and the strictness of the real ones.

A provider plays a script of model turns (`ModelTurn`). It rejects what the real one rejects: a wrong key, tool results without a matching
call, thinking that comes back altered. `tests/engines/test_providers.py` checks the streams against the official SDKs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from aiohttp import web

from tests.engines.standins import DONE, StandIn, answer_stream, answer_with, event

Json = Any
KEY = "provider-secret"


class ModelTurn(NamedTuple):
    """The model's output in one turn."""

    text: str = ""
    thought: str = ""
    calls: Sequence[tuple[str, Json]] = ()
    cut: bool = False  # by the token limit

    @property
    def prompt(self) -> int:
        return 40

    @property
    def sampled(self) -> int:
        return 10 + len(self.text) + len(self.thought)


class Refusal(Exception):
    """An error response from a provider."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def split_text(text: str) -> list[str]:
    """Split the text in two, as a stream would."""
    middle = len(text) // 2
    return [part for part in (text[:middle], text[middle:]) if part]


class Provider(StandIn):
    """One endpoint. The number of assistant turns in the request selects the scripted turn to play."""

    name = ""  # name of the engine that observes it

    def __init__(self, *turns: ModelTurn) -> None:
        super().__init__(self.reply)
        self.turns = turns
        self.seen: list[Json] = []  # accepted request bodies
        self.refusals: list[str] = []

    async def reply(self, request: web.Request) -> web.StreamResponse:
        try:
            self.check_key(request)
            if counts := self.count_response(request):
                return await answer_with(counts)(request)
            turn = self.find_turn(self.last_body)
        except Refusal as refusal:
            self.refusals.append(str(refusal))
            return await answer_with(self.error(refusal), refusal.status)(request)
        self.seen.append(self.last_body)
        if self.is_streaming(request):
            return await answer_stream(*self.stream(self.turns[turn], turn))(request)
        return await answer_with(self.full_response(self.turns[turn], turn))(request)

    def check_key(self, request: web.Request) -> None:
        raise NotImplementedError

    def count_response(self, request: web.Request) -> Json:
        return None

    def is_streaming(self, request: web.Request) -> bool:
        return bool(self.last_body.get("stream"))

    def find_turn(self, body: Json) -> int:
        """Validate the conversation and return the index of the turn to play."""
        raise NotImplementedError

    def stream(self, output: ModelTurn, turn: int) -> list[bytes]:
        raise NotImplementedError

    def full_response(self, output: ModelTurn, turn: int) -> Json:
        raise NotImplementedError

    def error(self, refusal: Refusal) -> Json:
        raise NotImplementedError


def check_results(calls: Sequence[str], answered: Sequence[str]) -> None:
    if sorted(calls) != sorted(answered):
        raise Refusal(400, f"calls {list(calls)} were answered by {list(answered)}")


# ── OpenAI-compatible chat ──────────────────────────────────────────────────────────────────────────────────────────────


class ChatProvider(Provider):
    """Behaves like vLLM with `--api-key` and a reasoning parser. With `returns_ids` it returns token ids of a template that renders the
    whole conversation, so a prompt extends the previous one only if nothing was changed."""

    name = "openai"

    def __init__(self, *turns: ModelTurn, returns_ids: bool = False) -> None:
        super().__init__(*turns)
        self.returns_ids = returns_ids

    def check_key(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            raise Refusal(401, "Incorrect API key provided")

    def find_turn(self, body: Json) -> int:
        open_calls: list[str] = []
        answered: list[str] = []
        turn = 0
        for message in body["messages"]:
            if message["role"] == "tool":
                answered.append(message["tool_call_id"])
                continue
            check_results(open_calls, answered)
            open_calls, answered = [], []
            if message["role"] == "assistant":
                turn += 1
                open_calls = [call["id"] for call in message.get("tool_calls") or ()]
        check_results(open_calls, answered)
        return turn

    def stream(self, output: ModelTurn, turn: int) -> list[bytes]:
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": self.last_body["model"]}
        deltas: list[Json] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": part} for part in split_text(output.thought)]
        deltas += [{"content": part} for part in split_text(output.text)]
        for n, (name, arguments) in enumerate(output.calls):
            first, *rest = split_text(json.dumps(arguments))
            function = {"name": name, "arguments": first}
            deltas.append(
                {"tool_calls": [{"index": n, "id": f"call_{turn}_{n}", "type": "function", "function": function}]}
            )
            deltas += [{"tool_calls": [{"index": n, "function": {"arguments": part}}]} for part in rest]
        ids = self.sampled_ids(output) if self.returns_ids else []
        chunks = [
            {**head, "choices": [{"index": 0, "delta": d, "logprobs": None, "finish_reason": None}]} for d in deltas
        ]
        if self.returns_ids:
            chunks[0]["prompt_token_ids"] = self.prompt_ids()
            for n, chunk in enumerate(chunks[1:]):  # three ids per chunk, the rest in the last one
                some = ids[n * 3 : (n + 1) * 3 if n < len(deltas) - 2 else None]
                tokens = [{"token": "t", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in some]
                chunk["choices"][0] |= {"token_ids": some, "logprobs": {"content": tokens}}
        end = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": self.finish(output)}
        usage = {**head, "choices": [], "usage": self.usage(output)}
        return [b"".join(event(chunk) for chunk in chunks), event({**head, "choices": [end]}) + event(usage) + DONE]

    def full_response(self, output: ModelTurn, turn: int) -> Json:
        calls = [
            {"id": f"call_{turn}_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
            for n, (name, given) in enumerate(output.calls)
        ]
        message = {"role": "assistant", "content": output.text or None, "reasoning_content": output.thought or None}
        choice: Json = {
            "index": 0,
            "message": {**message, "tool_calls": calls or None},
            "finish_reason": self.finish(output),
        }
        reply = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": self.last_body["model"]}
        if self.returns_ids:
            ids = self.sampled_ids(output)
            choice["token_ids"] = ids
            choice["logprobs"] = {
                "content": [{"token": "t", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in ids]
            }
            reply["prompt_token_ids"] = self.prompt_ids()
        return {**reply, "choices": [choice], "usage": self.usage(output)}

    def finish(self, output: ModelTurn) -> str:
        return "length" if output.cut else "tool_calls" if output.calls else "stop"

    def usage(self, output: ModelTurn) -> Json:
        prompt, sampled = output.prompt, output.sampled
        if self.returns_ids:
            prompt, sampled = len(self.prompt_ids()), len(self.sampled_ids(output))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": 7},
            "completion_tokens_details": {"reasoning_tokens": len(output.thought)},
        }

    def prompt_ids(self) -> list[int]:
        text = json.dumps(self.last_body.get("tools"))
        for message in self.last_body["messages"]:
            if message["role"] == "assistant":
                calls = [
                    (c["function"]["name"], json.loads(c["function"]["arguments"]))
                    for c in message.get("tool_calls") or ()
                ]
                text += f"<assistant>{self.render(message.get('reasoning_content'), message['content'], calls)}"
            else:
                text += f"<{message['role']}>{message['content']}</>"
        return list(f"{text}<assistant>".encode())

    def sampled_ids(self, output: ModelTurn) -> list[int]:
        return list(self.render(output.thought, output.text, output.calls).encode())

    def render(self, thought: str | None, text: str | None, calls: Sequence[tuple[str, Json]]) -> str:
        return json.dumps([thought or "", text or "", list(calls)]) + "</>"

    def error(self, refusal: Refusal) -> Json:
        return {"error": {"message": str(refusal), "type": "invalid_request_error", "param": None, "code": None}}


# ── Anthropic Messages ──────────────────────────────────────────────────────────────────────────────────────────────────


def named_event(value: Json) -> bytes:
    return b"event: " + value["type"].encode() + b"\n" + event(value)


class AnthropicProvider(Provider):
    """Behaves like Anthropic's API: thinking must come back as signed, and is required before a tool call."""

    name = "anthropic"

    def check_key(self, request: web.Request) -> None:
        if KEY not in (
            request.headers.get("x-api-key"),
            request.headers.get("Authorization", "").removeprefix("Bearer "),
        ):
            raise Refusal(401, "invalid x-api-key")
        if "anthropic-version" not in request.headers:
            raise Refusal(400, "anthropic-version: header is required")

    def count_response(self, request: web.Request) -> Json:
        return {"input_tokens": len(json.dumps(self.last_body))} if request.path.endswith("/count_tokens") else None

    def signature(self, thought: str) -> str:
        return base64.b64encode(f"signed {thought}".encode()).decode()

    def find_turn(self, body: Json) -> int:
        if "max_tokens" not in body:
            raise Refusal(400, "max_tokens: Field required")
        open_calls: list[str] = []
        turn = 0
        for n, message in enumerate(body["messages"]):
            blocks = message["content"]
            blocks = [{"type": "text", "text": blocks}] if isinstance(blocks, str) else blocks
            if not blocks or any(block["type"] == "text" and not block["text"].strip() for block in blocks):
                raise Refusal(400, f"messages.{n}: text content blocks must be non-empty")
            if message["role"] == "assistant":
                thoughts = [block for block in blocks if block["type"] == "thinking"]
                hidden = self.signature(self.turns[turn].thought) if self.hides_thinking() else None
                if any(block["signature"] not in (self.signature(block["thinking"]), hidden) for block in thoughts):
                    raise Refusal(400, f"messages.{n}.content.0: Invalid `signature` in `thinking` block")
                open_calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
                if open_calls and self.turns[turn].thought and not thoughts:
                    raise Refusal(
                        400, f"messages.{n}.content.0.type: Expected `thinking`, but found `{blocks[0]['type']}`"
                    )
                turn += 1
            elif message["role"] == "user":
                check_results(open_calls, [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"])
                open_calls = []
            elif message["role"] != "system":
                raise Refusal(400, f"messages.{n}.role: unexpected")
        check_results(open_calls, [])
        return turn

    def hides_thinking(self) -> bool:
        """Whether thinking is signed but omitted."""
        return bool(self.last_body.get("thinking", {}).get("display") == "omitted")

    def blocks(self, output: ModelTurn, turn: int) -> list[Json]:
        blocks: list[Json] = []
        if output.thought:
            shown = "" if self.hides_thinking() else output.thought
            blocks.append({"type": "thinking", "thinking": shown, "signature": self.signature(output.thought)})
        if output.text:
            blocks.append({"type": "text", "text": output.text, "citations": None})
        for n, (name, given) in enumerate(output.calls):
            blocks.append({"type": "tool_use", "id": f"toolu_{turn}_{n}", "name": name, "input": given})
        return blocks

    def head(self) -> Json:
        return {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": self.last_body["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def usage(self, output: ModelTurn) -> Json:
        cached = {"cache_creation_input_tokens": 3, "cache_read_input_tokens": 7}
        return {"input_tokens": output.prompt - 10, **cached, "output_tokens": output.sampled}

    def finish(self, output: ModelTurn) -> str:
        return "max_tokens" if output.cut else "tool_use" if output.calls else "end_turn"

    def stream(self, output: ModelTurn, turn: int) -> list[bytes]:
        parts = [
            {"type": "message_start", "message": {**self.head(), "usage": {**self.usage(output), "output_tokens": 1}}}
        ]
        for index, block in enumerate(self.blocks(output, turn)):
            empty, deltas = self.deltas(block)
            parts.append({"type": "content_block_start", "index": index, "content_block": empty})
            parts.append({"type": "ping"})
            parts += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
            parts.append({"type": "content_block_stop", "index": index})
        end = {"stop_reason": self.finish(output), "stop_sequence": None}
        parts.append({"type": "message_delta", "delta": end, "usage": {"output_tokens": output.sampled}})
        parts.append({"type": "message_stop"})
        return [named_event(part) for part in parts]

    def deltas(self, block: Json) -> tuple[Json, list[Json]]:
        match block["type"]:
            case "thinking":
                output = [{"type": "thinking_delta", "thinking": part} for part in split_text(block["thinking"])]
                signed = {"type": "signature_delta", "signature": block["signature"]}
                return {**block, "thinking": "", "signature": ""}, [*output, signed]
            case "text":
                return {**block, "text": ""}, [
                    {"type": "text_delta", "text": part} for part in split_text(block["text"])
                ]
            case "redacted_thinking":
                return block, []
            case _:
                given = ["", *split_text(json.dumps(block["input"]))]
                return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": part} for part in given]

    def error(self, refusal: Refusal) -> Json:
        kinds = {401: "authentication_error", 400: "invalid_request_error"}
        return {
            "type": "error",
            "error": {"type": kinds[refusal.status], "message": str(refusal)},
            "request_id": "req_1",
        }


# ── Gemini ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class GeminiProvider(Provider):
    """Behaves like Google's API: the first call of each turn is signed and must come back signed."""

    name = "gemini"

    def check_key(self, request: web.Request) -> None:
        if request.headers.get("x-goog-api-key") != KEY:
            raise Refusal(400, "API key not valid. Please pass a valid API key.")

    def count_response(self, request: web.Request) -> Json:
        if not request.path.endswith(":countTokens"):
            return None
        return {"totalTokens": len(json.dumps(self.last_body)), "promptTokensDetails": []}

    def is_streaming(self, request: web.Request) -> bool:
        return ":streamGenerateContent" in request.path

    def signature(self, turn: int) -> str:
        return base64.b64encode(f"thought {turn}".encode()).decode()

    def find_turn(self, body: Json) -> int:
        open_calls: list[str] = []
        turn = 0
        answered = True
        before = "user"
        for content in body["contents"]:
            parts = content["parts"]
            if content["role"] == "model":
                if before != "model":  # consecutive contents form one turn
                    open_calls, signed, answered = [], "", False
                calls = [part for part in parts if "functionCall" in part]
                open_calls += [part["functionCall"]["name"] for part in calls]
                signed = "".join(part.get("thoughtSignature", "") for part in calls) + signed
                if calls and self.turns[turn].thought and self.standard(signed) != self.signature(turn):
                    raise Refusal(400, "Function call is missing a thought_signature in functionCall parts")
                turn += before != "model"
            elif not answered:
                results = [part["functionResponse"] for part in parts if "functionResponse" in part]
                check_results(open_calls, [result["name"] for result in results])
                answered = True
            before = content["role"]
        return turn

    def standard(self, signature: str) -> str:
        """Normalize to the standard base64 alphabet; SDKs use either one."""
        return signature.replace("-", "+").replace("_", "/")

    def parts(self, output: ModelTurn, turn: int) -> list[Json]:
        parts: list[Json] = []
        thinking = self.last_body.get("generationConfig", {}).get("thinkingConfig", {})
        if output.thought and (thinking.get("includeThoughts") or thinking.get("include_thoughts")):
            parts += [{"text": part, "thought": True} for part in split_text(output.thought)]
        parts += [{"text": part} for part in split_text(output.text)]
        for n, (name, given) in enumerate(output.calls):
            signed = {"thoughtSignature": self.signature(turn)} if n == 0 and output.thought else {}
            parts.append({"functionCall": {"name": name, "args": given}, **signed})
        if output.thought and not output.calls:
            parts.append({"text": "", "thoughtSignature": self.signature(turn)})
        return parts

    def chunk(self, parts: list[Json], output: ModelTurn, finish: str = "") -> Json:
        candidate: Json = {"content": {"parts": parts, "role": "model"}, "index": 0}
        usage = {
            "promptTokenCount": output.prompt,
            "candidatesTokenCount": output.sampled - len(output.thought),
            "thoughtsTokenCount": len(output.thought),
            "cachedContentTokenCount": 7,
            "totalTokenCount": output.prompt + output.sampled,
        }
        if finish:
            candidate["finishReason"] = finish
        return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "gemini-3", "responseId": "r1"}

    def finish(self, output: ModelTurn) -> str:
        return "MAX_TOKENS" if output.cut else "STOP"

    def stream(self, output: ModelTurn, turn: int) -> list[bytes]:
        *parts, last = self.parts(output, turn)
        chunks = [self.chunk([part], output) for part in parts] + [self.chunk([last], output, self.finish(output))]
        return [event(chunk).replace(b"\n\n", b"\r\n\r\n") for chunk in chunks]

    def full_response(self, output: ModelTurn, turn: int) -> Json:
        return self.chunk(self.parts(output, turn), output, self.finish(output))

    def error(self, refusal: Refusal) -> Json:
        return {"error": {"code": refusal.status, "message": str(refusal), "status": "INVALID_ARGUMENT"}}


# ── OpenAI Responses ────────────────────────────────────────────────────────────────────────────────────────────────────


class ResponsesProvider(Provider):
    """Behaves like OpenAI's API with `store` off: encrypted reasoning must come back under its original id."""

    name = "responses"

    def check_key(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            raise Refusal(401, "Incorrect API key provided")

    def count_response(self, request: web.Request) -> Json:
        if not request.path.endswith("/input_tokens"):
            return None
        return {"object": "response.input_tokens", "input_tokens": len(json.dumps(self.last_body))}

    def sealed(self, turn: int) -> str:
        return f"gAAAA{turn}-sealed_"

    def find_turn(self, body: Json) -> int:
        open_calls: list[str] = []
        answered: list[str] = []
        turn, inside, reasoned = 0, False, False
        for item in body["input"]:
            kind = item.get("type", "message")
            if kind == "reasoning":
                if (item.get("id"), item.get("encrypted_content")) != (f"rs_{turn}", self.sealed(turn)):
                    raise Refusal(400, "Encrypted content item_id did not match the target item id.")
                inside = reasoned = True
            elif kind == "function_call" or (kind == "message" and item["role"] == "assistant"):
                if str(item.get("id", "")).startswith(("msg_tg", "fc_tg")):
                    raise Refusal(400, f"Item {item['id']!r} not found")
                open_calls += [item["call_id"]] if kind == "function_call" else []
                inside = True
            else:
                answered += [item["call_id"]] if kind == "function_call_output" else []
                if inside and open_calls and self.turns[turn].thought and not reasoned:
                    raise Refusal(
                        400, "Item of type 'function_call' was provided without its required 'reasoning' item"
                    )
                turn += inside
                inside = reasoned = False
        check_results(open_calls, answered)
        return turn

    def items(self, output: ModelTurn, turn: int) -> list[Json]:
        items: list[Json] = []
        if output.thought:
            summary = [{"type": "summary_text", "text": output.thought}]
            items.append(
                {"id": f"rs_{turn}", "type": "reasoning", "summary": summary, "encrypted_content": self.sealed(turn)}
            )
        if output.text:
            content = [{"type": "output_text", "text": output.text, "annotations": [], "logprobs": []}]
            message = {"id": f"msg_{turn}", "type": "message", "status": "completed", "role": "assistant"}
            items.append({**message, "content": content})
        for n, (name, given) in enumerate(output.calls):
            call = {
                "id": f"fc_{turn}_{n}",
                "type": "function_call",
                "status": "completed",
                "call_id": f"call_{turn}_{n}",
            }
            items.append({**call, "name": name, "arguments": json.dumps(given)})
        return items

    def response(self, output: ModelTurn, status: str, items: list[Json]) -> Json:
        usage = {
            "input_tokens": output.prompt,
            "input_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 0},
            "output_tokens": output.sampled,
            "output_tokens_details": {"reasoning_tokens": len(output.thought)},
            "total_tokens": output.prompt + output.sampled,
        }
        over = status in ("completed", "incomplete")
        return {
            "id": "resp_1",
            "object": "response",
            "created_at": 1,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "metadata": {},
            "model": self.last_body["model"],
            "output": items,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "usage": usage if over else None,
        }

    def status(self, output: ModelTurn) -> str:
        return "incomplete" if output.cut else "completed"

    def stream(self, output: ModelTurn, turn: int) -> list[bytes]:
        items = self.items(output, turn)
        in_progress = self.response(output, "in_progress", [])
        parts: list[Json] = [
            {"type": "response.created", "response": in_progress},
            {"type": "response.in_progress", "response": in_progress},
        ]
        for index, item in enumerate(items):
            empty = {**item, **{field: [] for field in ("summary", "content") if field in item}}
            parts.append({"type": "response.output_item.added", "output_index": index, "item": empty})
            parts += [{"item_id": item["id"], "output_index": index, **part} for part in self.within(item)]
            parts.append({"type": "response.output_item.done", "output_index": index, "item": item})
        status = self.status(output)
        parts.append({"type": f"response.{status}", "response": self.response(output, status, items)})
        return [named_event({**part, "sequence_number": n}) for n, part in enumerate(parts)]

    def within(self, item: Json) -> list[Json]:
        match item["type"]:
            case "reasoning":
                at = {"summary_index": 0}
                [part] = item["summary"]
                deltas = [
                    {"type": "response.reasoning_summary_text.delta", **at, "delta": d}
                    for d in split_text(part["text"])
                ]
                return [
                    {"type": "response.reasoning_summary_part.added", **at, "part": {**part, "text": ""}},
                    *deltas,
                    {"type": "response.reasoning_summary_text.done", **at, "text": part["text"]},
                    {"type": "response.reasoning_summary_part.done", **at, "part": part},
                ]
            case "message":
                at = {"content_index": 0}
                [part] = item["content"]
                deltas = [
                    {"type": "response.output_text.delta", **at, "delta": d, "logprobs": []}
                    for d in split_text(part["text"])
                ]
                return [
                    {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
                    *deltas,
                    {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []},
                    {"type": "response.content_part.done", **at, "part": part},
                ]
            case _:
                given = item["arguments"]
                deltas = [{"type": "response.function_call_arguments.delta", "delta": d} for d in split_text(given)]
                return [
                    *deltas,
                    {"type": "response.function_call_arguments.done", "arguments": given, "name": item["name"]},
                ]

    def full_response(self, output: ModelTurn, turn: int) -> Json:
        return self.response(output, self.status(output), self.items(output, turn))

    def error(self, refusal: Refusal) -> Json:
        return {"error": {"message": str(refusal), "type": "invalid_request_error", "param": None, "code": None}}


PROVIDERS: tuple[type[Provider], ...] = (ChatProvider, AnthropicProvider, GeminiProvider, ResponsesProvider)
