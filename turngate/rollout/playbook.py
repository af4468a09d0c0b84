"""What the scripted engine says to an agent: scene by scene, by what the prompt is about and how far the conversation has come.

An agent owns its loop, so a fixed list of replies will not do: titles, sub-agents and retries come in between. A scene is known by
words in the prompt; its reply is the one after the turns that the prompt shows already.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import msgspec

from turngate.agents import placeholders
from turngate.agents.spec import CheckStep
from turngate.engines.base import Generate
from turngate.engines.scripted import Turn
from turngate.render import Renderer

_TURN = "<|im_start|>assistant"  # of the built-in template, for which these replies are written
_TOOLS = "<tools>"


class Scene(msgspec.Struct, frozen=True):
    """A conversation, and what is said in it, turn by turn; then the last again."""

    words: str  # in the prompt
    steps: tuple[CheckStep, ...]
    tools: bool = True  # only where tools are offered
    begins: int = 0  # turns that the prompt shows before this scene's first: of a parent, or of a summary
    pace_s: float = 0.0  # before every chunk that is sampled
    finds: Mapping[str, str] = {}  # patterns; what each finds last in the prompt is a placeholder of the steps


class Playbook:
    """A script for the scripted engine. The first scene that fits is played; where none does, `otherwise` is said."""

    def __init__(self, renderer: Renderer, scenes: Sequence[Scene], otherwise: str = "All right.") -> None:
        self._renderer = renderer
        self._scenes = scenes
        self._otherwise = otherwise

    def __call__(self, request: Generate, index: int) -> Turn:
        text = self._renderer.tokenizer.decode(request.prompt.tolist())
        said = text.count(_TURN) - 1  # the prompt ends with the beginning of this one
        for scene in self._scenes:
            if scene.words in text and (_TOOLS in text or not scene.tools):
                step = scene.steps[max(0, min(said - scene.begins, len(scene.steps) - 1))]
                return self._turn(format_step(_fill_from_prompt(step, scene.finds, text)), scene.pace_s)
        return self._turn(self._otherwise)

    def _turn(self, text: str, pace_s: float = 0.0) -> Turn:
        ids = self._renderer.tokenizer.encode(text)
        return Turn([*ids, self._renderer.stop_ids[0]], chunk=8, pace_s=pace_s)


def _fill_from_prompt(step: CheckStep, patterns: Mapping[str, str], text: str) -> CheckStep:
    values = {name: found[-1] for name, pattern in patterns.items() if (found := re.findall(pattern, text))}
    return fill_steps([step], values)[0] if values else step


def fill_steps(steps: Sequence[CheckStep], values: Mapping[str, placeholders.Value]) -> tuple[CheckStep, ...]:
    """The steps with placeholders replaced in all their texts."""
    return tuple(msgspec.convert(_fill_value(msgspec.to_builtins(step), values), CheckStep) for step in steps)


def format_step(step: CheckStep) -> str:
    """A step as the model writes it."""
    thought = f"<think>\n{step.think}\n</think>\n\n" if step.think else ""
    calls = "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(call.tool)}, "arguments": {json.dumps(call.arguments)}}}\n</tool_call>'
        for call in step.calls
    )
    return thought + step.say + ("\n" if step.say and calls else "") + calls


def _fill_value(value: object, values: Mapping[str, placeholders.Value]) -> object:
    match value:
        case str():
            return placeholders.fill(value, values)
        case list() | tuple():
            return [_fill_value(item, values) for item in value]
        case dict():
            return {name: _fill_value(item, values) for name, item in value.items()}
        case _:
            return value
