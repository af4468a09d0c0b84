"""Check the tokenizer and its chat template: whether the template is certified, and whether both match the engine's.

A different vocabulary is a failure: the gateway sends ids, and the engine would read them as different text. A different chat template is
only a warning: the engine still receives the gateway's ids, but the model may have been trained with the engine's template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from turngate.config import OBSERVED_ENGINES
from turngate.doctor.context import DoctorContext
from turngate.doctor.finding import CheckOutcome, failure, not_checked, ok, warning
from turngate.engines.http import EngineClient
from turngate.errors import BadRequest, TurngateError
from turngate.render import Certificate, Renderer, TemplateRenderer
from turngate.render.certify import CASES, ProbeCase
from turngate.render.renderer import TEMPLATE_RENDERER
from turngate.server.engine_factory import read_engine_key
from turngate.types import Message

_TIMEOUT_S = 10.0
_TEXT = "def größe(x):\n    return {'汉字': x ** 2}  # 👩‍👩‍👧 <tool_call> 12345\n\n\t\"end\""
_COMPARED_CASES = ("system prompt", "unicode", "white space", "one call", "parallel calls")


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str | None = None  # vLLM
    text: str | None = None  # SGLang


async def check_template(context: DoctorContext) -> list[CheckOutcome]:
    """Check that the chat template is certified."""
    if context.config.engine in OBSERVED_ENGINES:
        return [not_checked("the endpoint renders prompts itself, so the gateway does not use a tokenizer")]
    renderer, certificate = await context.renderer()
    encoder = "fast encoder" if renderer.tokenizer.fast else "plain encoder"
    outcomes = [_check_certificate(renderer, certificate, encoder)]
    if certificate.unread:
        what, _, fix = certificate.explain_unread().partition("; ")
        outcomes.append(warning(f"{renderer.tokenizer.folder}: {what}", fix))
    return outcomes


def _check_certificate(renderer: Renderer, certificate: Certificate, encoder: str) -> CheckOutcome:
    if certificate.passed:
        return ok(f"{renderer.tokenizer.folder}: renderer {renderer.name}, certified, {encoder}")
    other = (
        "to support more templates, run: pip install 'turngate[families]'"
        if certificate.renderer == TEMPLATE_RENDERER
        else "to derive the bridge from the chat template, set --family template"
    )
    family = certificate.renderer.removeprefix("family:")
    extent = "certified only in part" if certificate.certified else "not certified"
    return warning(
        f"{renderer.tokenizer.folder}: {extent}; {certificate.explain_uncertified()}",
        f"to see the differences token by token, run: turngate certify FOLDER --family {family}; {other}",
    )


async def check_agreement(context: DoctorContext) -> list[CheckOutcome]:
    """Check that the engine encodes text, decodes ids and (vLLM only) renders conversations in the same way as the gateway."""
    config = context.config
    if config.engine not in ("vllm", "sglang"):
        return [not_checked(f"engine {config.engine}: only vLLM and SGLang have a tokenizer to compare")]
    renderer = await context.require_renderer()
    results = []
    for url, health in await context.health():
        if not health.ok:
            results.append(not_checked(f"{config.engine} at {url} is not available"))
            continue
        root = url.rstrip("/").removesuffix("/v1")
        client = EngineClient(config.engine, root, key=read_engine_key(config), direct=False)
        await client.start()
        try:
            results += await _compare_tokens(
                _EngineTokenizer(client, health.model, config.engine), f"{config.engine} at {url}", renderer
            )
        except TurngateError as error:
            results.append(
                not_checked(f"{config.engine} at {url}: the tokenizers could not be compared: {error.message}")
            )
        finally:
            await client.close()
    return results


class _EngineTokenizer:
    """The tokenizer of an engine, used over HTTP."""

    def __init__(self, client: EngineClient, model: str, kind: str) -> None:
        self._client = client
        self._model = model
        self.kind = kind

    async def encode(self, text: str) -> list[int]:
        return await self._tokens({"prompt": text, "add_special_tokens": False})

    async def render(self, case: ProbeCase) -> list[int]:
        tools = {"tools": [tool.wire for tool in case.tools]} if case.tools else {}
        return await self._tokens(
            {"messages": list(map(_to_openai, case.messages)), "add_generation_prompt": True, **tools}
        )

    async def decode(self, ids: Sequence[int]) -> str:
        body: dict[str, Any] = {"model": self._model, "tokens": list(ids)}
        if self.kind == "sglang":
            body["skip_special_tokens"] = False
        answer = await self._client.command("/detokenize", body, _TIMEOUT_S)
        reply = self._client.decode(msgspec.json.Decoder(_Text).decode, answer)
        return reply.prompt if reply.prompt is not None else reply.text or ""

    async def _tokens(self, body: dict[str, Any]) -> list[int]:
        answer = await self._client.command("/tokenize", {"model": self._model, **body}, _TIMEOUT_S)
        return self._client.decode(msgspec.json.Decoder(_Tokens).decode, answer).tokens


async def _compare_tokens(engine: _EngineTokenizer, name: str, renderer: Renderer) -> list[CheckOutcome]:
    tokenizer = renderer.tokenizer
    fix = "set --tokenizer to the folder of the model that the engine serves"
    ours, theirs = tokenizer.encode(_TEXT), await engine.encode(_TEXT)
    if ours != theirs:
        return [failure(f"{name}: the engine tokenizes a text differently: {_describe_difference(ours, theirs)}", fix)]
    size = tokenizer.vocab_size
    ids = sorted({*renderer.stop_ids, *ours[:4], size // 3, size // 2, size - 1})
    for token in ids:
        if (there := await engine.decode([token])) != (here := tokenizer.decode(token)):
            return [failure(f"{name}: id {token} is {here!r} in the gateway, but {there!r} in the engine", fix)]
    results = [
        ok(f"{name}: same ids for a test text, and same text for the {len(ids)} ids that were compared (of {size:,})")
    ]
    if engine.kind == "sglang":
        return [*results, not_checked(f"{name} cannot render conversations, so only the vocabulary was compared")]
    return [*results, await _compare_renderings(engine, name, renderer)]


async def _compare_renderings(engine: _EngineTokenizer, name: str, renderer: Renderer) -> CheckOutcome:
    compared, skipped = 0, []
    for case in (case for case in CASES if case.name in _COMPARED_CASES):
        if case.tools and not _supports_tools(renderer):
            skipped.append(case.name)
            continue
        try:
            ours = renderer.render(case.messages, case.tools, case.kwargs)
            theirs = await engine.render(case)
        except (BadRequest, TurngateError):  # one of the templates rejects the conversation
            skipped.append(case.name)
            continue
        if ours != theirs:
            decode = renderer.tokenizer.decode
            return warning(
                f"{name}: the engine renders the test conversation {case.name!r} differently: "
                f"{_describe_difference(ours, theirs, decode(ours), decode(theirs))}",
                "use the same chat template for both (vLLM: --chat-template; gateway: chat_template.jinja in --tokenizer)",
            )
        compared += 1
    if not compared:
        return not_checked(f"{name}: no test conversation could be rendered by both templates")
    unsupported = (
        f"; not compared, because they could not be rendered by both templates: {', '.join(skipped)}" if skipped else ""
    )
    return ok(f"{name}: same ids for {compared} test conversation{'s' if compared > 1 else ''}{unsupported}")


def _supports_tools(renderer: Renderer) -> bool:
    """Return whether the template itself renders tools. If not, the gateway renders them in its own format, which cannot be compared."""
    return not isinstance(renderer, TemplateRenderer) or renderer.template.traits.native_tools


def _describe_difference(ours: Sequence[int], theirs: Sequence[int], here: str = "", there: str = "") -> str:
    at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if not here:
        return f"{len(ours)} tokens in the gateway, {len(theirs)} in the engine; they first differ at token {at + 1}"
    at = next((n for n, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(len(here), len(there)))
    return f"in the gateway …{here[max(0, at - 15) : at + 25]!r}, in the engine …{there[max(0, at - 15) : at + 25]!r}"


def _to_openai(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        wire |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return wire
