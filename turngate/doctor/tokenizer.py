"""The tokenizer and its template: do they hold what exactness needs, and do they agree with the engine's own?

The gateway sends ids, so an engine with another vocabulary reads something else than was written: that is a failure. An engine whose chat
template differs only renders differently for those who send it messages, which nobody does here: that is a warning, since the model was
perhaps trained with the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from turngate.config import OBSERVED_ENGINES
from turngate.doctor.context import Subject
from turngate.doctor.finding import Seen, failure, ok, unchecked, warning
from turngate.engines.http import EngineClient
from turngate.errors import BadRequest, TurngateError
from turngate.render import Renderer, TemplateRenderer
from turngate.render.certify import CASES, ProbeCase
from turngate.server.engine_factory import read_engine_key
from turngate.types import Message

_WITHIN_S = 10.0
_TEXT = "def größe(x):\n    return {'汉字': x ** 2}  # 👩‍👩‍👧 <tool_call> 12345\n\n\t\"end\""
_RENDERED = ("system prompt", "unicode", "white space", "one call", "parallel calls")


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str | None = None  # vLLM
    text: str | None = None  # SGLang


async def template(subject: Subject) -> list[Seen]:
    """Whether extending the sampled ids says what the template would say."""
    if subject.config.engine in OBSERVED_ENGINES:
        return [unchecked("the endpoint renders by itself; nothing is tokenised here")]
    renderer, certificate = await subject.renderer()
    how = "fast encoder" if renderer.tokenizer.fast else "plain encoder"
    if certificate.passed:
        return [ok(f"{renderer.tokenizer.folder}: renderer {renderer.name}, certified, {how}")]
    wrong = next(finding for finding in certificate.findings if finding.verdict == "differs")
    return [
        warning(
            f"{renderer.tokenizer.folder}: not certified ({wrong.case}: {wrong.detail[:120]}): every turn is rendered whole and may fork",
            "turngate certify FOLDER has all cases; pip install 'turngate[families]' knows more templates",
        )
    ]


async def agreement(subject: Subject) -> list[Seen]:
    """The same text, ids and conversations, asked of the engine."""
    config = subject.config
    if config.engine not in ("vllm", "sglang"):
        return [unchecked(f"the engine {config.engine} has no tokenizer of its own")]
    renderer, _ = await subject.renderer()
    found = []
    for url, health in await subject.health():
        if not health.ok:
            found.append(unchecked(f"{config.engine} at {url} is not usable"))
            continue
        root = url.rstrip("/").removesuffix("/v1")
        client = EngineClient(config.engine, root, key=read_engine_key(config), direct=False)
        await client.start()
        try:
            found += await _compared(
                _Engine(client, health.model, config.engine), f"{config.engine} at {url}", renderer
            )
        except TurngateError as error:
            found.append(unchecked(f"{config.engine} at {url} does not tokenise: {error.message}"))
        finally:
            await client.close()
    return found


class _Engine:
    """What an engine answers to questions about its tokenizer."""

    def __init__(self, client: EngineClient, model: str, kind: str) -> None:
        self._client = client
        self._model = model
        self.kind = kind

    async def encoded(self, text: str) -> list[int]:
        return await self._tokens({"prompt": text, "add_special_tokens": False})

    async def rendered(self, case: ProbeCase) -> list[int]:
        tools = {"tools": [tool.wire for tool in case.tools]} if case.tools else {}
        return await self._tokens({"messages": list(map(_wire, case.messages)), "add_generation_prompt": True, **tools})

    async def decoded(self, ids: Sequence[int]) -> str:
        asked: dict[str, Any] = {"model": self._model, "tokens": list(ids)}
        if self.kind == "sglang":
            asked["skip_special_tokens"] = False
        answer = await self._client.command("/detokenize", asked, _WITHIN_S)
        told = self._client.decode(msgspec.json.Decoder(_Text).decode, answer)
        return told.prompt if told.prompt is not None else told.text or ""

    async def _tokens(self, asked: dict[str, Any]) -> list[int]:
        answer = await self._client.command("/tokenize", {"model": self._model, **asked}, _WITHIN_S)
        return self._client.decode(msgspec.json.Decoder(_Tokens).decode, answer).tokens


async def _compared(engine: _Engine, name: str, renderer: Renderer) -> list[Seen]:
    tokenizer = renderer.tokenizer
    mend = "give --tokenizer the folder of the very model that the engine serves"
    ours, theirs = tokenizer.encode(_TEXT), await engine.encoded(_TEXT)
    if ours != theirs:
        return [failure(f"{name}: it tokenises otherwise: {_first(ours, theirs)}", mend)]
    size = tokenizer.vocab_size
    ids = sorted({*renderer.stop_ids, *ours[:4], size // 3, size // 2, size - 1})
    for one in ids:
        if (there := await engine.decoded([one])) != (here := tokenizer.decode(one)):
            return [failure(f"{name}: id {one} is {here!r} here and {there!r} there", mend)]
    found = [ok(f"{name}: the same tokens for a text, and the same words for {len(ids)} ids of {size:,}")]
    if engine.kind == "sglang":
        return [*found, unchecked(f"{name} renders no conversation for us to compare; its vocabulary was compared")]
    return [*found, await _rendered(engine, name, renderer)]


async def _rendered(engine: _Engine, name: str, renderer: Renderer) -> Seen:
    compared, skipped = 0, []
    for case in (case for case in CASES if case.name in _RENDERED):
        if case.tools and not _knows_tools(renderer):
            skipped.append(case.name)
            continue
        try:
            ours = renderer.render(case.messages, case.tools, case.kwargs)
            theirs = await engine.rendered(case)
        except (BadRequest, TurngateError):  # the template refuses it, here or there
            skipped.append(case.name)
            continue
        if ours != theirs:
            decode = renderer.tokenizer.decode
            return warning(
                f"{name}: it renders {case.name!r} otherwise: {_first(ours, theirs, decode(ours), decode(theirs))}",
                "start both with one chat template (--chat-template of vLLM, chat_template.jinja in --tokenizer); what is sent is ours",
            )
        compared += 1
    if not compared:
        return unchecked(f"{name} renders none of our conversations")
    but = f"; not compared, since the template has no place for them: {', '.join(skipped)}" if skipped else ""
    return ok(f"{name}: the same ids for {compared} conversations{but}")


def _knows_tools(renderer: Renderer) -> bool:
    """Into a template that knows no tools the gateway writes them itself, and no engine does it the same way."""
    return not isinstance(renderer, TemplateRenderer) or renderer.template.traits.native_tools


def _first(ours: Sequence[int], theirs: Sequence[int], here: str = "", there: str = "") -> str:
    at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if not here:
        return f"{len(ours)} tokens here, {len(theirs)} there, the first that differs is the {at + 1}."
    at = next((n for n, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
    return f"here …{here[max(0, at - 15) : at + 25]!r}, there …{there[max(0, at - 15) : at + 25]!r}"


def _wire(message: Message) -> dict[str, Any]:
    """As OpenAI's format has it."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        wire |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return wire
