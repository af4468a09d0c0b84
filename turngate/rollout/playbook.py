"""Choose each reply of the scripted engine by the content of the agent's prompt.

A fixed list of replies is not enough, because an agent controls its own loop: it also makes calls for titles, sub-agents and retries. A
script consists of scenes. A scene is recognized by words in the prompt, and the number of turns in the prompt determines which step of the
scene comes next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

import msgspec

from turngate.agents import placeholders
from turngate.agents.spec import CheckStep
from turngate.engines.base import Generate
from turngate.engines.scripted import ScriptedTurn
from turngate.render import Renderer

_TURN = "<|im_start|>assistant"  # marks a turn in the built-in chat template, for which the replies are written
_TOOLS = "<tools>"


class Scene(msgspec.Struct, frozen=True):
    """A scripted conversation: how to recognize its prompts, and the reply in each turn. The last reply is repeated."""

    words: str  # text that occurs in all prompts of the scene
    steps: tuple[CheckStep, ...]
    tools: bool = True  # match only prompts that offer tools
    begins: int = 0  # number of turns in the prompt before the scene, such as those of a parent agent or a summary
    pace_s: float = 0.0  # delay before each sampled chunk
    # Placeholder → pattern. The placeholder is replaced by the pattern's last match in the prompt.
    finds: Mapping[str, str] = {}


class Playbook:
    """A script for the scripted engine. It replies with the next step of the first scene that matches, or with `otherwise`."""

    def __init__(self, renderer: Renderer, scenes: Sequence[Scene], otherwise: str = "All right.") -> None:
        self._renderer = renderer
        self._scenes = scenes
        self._otherwise = otherwise
        self.matches = 0  # number of calls that a scene has answered

    def __call__(self, request: Generate, index: int) -> ScriptedTurn:
        text = self._renderer.tokenizer.decode(request.prompt.tolist())
        turns = text.count(_TURN) - 1  # the prompt ends with the start of this turn
        for scene in self._scenes:
            if scene.words in text and (_TOOLS in text or not scene.tools):
                self.matches += 1
                step = scene.steps[max(0, min(turns - scene.begins, len(scene.steps) - 1))]
                return self._turn(format_step(_fill_from_prompt(step, scene.finds, text)), scene.pace_s)
        return self._turn(self._otherwise)

    def _turn(self, text: str, pace_s: float = 0.0) -> ScriptedTurn:
        ids = self._renderer.tokenizer.encode(text)
        return ScriptedTurn([*ids, self._renderer.stop_ids[0]], chunk=8, pace_s=pace_s)


def _fill_from_prompt(step: CheckStep, patterns: Mapping[str, str], text: str) -> CheckStep:
    values = {name: matches[-1] for name, pattern in patterns.items() if (matches := re.findall(pattern, text))}
    return fill_steps([step], values)[0] if values else step


def fill_steps(steps: Sequence[CheckStep], values: Mapping[str, placeholders.Value]) -> tuple[CheckStep, ...]:
    """Return the steps with all placeholders replaced by their values."""
    return tuple(msgspec.convert(_fill_value(msgspec.to_builtins(step), values), CheckStep) for step in steps)


def format_step(step: CheckStep) -> str:
    """Format a step as the text that a model would sample."""
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
