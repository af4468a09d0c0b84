"""What callers get: how far a rollout is, what happened, what was said, and how it ended. All of it is JSON.

Large fields are clamped (`[clamp]` of the settings), and `clamped` names each field that was, with how much of it is left out. A reward
or a log-probability that is not known is null, never 0.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from turngate.errors import Boundary
from turngate.rollout.outcome import Status
from turngate.store.outcomes import OutcomeClass
from turngate.types import Json

State = Status | Literal["queued", "running"]
# What of a turn is known: ids and log-probabilities, log-probabilities alone, words alone, or (direct mode) nothing.
Captured = Literal["tokens", "logprobs", "text", "none"]


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, and on whose side. Never a secret in it."""

    boundary: Boundary
    stage: str
    message: str


class SaidCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call by the model. `arguments` is the JSON text as it wrote it."""

    id: str = ""
    name: str
    arguments: str = ""


class RolloutTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call."""

    node: int  # its number in the trace
    role: str  # main, subagent, side, superseded, aborted
    finish_reason: str
    prompt_tokens: int | None  # None: not known (observe mode, where the endpoint does not tell)
    sampled_tokens: int | None
    logprobs: list[float] | None = None  # one per sampled token; None: not known for each of them. Never filled
    capture: Captured
    reasoning: str = ""
    text: str = ""
    tool_calls: list[SaidCall] = []
    version_start: int = 0  # policy versions at its first and last token
    version_end: int = 0


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a rollout ended; or, with `done` false, how far it is."""

    rollout_id: str
    task_id: str
    agent: str
    model_key: str
    model: str
    mode: str
    done: bool
    status: State
    kind: OutcomeClass | None = (
        None  # graded, agent failed, invalid task, infrastructure fault; None: cancelled, or nobody was asked
    )
    reward: float | None = None  # None: not known, which is not 0
    resolved: bool | None = None
    exit_code: int | None = None  # of the agent; None: it did not end by itself
    wall_s: float  # from start() to the end, waiting included; always set
    seconds: dict[str, float] = {}  # per stage; `queued` is the first
    capture: Captured = "none"  # the least that is known of any of its turns
    turns: list[RolloutTurn] = []
    turn_count: int = 0
    sampled_tokens: int = 0
    workdir_files: dict[str, str] = {}  # what the agent left in its working folder, as text
    log_tails: dict[str, str] = {}  # the ends of what it printed and of its own logs
    verifier_output: str = ""
    error: Trouble | None = None
    session: str = ""  # at the gateway; empty: there is none (direct mode, or it never came so far)
    stop: str = ""  # the session's limit that was met, or who ended it
    notes: list[str] = []  # what else there is to know
    clamped: list[str] = []


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rollout is."""

    rollout_id: str
    task_id: str
    agent: str
    model_key: str
    model: str
    mode: str
    status: State
    stage: str  # queued, gateway, install, then those of a rollout (docs/events.md), result, done
    turns: int = 0
    sampled_tokens: int = 0
    wall_s: float = 0.0
    reward: float | None = None
    kind: OutcomeClass | None = None
    session: str = ""
    error: Trouble | None = None
    done: bool = False
    cursor: int = 0  # of its newest event
    started: float = 0.0  # the time of day, in seconds since 1970
    gateway: str = ""  # gate mode: where a trainer takes its calls


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened: `queued`, `started`, `abort`, `ended` of the service; all others are the gateway's (docs/events.md)."""

    cursor: int  # 1, 2, 3 … in this rollout
    time: float
    kind: str
    data: dict[str, Json] = {}
    seq: int | None = None  # its number at the gateway; None: it is not the gateway's


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """Events past a cursor. Ask again with `after=cursor`. `over`: no more will come, and this page has the last of them."""

    rollout_id: str
    events: list[Event]
    cursor: int
    over: bool


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the conversation."""

    cursor: int  # 1, 2, 3 …
    node: int  # of the trace
    branch: int  # 0 is the first; each fork begins another
    turn_role: str  # of the turn that it belongs to, or that answers it: main, subagent, side, superseded, aborted
    role: str  # system, user, assistant, tool
    text: str = ""
    reasoning: str = ""
    tool_calls: list[SaidCall] = []
    tool_call_id: str = ""
    finish_reason: str = ""  # of a turn
    sampled: bool = False  # the model said it in this rollout


class Messages(msgspec.Struct, frozen=True, kw_only=True):
    """Messages past a cursor. Ask again with `after=cursor`. `over`: the rollout has ended, and this page has the last of them."""

    rollout_id: str
    messages: list[Said]
    cursor: int
    over: bool
    clamped: list[str] = []


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts, newest first. `more`: ask again with `before` = the last one's id."""

    rollouts: list[RolloutState]
    more: bool
    running: int
    queued: int
