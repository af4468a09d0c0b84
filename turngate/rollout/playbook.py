"""What the scripted engine says to an agent: scene by scene, by what the prompt is about and how far the conversation has come.

An agent owns its loop, so a fixed list of replies will not do: titles, sub-agents and retries come in between. A scene is known by
words in the prompt; its reply is the one after the turns that the prompt shows already.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec

from turngate.agents import template
from turngate.agents.spec import Step
from turngate.engines.base import Generate
from turngate.engines.scripted import Turn
from turngate.render import Renderer

_TURN = "<|im_start|>assistant"  # of the built-in template, for which these replies are written
_TOOLS = "<tools>"


class Scene(msgspec.Struct, frozen=True):
    """A conversation, and what is said in it, turn by turn; then the last again."""

    words: str  # in the prompt
    steps: tuple[Step, ...]
    tools: bool = True  # only where tools are offered


class Playbook:
    """A script for the scripted engine. The first scene that fits is played; where none does, `otherwise` is said."""

    def __init__(
        self, renderer: Renderer, scenes: Sequence[Scene], otherwise: str = "All right.", **how: float
    ) -> None:
        self._renderer = renderer
        self._scenes = scenes
        self._otherwise = otherwise
        self._how = how  # further fields of every `Turn`: how fast it comes

    def __call__(self, request: Generate, index: int) -> Turn:
        text = self._renderer.tokenizer.decode(request.prompt.tolist())
        said = text.count(_TURN) - 1  # the prompt ends with the beginning of this one
        for scene in self._scenes:
            if scene.words in text and (_TOOLS in text or not scene.tools):
                return self._turn(spoken(scene.steps[min(said, len(scene.steps) - 1)]))
        return self._turn(self._otherwise)

    def _turn(self, text: str) -> Turn:
        ids = self._renderer.tokenizer.encode(text)
        return Turn([*ids, self._renderer.stop_ids[0]], chunk=8, **self._how)  # type: ignore[arg-type]


def filled(steps: Sequence[Step], values: Mapping[str, template.Value]) -> tuple[Step, ...]:
    """The steps with placeholders replaced in all their texts."""
    return tuple(msgspec.convert(_filled(msgspec.to_builtins(step), values), Step) for step in steps)


def spoken(step: Step) -> str:
    """A step as the model writes it."""
    thought = f"<think>\n{step.think}\n</think>\n\n" if step.think else ""
    calls = "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(call.tool)}, "arguments": {json.dumps(call.arguments)}}}\n</tool_call>'
        for call in step.calls
    )
    return thought + step.say + ("\n" if step.say and calls else "") + calls


def _filled(value: object, values: Mapping[str, template.Value]) -> object:
    match value:
        case str():
            return template.fill(value, values)
        case list() | tuple():
            return [_filled(item, values) for item in value]
        case dict():
            return {name: _filled(item, values) for name, item in value.items()}
        case _:
            return value
