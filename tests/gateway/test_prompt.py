"""Test the preamble cache of the prompt builder: its key covers everything the preamble depends on."""

from __future__ import annotations

import json
from typing import Any, cast

import msgspec

from turngate.dialects.base import WireRequest
from turngate.dialects.messages import Messages
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
