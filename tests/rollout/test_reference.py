"""The scripted engine in a model's place: it replays a task's reference solution with the agent's own shell tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.kit import tokenizer
from turngate.agents.spec import find_agent, load_catalog
from turngate.config import ServeConfig
from turngate.engines.base import Generate
from turngate.engines.scripted import SYNTHETIC_NOTE, Scripted
from turngate.errors import ConfigError
from turngate.render import BUILTIN_TOKENIZER, load_renderer
from turngate.rollout.reference import REPLAY_NOTE, ReferenceReplay, play_reference
from turngate.sandboxes import get_backend
from turngate.tasks import BUNDLED_TASK, Task, load_task
from turngate.tasks.task import Solution
from turngate.types import Sampling

TASK = load_task(BUNDLED_TASK)
MINI = find_agent("mini-swe-agent").spec


def replies(replay: ReferenceReplay, *prompts: str) -> list[str]:
    """What the replay's engine answers to prompts."""
    renderer, _ = load_renderer(BUILTIN_TOKENIZER, model="", family="auto")
    engine = replay.build_engine(ServeConfig(), renderer)
    assert isinstance(engine, Scripted)
    replay.set_workdir("/w")
    said = []
    for prompt in prompts:
        request = Generate(
            prompt=np.array(tokenizer().encode(prompt), np.int32), session="s", max_tokens=1000, sampling=Sampling()
        )
        said.append(tokenizer().decode(list(engine._begin(request).ids)))
    return said


def prompt(text: str, turns: int, *, tools: str = "<tools>") -> str:
    return f"{tools}{text}" + "<|im_start|>assistant\nx<|im_end|>\n" * turns + "<|im_start|>assistant\n"


def test_catalog_declares_shell_calls() -> None:
    agents = {name: entry.spec for name, entry in load_catalog().items()}
    assert [name for name, agent in agents.items() if agent.shell_call is None] == ["aider", "cline", "shell"]


def test_replay_calls_the_shell_and_ends() -> None:
    first, last = replies(
        play_reference(TASK, MINI, get_backend("local"), ServeConfig()),
        prompt(TASK.instruction, 0),
        prompt(TASK.instruction, 1),
    )
    assert first.startswith('Applying the reference solution.\n<tool_call>\n{"name": "bash", "arguments": {"command": ')
    assert "s/return a - b/return a + b/" in first
    assert "Done." in last and "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in last and "colour" not in last


def test_title_request_gets_no_tool_call() -> None:
    [title] = replies(
        play_reference(TASK, MINI, get_backend("local"), ServeConfig()), prompt(TASK.instruction, 0, tools="")
    )
    assert "tool_call" not in title


def test_workdir_is_filled_in() -> None:
    call = msgspec.structs.replace(MINI.shell_call, arguments={"line": ["{command}"], "cwd": "{workdir}"})
    agent = msgspec.structs.replace(MINI, shell_call=call)
    [first] = replies(play_reference(TASK, agent, get_backend("local"), ServeConfig()), prompt(TASK.instruction, 0))
    assert '"cwd": "/w"' in first and '"line": ["mkdir' in first


@pytest.mark.parametrize(
    ("task", "agent", "config", "reason"),
    [
        ({"solution": None}, {}, {}, "the task has no solution/solve.sh"),
        (
            {},
            {"shell_call": None},
            {},
            "the description of the agent mini-swe-agent has no [shell_call]; to replay one, add [shell_call] to the agent's file",
        ),
        ({"source": "mine"}, {}, {}, "--script reference was not passed, and this is not the bundled task"),
        (
            {},
            {},
            {"tokenizer": "x"},
            "the replies are written for the built-in tokenizer; to replay one, remove --tokenizer",
        ),
    ],
)
def test_note_explains_missing_replay(
    task: dict[str, Any], agent: dict[str, Any], config: dict[str, Any], reason: str
) -> None:
    replay = play_reference(_replace(TASK, task), _replace(MINI, agent), get_backend("local"), ServeConfig(**config))
    assert not replay.commands
    assert f"because {reason}" in replay.note and "--engine" in replay.note and "--script" in replay.note


def test_requested_replay_works_for_any_task() -> None:
    config = ServeConfig(script="reference")
    assert play_reference(_replace(TASK, {"source": "mine"}), MINI, get_backend("local"), config).commands


OR_FILE = ", or pass --script FILE with the replies"


@pytest.mark.parametrize(
    ("task", "agent", "config", "error"),
    [
        ({"solution": None}, {}, {}, f"the task has no solution/solve.sh; add this file{OR_FILE}"),
        (
            {"grader": None},
            {},
            {},
            f"the task has no grader; choose a task with tests/test.sh and solution/solve.sh{OR_FILE}",
        ),
        (
            {"solution": Solution(patch="x", env={"KEY": "x"})},
            {},
            {},
            "the task's solution cannot be replayed: it needs environment variables, and the trace would contain their values; "
            f"choose another task{OR_FILE}",
        ),
        (
            {},
            {"shell_call": None},
            {},
            "the description of the agent mini-swe-agent has no [shell_call]; add [shell_call] to the agent's file "
            f"(docs/agents.md){OR_FILE}",
        ),
        (
            {},
            {},
            {"tokenizer": "x"},
            f"the replies are written for the built-in tokenizer; remove --tokenizer{OR_FILE}",
        ),
        (
            {},
            {},
            {"engine": "vllm"},
            "the engine is vllm; remove --script, or remove --engine and --engine-url to use the scripted engine",
        ),
    ],
)
def test_impossible_replay_is_explained(
    task: dict[str, Any], agent: dict[str, Any], config: dict[str, Any], error: str
) -> None:
    settings = ServeConfig(script="reference", **config)
    with pytest.raises(ConfigError) as failed:
        play_reference(_replace(TASK, task), _replace(MINI, agent), get_backend("local"), settings)
    assert failed.value.message == f"script 'reference' cannot be used: {error}"


def test_note_without_expected_replay(tmp_path: Path) -> None:
    for task, config in [
        (TASK, ServeConfig(script=str(tmp_path / "x.json"))),
        (Task(id="x", instruction="Do it."), ServeConfig()),
    ]:
        assert play_reference(task, MINI, get_backend("local"), config).note == SYNTHETIC_NOTE
    assert play_reference(TASK, MINI, get_backend("local"), ServeConfig()).note == REPLAY_NOTE


def test_note_for_a_gateway_that_was_already_running() -> None:
    replay = play_reference(TASK, MINI, get_backend("local"), ServeConfig())
    note = replay.note_for_running("http://127.0.0.1:8700")
    assert note.startswith(
        f"{SYNTHETIC_NOTE}; the gateway at http://127.0.0.1:8700 chose the replies; to replay the task's"
    )
    assert note.endswith("stop this gateway, or choose a different --data folder")
    other = play_reference(Task(id="x", instruction="Do it."), MINI, get_backend("local"), ServeConfig())
    assert other.note_for_running("URL") == f"{SYNTHETIC_NOTE}; the gateway at URL chose the replies"


def _replace(struct: Any, fields: dict[str, Any]) -> Any:
    return msgspec.structs.replace(struct, **fields)
