"""Let the scripted engine solve a task: it replays the reference solution through the agent's own shell tool.

The agent runs as it would with a real model, but the model's replies are known in advance. A new user's first rollout can therefore
earn a reward without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from turngate.agents.spec import AgentSpec, CheckCall, CheckStep
from turngate.config import REFERENCE_SCRIPT, ServeConfig
from turngate.engines.base import Engine
from turngate.engines.scripted import DEFAULT_CONTEXT, SYNTHETIC_NOTE, Script, Scripted
from turngate.errors import ConfigError, TaskError
from turngate.render import Renderer
from turngate.rollout.playbook import Playbook, Scene, fill_steps
from turngate.sandboxes.base import Backend
from turngate.tasks import BUNDLED_TASK
from turngate.tasks.reference import reference_commands
from turngate.tasks.task import Task

REPLAY_NOTE = (
    "a scripted model replayed the task's reference solution, so the reward says nothing about a model, and the log-probabilities are "
    "synthetic; for a real model, pass --engine, --engine-url, --model and --tokenizer"
)
REPLAYED = "replayed"  # metadata key that marks a session as a replay; exports leave such sessions out
_WORDS = 60  # how many characters of the instruction identify its prompts


class ReferenceReplay:
    """The scripted replies that replay one task's solution. If there are no commands to replay, the gateway's own engine is used."""

    def __init__(self, instruction: str, agent: AgentSpec, commands: Sequence[str] = (), *, reason: str = "") -> None:
        """Prepare a replay. If there are no commands, `reason` says why, or is empty if the user did not expect a replay."""
        self._instruction = instruction
        self._agent = agent
        self.commands = commands
        self._reason = reason
        self._scenes: list[Scene] = []
        self._playbook: Playbook | None = None

    @property
    def note(self) -> str:
        """A note for the user about the source of the scripted replies. If no solution was replayed, it says why, if that is known."""
        if self.commands and self._playbook is not None and not self._playbook.matches:
            return f"{SYNTHETIC_NOTE}; the reference solution was not replayed, because no prompt with tools contained the instruction"
        if self.commands:
            return REPLAY_NOTE
        if not self._reason:
            return SYNTHETIC_NOTE
        return (
            f"{SYNTHETIC_NOTE}; no reference solution was replayed, because {self._reason}; to use a real model, pass "
            "--engine and --engine-url; to choose the replies yourself, pass --script FILE"
        )

    def note_for_running(self, gateway: str) -> str:
        """Return the note for a rollout whose replies came from the scripted engine of a gateway that was already running at this URL."""
        note = f"{SYNTHETIC_NOTE}; the gateway at {gateway} chose the replies"
        if not self.commands:
            return note
        return f"{note}; to replay the task's reference solution instead, stop this gateway, or choose a different --data folder"

    def build_engine(self, config: ServeConfig, renderer: Renderer) -> Engine | None:
        """Return an engine that replays the solution, or None if there is nothing to replay."""
        if not self.commands:
            return None
        self._playbook = Playbook(renderer, self._scenes)
        return build_scripted(config, self._playbook)

    def set_workdir(self, workdir: str) -> None:
        """Prepare the replies, which depend on the working folder in the sandbox."""
        if self.commands:
            self._scenes[:] = [self.write_scene(workdir)]

    def write_scene(self, workdir: str, *, solves: bool = True) -> Scene:
        """Return the replies for a sandbox with this working folder. If `solves` is false, they run `ls` instead of the solution."""
        shell = self._agent.shell_call
        assert shell is not None, "an agent without [shell_call] has no replay"
        call = CheckCall(tool=shell.tool, arguments=shell.arguments)
        first, commands = ("Applying the reference solution.", self.commands) if solves else ("Listing files.", ("ls",))
        steps = [
            fill_steps([CheckStep(say=say, calls=(call,))], {"command": command, "workdir": workdir})[0]
            for say, command in zip_longest([first], commands, fillvalue="")
        ]
        end = self._agent.check[-1].calls if self._agent.check else ()
        steps += fill_steps([CheckStep(say="Done.", calls=end)], {"workdir": workdir})
        longest = max(self._instruction.strip().splitlines(), key=len).strip()
        return Scene(longest[:_WORDS], tuple(steps))


def build_scripted(config: ServeConfig, script: Script) -> Scripted:
    """Build a scripted engine with the model name and context length of this configuration."""
    return Scripted(
        script,
        model=config.model or "scripted",
        max_context=config.max_context or DEFAULT_CONTEXT,
    )


def play_reference(task: Task, agent: AgentSpec, backend: Backend, config: ServeConfig) -> ReferenceReplay:
    """Plan the replay of a task's reference solution on a gateway with this configuration.

    If no replay is wanted, or the solution cannot be replayed, return a replay without commands. Raise `ConfigError` if the configuration
    requires a replay but the solution cannot be replayed.
    """
    is_required = config.script == REFERENCE_SCRIPT
    if is_required and config.engine != "scripted":
        raise _script_error(
            f"the engine is {config.engine}; remove --script, or remove --engine and --engine-url to use the scripted engine"
        )
    may_replay = is_required or (not config.script and task.grader is not None)
    if config.engine != "scripted" or not may_replay:
        return ReferenceReplay(task.instruction, agent)
    if not is_required and task.source != str(BUNDLED_TASK):
        reason = f"--script {REFERENCE_SCRIPT} was not passed, and this is not the bundled task"
        return ReferenceReplay(task.instruction, agent, reason=reason)
    commands = _plan_commands(task, agent, backend, config)
    if not isinstance(commands, _Obstacle):
        return ReferenceReplay(task.instruction, agent, commands)
    if is_required:
        raise _script_error(f"{commands.reason}; {commands.fix}, or pass --script FILE with the replies")
    return ReferenceReplay(task.instruction, agent, reason=f"{commands.reason}; to replay one, {commands.fix}")


class _Obstacle(msgspec.Struct, frozen=True):
    """Why a solution cannot be replayed, and what the user can do about it."""

    reason: str
    fix: str


def _plan_commands(task: Task, agent: AgentSpec, backend: Backend, config: ServeConfig) -> tuple[str, ...] | _Obstacle:
    if task.grader is None:
        return _Obstacle("the task has no grader", "choose a task with tests/test.sh and solution/solve.sh")
    if config.tokenizer:
        return _Obstacle("the replies are written for the built-in tokenizer", "remove --tokenizer")
    if agent.shell_call is None:
        return _Obstacle(
            f"the description of the agent {agent.name} has no [shell_call]",
            "add [shell_call] to the agent's file (docs/agents.md)",
        )
    if task.solution is None:
        return _Obstacle("the task has no solution/solve.sh", "add this file")
    try:
        return reference_commands(task.solution, backend)
    except TaskError as error:
        return _Obstacle(error.message, "choose another task")


def _script_error(reason: str) -> ConfigError:
    return ConfigError(f"script {REFERENCE_SCRIPT!r} cannot be used: {reason}", param="script")
