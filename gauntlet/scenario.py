"""What a scenario is made of: steps of an agent's life, what the model says at each, and what a perfect gateway would record.

Pure data. `agent.py` plays it in the voice of a dialect, `engine.py` samples what it says, `score.py` holds the record against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gauntlet.speech import ToolCall, spell

# What an agent does to its history when it sends it back. All of them leave the meaning alone.
Habit = Literal["drop_thinking", "respell", "rename_ids", "trim"]
Role = Literal["main", "subagent", "side"]
# Why a call does not go on where the last one ended. A gateway's adapter translates its own words into these.
Cause = Literal[
    "compaction",  # the history was replaced by a summary
    "sub-agent",  # a helper with a conversation of its own
    "side call",  # a title, a summary, a probe
    "retry",  # a call whose answer was lost is made again
    "branch",  # an answer was given up, and the talk went on from before it
    "edited",  # something that was said was rewritten
    "system prompt changed",
    "tools changed",
    "thinking dropped",  # by the agent, or by the template
    "json spelling",  # the same arguments as other bytes
    "whitespace",
    "ids renamed",
    "template",  # the template writes the past in another way, or the tokenizer with other ids
]


@dataclass(frozen=True)
class Answer:
    """What the model samples."""

    text: str = ""
    think: str = ""
    calls: tuple[ToolCall, ...] = ()
    raw: str = ""  # spelled out, instead of all that
    odd: bool = False  # in tokens that no tokenizer would choose
    finish: Literal["stop", "length"] = "stop"
    delay_s: float = 0.0
    pace_s: float = 0.0
    sees: tuple[str, ...] = ()  # what must stand in its prompt

    def spelled(self) -> str:
        return self.raw or spell(self.think, self.text, self.calls)


@dataclass(frozen=True)
class Fault:
    """What goes wrong at the engine."""

    status: int = 0
    drop: bool = False  # the connection ends before the first token
    cut_after: int = 0  # the connection ends after so many tokens of the answer
    answer: Answer = Answer()

    @property
    def told(self) -> range:
        """The statuses by which an agent knows what to do: wait, try again, or make the conversation shorter."""
        return range(400, 414) if self.status == 400 else range(429, 430) if self.status == 429 else range(429, 600)


@dataclass(frozen=True)
class Start:
    """A conversation begins, in place of whatever the line held before."""

    task: str
    line: str = "main"
    system: str = ""
    tools: bool = True
    more_tools: int = 0  # that are offered besides, and never called


@dataclass(frozen=True)
class Say:
    text: str
    line: str = "main"


@dataclass(frozen=True)
class Results:
    """What the tools gave, for each call of the last reply."""

    texts: tuple[str, ...]
    line: str = "main"


@dataclass(frozen=True)
class System:
    """The system prompt changes under a running conversation."""

    text: str
    line: str = "main"


@dataclass(frozen=True)
class Tools:
    """The tools that are offered change under a running conversation."""

    names: tuple[str, ...]
    line: str = "main"


@dataclass(frozen=True)
class Edit:
    """An earlier answer of the model is rewritten in the history."""

    turn: int
    text: str
    line: str = "main"


@dataclass(frozen=True)
class Call:
    """A model call. One entry for each attempt; an agent tries again after a fault unless it gives up."""

    attempts: tuple[Answer | Fault, ...]
    line: str = "main"
    role: Role = "main"
    hang_up_s: float = 0.0  # the agent hangs up on the first attempt after so long
    gives_up: bool = False  # and does not ask again
    causes: tuple[Cause, ...] = ()  # why it forks; more than one where the wire does not tell them apart
    forks: bool = True  # with causes: whether it must; else only where the gateway kept the answer that was lost

    @property
    def delivered(self) -> bool:
        return not self.gives_up


@dataclass(frozen=True)
class Together:
    """Lists of steps that run at the same time."""

    lists: tuple[tuple[Step, ...], ...]


Step = Start | Say | Results | System | Tools | Edit | Call | Together


@dataclass(frozen=True)
class Scenario:
    name: str
    about: str
    steps: tuple[Step, ...]
    rows: int = 1  # the fewest in which all of it can be trained
    habits: tuple[Habit, ...] = ()
    drift: tuple[Cause, ...] = ()  # right names for forks that a better gateway would not have
    streamed: bool | None = None  # None: both ways
    dialects: tuple[str, ...] = ()  # none: all

    def calls(self) -> list[Call]:
        return list(_calls(self.steps))

    @property
    def turns(self) -> int:
        """Answers that the agent took."""
        return sum(call.delivered for call in self.calls())

    @property
    def faults(self) -> int:
        return sum(isinstance(attempt, Fault) for call in self.calls() for attempt in call.attempts)


def _calls(steps: tuple[Step, ...]) -> Iterator[Call]:
    for step in steps:
        if isinstance(step, Call):
            yield step
        elif isinstance(step, Together):
            for each in step.lists:
                yield from _calls(each)


def bash(command: str, **more: object) -> ToolCall:
    return ToolCall("bash", {"command": command, **more})


def ask(
    answer: Answer | Fault,
    *more: Answer | Fault,
    line: str = "main",
    role: Role = "main",
    causes: tuple[Cause, ...] = (),
    forks: bool = True,
) -> Call:
    return Call((answer, *more), line, role, causes=causes, forks=forks)
