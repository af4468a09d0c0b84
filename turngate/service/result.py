"""The JSON that callers receive: states, events, messages and results of rollouts.

Large fields are truncated according to the `[clamp]` settings, and `clamped` lists each of them and how much is missing. An unknown reward
or log-probability is null, never 0.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from turngate.errors import Boundary
from turngate.rollout.outcome import Status
from turngate.store.outcomes import OutcomeClass
from turngate.trace.training_report import TrainingReport
from turngate.trace.tree import RefusedCalls
from turngate.types import Json

RolloutStatus = Status | Literal["queued", "running"]
# How much of a turn is recorded: ids and log-probabilities, only log-probabilities, only text, or nothing (direct mode).
CaptureLevel = Literal["tokens", "logprobs", "text", "none"]


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error, and the boundary and stage at which it occurred. Never contains a secret."""

    boundary: Boundary
    stage: str
    message: str


class ConversationToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call by the model. `arguments` is the JSON text as sampled."""

    id: str = ""
    name: str
    arguments: str = ""


class RolloutTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call."""

    node: int  # its number in the trace
    role: str  # main, subagent, side, summary, unknown, superseded, aborted
    finish_reason: str
    prompt_tokens: int | None  # None if unknown (observe mode, if the endpoint does not report it)
    sampled_tokens: int | None
    logprobs: list[float] | None = None  # one per sampled token, never padded; None if unknown
    capture: CaptureLevel
    reasoning: str = ""
    text: str = ""
    tool_calls: list[ConversationToolCall] = []
    version_start: int = 0  # policy versions at its first and last token
    version_end: int = 0


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a rollout that has ended or, if `done` is false, its progress."""

    rollout_id: str
    task_id: str
    agent: str
    model_key: str
    model: str
    mode: str
    done: bool
    status: RolloutStatus
    # graded, agent failed, invalid task, infrastructure fault; None if it was cancelled or the task has no grader
    kind: OutcomeClass | None = None
    reward: float | None = None  # None if unknown, which is not the same as 0
    excluded: str = ""  # why the outcome does not count, such as `superseded by attempt 2`; empty if it does
    resolved: bool | None = None
    exit_code: int | None = None  # of the agent; None if it did not exit on its own
    wall_s: float  # from start() to the end, including the wait in the queue; always set
    seconds: dict[str, float] = {}  # per stage; `queued` is the first
    capture: CaptureLevel = "none"  # the lowest level of all turns
    turns: list[RolloutTurn] = []
    turn_count: int = 0
    sampled_tokens: int = 0
    training: TrainingReport | None = None  # how much of it is trained, and why not more; None if nothing was recorded
    refused: RefusedCalls | None = None  # model calls that the gateway refused because of what was asked
    workdir_files: dict[str, str] = {}  # the agent's working folder, as text
    log_tails: dict[str, str] = {}  # the ends of its output and of its own logs
    verifier_output: str = ""
    error: ErrorInfo | None = None
    session: str = (
        ""  # id at the gateway; empty if there is none (direct mode, or it ended before a session was opened)
    )
    stop: str = ""  # the session limit that was reached, or why the session was ended
    notes: list[str] = []
    clamped: list[str] = []


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a rollout."""

    rollout_id: str
    task_id: str
    agent: str
    model_key: str
    model: str
    mode: str
    status: RolloutStatus
    stage: str  # queued, gateway, install, the stages of a rollout (docs/events.md), result, done
    turns: int = 0
    sampled_tokens: int = 0
    wall_s: float = 0.0
    reward: float | None = None
    kind: OutcomeClass | None = None
    session: str = ""
    error: ErrorInfo | None = None
    done: bool = False
    cursor: int = 0  # of its newest event
    started: float = 0.0  # Unix time
    gateway: str = ""  # gate mode: the URL from which a trainer takes calls


class RolloutEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a rollout. `queued`, `started`, `abort` and `ended` come from the service, all others from the gateway."""

    cursor: int  # 1, 2, 3 … within the rollout
    time: float
    kind: str
    data: dict[str, Json] = {}
    seq: int | None = None  # its number at the gateway; None if it comes from the service


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """Events after a cursor. Continue with `after=cursor`. `over` means that the rollout has ended and these are its last events."""

    rollout_id: str
    events: list[RolloutEvent]
    cursor: int
    over: bool


class ConversationMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the conversation."""

    cursor: int  # 1, 2, 3 …
    node: int  # its node in the trace
    branch: int  # 0 is the first; each fork starts a new one
    turn_role: str  # role of the turn that it belongs to, or whose prompt contains it, as in `RolloutTurn.role`
    role: str  # system, user, assistant, tool
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ConversationToolCall] = []
    tool_call_id: str = ""
    finish_reason: str = ""  # only for sampled messages
    sampled: bool = False  # whether the model sampled it in this rollout


class MessagePage(msgspec.Struct, frozen=True, kw_only=True):
    """Messages after a cursor. Continue with `after=cursor`. `over` means that the rollout has ended and these are its last messages."""

    rollout_id: str
    messages: list[ConversationMessage]
    cursor: int
    over: bool
    clamped: list[str] = []


class RolloutList(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts, newest first. If `more` is true, continue with `before` set to the id of the last one."""

    rollouts: list[RolloutState]
    more: bool
    running: int
    queued: int
