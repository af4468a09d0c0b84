"""What prompts begin with is kept from call to call; whatever it follows from has to tell it apart."""

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


class Knowing:
    """A renderer, as far as a preamble asks it."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def knows(self, name: str) -> bool:
        return name in self._names


THINKS = cast(Renderer, Knowing("enable_thinking"))


def call(**body: Any) -> Call:
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **body}
    return Messages().decode(WireRequest(json.dumps(asked).encode(), {}))


def kwargs(prompts: PromptBuilder, made: Call, renderer: Renderer | None, **config: Any) -> dict[str, object]:
    session = Session("s", 1, SessionConfig(**config), 0.0)
    _, preamble = prompts.locate(session, made, renderer)
    assert json.loads(preamble.raw_kwargs) == preamble.kwargs
    return preamble.kwargs


def test_the_same_hints_say_what_the_renderer_understands_of_them() -> None:
    prompts, asked = PromptBuilder(), call(thinking={"type": "disabled"})
    for _ in range(2):
        assert kwargs(prompts, asked, THINKS) == {"enable_thinking": False}
        assert kwargs(prompts, asked, None) == {}
        assert kwargs(prompts, asked, cast(Renderer, Knowing("thinking"))) == {"thinking": False}


def test_sessions_and_calls_with_their_own_arguments_leave_others_alone() -> None:
    prompts, asked = PromptBuilder(), call(thinking={"type": "disabled"})
    for _ in range(2):
        assert kwargs(prompts, asked, THINKS) == {"enable_thinking": False}
        assert kwargs(prompts, asked, THINKS, template_kwargs={"mood": "calm"}) == {
            "enable_thinking": False,
            "mood": "calm",
        }
        outright = msgspec.structs.replace(asked, template_kwargs={"enable_thinking": True})
        assert kwargs(prompts, outright, THINKS) == {"enable_thinking": True}
        assert kwargs(prompts, call(thinking={"type": "enabled"}), THINKS) == {"enable_thinking": True}
