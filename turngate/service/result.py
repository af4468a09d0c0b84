"""The JSON that callers receive: states, events, messages and results of rollouts.

Large fields are truncated according to the `[clamp]` settings. `clamped` describes everything that is left out. An unknown reward
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
    """An error, the boundary at fault, and the stage in which it occurred. The message never contains a secret."""

    boundary: Boundary
    stage: str
    message: str


class ConversationToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call by the model. `arguments` is text, usually JSON."""

    id: str = ""
    name: str
    arguments: str = ""


class RolloutTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call: the model's reply, its log-probabilities, and how much of the call was recorded."""

    node: int  # number of the turn's node in the trace
    role: str  # main, subagent, side, summary, unknown, superseded, aborted
    finish_reason: str
    prompt_tokens: int | None  # None if unknown (in observe mode, if the endpoint does not return token ids)
    sampled_tokens: int | None
    logprobs: list[float] | None = None  # one per sampled token, never padded; None if unknown
    capture: CaptureLevel
    reasoning: str = ""
    text: str = ""
    tool_calls: list[ConversationToolCall] = []
    version_start: int = 0  # policy versions at the first and the last token
    version_end: int = 0


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a rollout or, if `done` is false, its progress so far."""

    rollout_id: str
    task_id: str
    agent: str
    model_key: str
    model: str
    mode: str
    done: bool
    status: RolloutStatus
    # graded, agent failed, invalid task, infrastructure fault; None if the rollout was cancelled or the task has no grader
    kind: OutcomeClass | None = None
    reward: float | None = None  # None if unknown, which is not the same as 0
    excluded: str = ""  # why the outcome does not count, such as `superseded by attempt 2`; empty if it does
    resolved: bool | None = None
    exit_code: int | None = None  # the agent's exit code; None if the agent did not exit on its own
    wall_s: float  # from start() to the end, including the wait in the queue; always set
    seconds: dict[str, float] = {}  # duration of each stage; the first is `queued`
    capture: CaptureLevel = "none"  # the lowest level of all turns
    turns: list[RolloutTurn] = []
    turn_count: int = 0
    sampled_tokens: int = 0
    training: TrainingReport | None = None  # how much is trained, and why not more; None if nothing was recorded
    refused: RefusedCalls | None = None  # model calls that the gateway refused because of their content
    workdir_files: dict[str, str] = {}  # the agent's working folder, as text
    log_tails: dict[str, str] = {}  # the ends of the agent's output and logs
    verifier_output: str = ""
    error: ErrorInfo | None = None
    # Id at the gateway; empty if there is no session (direct mode, or the rollout ended before one was opened).
    session: str = ""
    stop: str = ""  # the limit that was reached, or why the session was ended
    notes: list[str] = []
    clamped: list[str] = []


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """The current or final state of a rollout."""

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
    cursor: int = 0  # cursor of the newest event
    started: float = 0.0  # Unix time
    gateway: str = ""  # in gate mode, the URL at which a trainer takes calls


class RolloutEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a rollout.

    The service emits `queued`, `started`, `abort` and `ended`. The gateway emits all other events. In direct mode, which has no
    gateway, the service also emits `stage` events, and there are no others.
    """

    cursor: int  # 1, 2, 3 … within the rollout
    time: float
    kind: str
    data: dict[str, Json] = {}
    seq: int | None = None  # number of the event at the gateway; None if it comes from the service


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """Events after a cursor. For the next page, pass `after=cursor`. `over` means that the rollout has ended and no events follow."""

    rollout_id: str
    events: list[RolloutEvent]
    cursor: int
    over: bool


class ConversationMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the conversation between agent and model."""

    cursor: int  # 1, 2, 3 …
    node: int  # number of the message's node in the trace
    branch: int  # number of the branch; the first is 0, and each fork starts a new one
    turn_role: str  # role of the turn that sampled the message or whose prompt contains it, as in `RolloutTurn.role`
    role: str  # system, user, assistant, tool
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ConversationToolCall] = []
    tool_call_id: str = ""
    finish_reason: str = ""  # only for sampled messages
    sampled: bool = False  # whether the model sampled the message in this rollout


class MessagePage(msgspec.Struct, frozen=True, kw_only=True):
    """Messages after a cursor. For the next page, pass `after=cursor`. `over` means that the rollout has ended and no messages follow."""

    rollout_id: str
    messages: list[ConversationMessage]
    cursor: int
    over: bool
    clamped: list[str] = []


class RolloutList(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts, newest first. If `more` is true, there is a next page: set `before` to the id of the last rollout on this page."""

    rollouts: list[RolloutState]
    more: bool
    running: int
    queued: int
