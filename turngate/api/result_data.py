"""The data of a result: the rollout's outcome, and its turns token by token. The data can be pickled, and used without the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from turngate.common.safe_text import sanitize_line
from turngate.service.result import ErrorInfo
from turngate.trace.roles import TurnRole
from turngate.trace.sample import Sample
from turngate.trace.training_report import TrainingReport
from turngate.trace.tree import RefusedCalls
from turngate.types import Ids, Json, Logprobs, ToolCall


class Turn(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One model call: the new messages in its prompt, and the model's reply token by token."""

    number: int  # starts at 1, in the order of recording
    node: int  # node id in the trace
    after: int | None  # number of the turn that this turn continues; None if it starts a conversation
    role: TurnRole
    heard: tuple[Json, ...]  # the new messages, in OpenAI's format
    heard_ids: Ids  # the token ids of the new messages
    ids: Ids  # the sampled ids; empty if the endpoint does not return ids
    logprobs: Logprobs | None  # one per sampled id, never padded; None if unknown
    pieces: tuple[str, ...]  # the text that each sampled id adds; empty if the tokenizer is not available
    message: Json  # the model's message, in OpenAI's format; the next three fields are its parts
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish: str
    untrained: str  # why the turn must not be trained; empty if it may be trained
    version_start: int  # policy version at the first token
    version_end: int  # policy version at the last token
    capture: str
    cause: str | None  # why the turn does not continue the previous one
    seconds: float

    @property
    def mean_logprob(self) -> float | None:
        """The mean log-probability of the sampled tokens. None if no token was sampled, or if any log-probability is unknown."""
        if self.logprobs is None or not len(self.logprobs) or bool(np.isnan(self.logprobs).any()):
            return None
        return float(self.logprobs.mean())

    def __repr__(self) -> str:
        count = "1 token" if len(self.ids) == 1 else f"{len(self.ids)} tokens"
        return sanitize_line(f"Turn({self.number}, {self.role}, {count}, {self.finish})")


class ResultData(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The fields of a `Result`: identity, outcome, turns, training rows, files and logs."""

    rollout_id: str
    session: str  # id of the gateway session; empty if there was none
    task_id: str
    group: str
    agent: str
    model: str
    mode: str
    status: str  # finished, failed, timed out, limit, cancelled, error
    # graded, agent failed, invalid task, infrastructure fault; None if cancelled, or if the task has no grader
    kind: str | None
    reward: float | None  # None means unknown, which is not 0
    resolved: bool | None
    exit_code: int | None  # None if the agent did not exit on its own
    stop: str  # the limit that was reached, or why the rollout was stopped
    wall_s: float
    seconds: Mapping[str, float]  # duration of each stage
    turns: tuple[Turn, ...]  # oldest first
    rows: tuple[Sample, ...]  # training rows: ids, mask and log-probabilities as numpy arrays
    training: TrainingReport | None = None  # how much is trained, and why not more; None if nothing was recorded
    refused: RefusedCalls | None = None  # model calls that the gateway refused because of their content
    files: Mapping[str, str]  # the agent's working folder, path → text; long files are truncated
    work: Path | None  # the folder with all of the agent's work; None if it was not kept
    logs: Mapping[str, str]  # the ends of the agent's output and log files
    verifier: str  # the grader's output
    error: ErrorInfo | None
    notes: tuple[str, ...]
    clamped: tuple[str, ...]  # the truncated fields, and how much of each is missing

    @property
    def passed(self) -> bool | None:
        """Whether the rollout passed, or None if that is unknown."""
        if self.reward is None:
            return None
        return self.resolved if self.resolved is not None else self.reward >= 1.0

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.ids) for turn in self.turns)
