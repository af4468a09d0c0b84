"""The data of a scenario: an agent's steps, the model's answer at each, and what a perfect gateway would record.

`agent.py` plays a scenario in a dialect, `engine.py` samples its answers, and `score.py` compares the record with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gauntlet.reply_format import ToolCall, format_reply

# Changes that an agent makes to its history when it sends it back. None of them changes the meaning.
Habit = Literal["drop_thinking", "respell", "rename_ids", "trim"]
Role = Literal["main", "subagent", "side"]
# Reasons why a call does not continue the previous one. A gateway's adapter translates its own terms into these.
Cause = Literal[
    "compaction",  # the history was replaced by a summary
    "sub-agent",  # a helper with its own conversation
    "hand-off",  # another agent takes over
    "new conversation",  # one that continues no other
    "side call",  # a title, a summary, a probe
    "retry",  # a call is repeated because its answer was lost
    "branch",  # an answer was discarded, and the conversation continued from before it
    "edited",  # an earlier message was rewritten
    "system prompt changed",
    "tools changed",
    "thinking dropped",  # by the agent, or by the template
    "json spelling",  # the same arguments, encoded differently
    "whitespace",
    "ids renamed",
    "template",  # the template renders earlier messages differently, or the tokenizer encodes them to other ids
]


@dataclass(frozen=True)
class Answer:
    """An answer that the model samples."""

    text: str = ""
    think: str = ""
    calls: tuple[ToolCall, ...] = ()
    raw: str = ""  # the literal text, instead of the fields above
    odd: bool = False  # encoded to tokens that a tokenizer would not choose
    finish: Literal["stop", "length"] = "stop"
    delay_s: float = 0.0
    pace_s: float = 0.0
    sees: tuple[str, ...] = ()  # text that the prompt must contain

    def to_text(self) -> str:
        return self.raw or format_reply(self.think, self.text, self.calls)


@dataclass(frozen=True)
class Fault:
    """A failure of the engine."""

    status: int = 0
    drop: bool = False  # the connection ends before the first token
    cut_after: int = 0  # the connection ends after this many tokens of the answer
    answer: Answer = Answer()

    @property
    def expected_statuses(self) -> range:
        """The statuses that tell an agent what to do: wait, retry, or shorten the conversation."""
        return range(400, 414) if self.status == 400 else range(429, 430) if self.status == 429 else range(429, 600)


@dataclass(frozen=True)
class Start:
    """A conversation starts, and replaces the previous one on the same line."""

    task: str
    line: str = "main"
    system: str = ""
    tools: bool = True
    more_tools: int = 0  # additional tools that are offered but never called


@dataclass(frozen=True)
class Say:
    text: str
    line: str = "main"


@dataclass(frozen=True)
class Results:
    """Tool results for the calls of the last reply."""

    texts: tuple[str, ...]
    line: str = "main"


@dataclass(frozen=True)
class System:
    """The system prompt changes during a conversation."""

    text: str
    line: str = "main"


@dataclass(frozen=True)
class Tools:
    """The offered tools change during a conversation."""

    names: tuple[str, ...]
    line: str = "main"


@dataclass(frozen=True)
class Edit:
    """The agent rewrites an earlier answer of the model in the history."""

    turn: int
    text: str
    line: str = "main"


@dataclass(frozen=True)
class Rewind:
    """The agent discards the last answer, and what came after it."""

    line: str = "main"


@dataclass(frozen=True)
class Call:
    """A model call, with one entry per attempt. The agent retries after a fault unless it gives up."""

    attempts: tuple[Answer | Fault, ...]
    line: str = "main"
    role: Role = "main"
    hang_up_s: float = 0.0  # the agent closes the connection of the first attempt after this time
    gives_up: bool = False  # the agent does not retry
    unserved: bool = (
        False  # asks for a model that is not served; a gateway may refuse it, or answer with the model it has
    )
    causes: tuple[Cause, ...] = ()  # acceptable causes of the fork; several if the wire format cannot distinguish them
    forks: bool = True  # whether the call must fork; if not, it forks only if the gateway kept the lost answer

    @property
    def delivered(self) -> bool:
        """Whether the agent must receive an answer."""
        return not self.gives_up and not self.unserved


@dataclass(frozen=True)
class Together:
    """Lists of steps that run concurrently."""

    lists: tuple[tuple[Step, ...], ...]


Step = Start | Say | Results | System | Tools | Edit | Rewind | Call | Together


@dataclass(frozen=True)
class Scenario:
    name: str
    about: str
    steps: tuple[Step, ...]
    rows: int = 1  # the smallest number of rows that can train everything
    habits: tuple[Habit, ...] = ()
    drift: tuple[Cause, ...] = ()  # acceptable causes of forks that a better gateway would avoid
    streamed: bool | None = None  # None: both streamed and not streamed
    temperature: float = 1.0  # that the agent asks for
    dialects: tuple[str, ...] = ()  # empty: all

    def calls(self) -> list[Call]:
        return list(_calls(self.steps))

    @property
    def turns(self) -> int:
        """The number of answers that the agent must receive."""
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
