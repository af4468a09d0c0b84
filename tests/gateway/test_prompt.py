"""Test the prompt builder: its preamble cache, and that other calls run while it compares a long request with the trace."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import msgspec

from tests.kit import renderer
from turngate.dialects.base import WireRequest
from turngate.dialects.messages import Messages
from turngate.gateway.loading import TimeSlicer
from turngate.gateway.prompt import PromptBuilder
from turngate.render import Renderer
from turngate.trace.session import Session, SessionConfig
from turngate.types import Call


class FakeRenderer:
    """A renderer that only reports which template arguments it knows."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def knows(self, name: str) -> bool:
        return name in self._names


THINKING_RENDERER = cast(Renderer, FakeRenderer("enable_thinking"))


def call(**body: Any) -> Call:
    request = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **body}
    return Messages().decode(WireRequest(json.dumps(request).encode(), {}))


def kwargs(prompts: PromptBuilder, call_: Call, renderer: Renderer | None, **config: Any) -> dict[str, object]:
    session = Session("s", 1, SessionConfig(**config), 0.0)
    _, preamble = prompts.locate(session, call_, renderer)
    assert json.loads(preamble.raw_kwargs) == preamble.kwargs
    return preamble.kwargs


def test_thinking_hint_follows_what_renderer_supports() -> None:
    prompts, disabled = PromptBuilder(), call(thinking={"type": "disabled"})
    for _ in range(2):
        assert kwargs(prompts, disabled, THINKING_RENDERER) == {"enable_thinking": False}
        assert kwargs(prompts, disabled, None) == {}
        assert kwargs(prompts, disabled, cast(Renderer, FakeRenderer("thinking"))) == {"thinking": False}


def test_session_and_call_arguments_do_not_leak_into_others() -> None:
    prompts, disabled = PromptBuilder(), call(thinking={"type": "disabled"})
    for _ in range(2):
        assert kwargs(prompts, disabled, THINKING_RENDERER) == {"enable_thinking": False}
        assert kwargs(prompts, disabled, THINKING_RENDERER, template_kwargs={"mood": "calm"}) == {
            "enable_thinking": False,
            "mood": "calm",
        }
        explicit = msgspec.structs.replace(disabled, template_kwargs={"enable_thinking": True})
        assert kwargs(prompts, explicit, THINKING_RENDERER) == {"enable_thinking": True}
        assert kwargs(prompts, call(thinking={"type": "enabled"}), THINKING_RENDERER) == {"enable_thinking": True}


async def test_long_request_is_compared_in_slices() -> None:
    messages = [{"role": role, "content": f"{n}"} for n in range(200) for role in ("user", "assistant")]
    long, short = call(messages=[*messages, *messages[:1]]), call(messages=messages[:41])
    prompts, session = PromptBuilder(TimeSlicer(slice_s=0.0)), Session("s", 1, SessionConfig(), 0.0)
    turns: list[int] = []

    async def count_iterations() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    other = asyncio.create_task(count_iterations())
    for request, least, most in ((short, 0, 5), (long, len(messages), 100_000)):
        turns.clear()
        prompt = await prompts.build(session, request, renderer())
        assert least <= len(turns) <= most
        assert prompt.ids.tolist() == renderer().render_ids(prompt.location.request.messages_from(), (), {}).tolist()
    other.cancel()
