"""One rollout in a list: its row, and how the row is computed from the session, the outcome and the runner's reports."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from turngate.store.outcomes import OutcomeClass
from turngate.store.queries import RawEvent, RawSession
from turngate.trace.training_report import NO_TOKENS
from turngate.types import Json, Mode

T = TypeVar("T")
Else = TypeVar("Else")
Status = Literal["starting", "running", "finishing", "done", "cancelled"]
STATUSES: tuple[Status, ...] = ("starting", "running", "finishing", "done", "cancelled")
ACTIVE_STATUSES: tuple[Status, ...] = ("starting", "running", "finishing")
DONE = "done"  # the last stage reported by a runner
DAMAGED = "its outcome is damaged on disk"
DAMAGED_ROW = "its session record is damaged on disk"
SILENT_S = 3600.0  # a runner that has reported nothing for this long is considered gone
_LONG = 2000  # maximum characters of a message in a list


class RolloutRow(msgspec.Struct, kw_only=True, rename={"kind": "class"}):
    """A rollout as one row of a list."""

    id: str
    name: str = ""
    group: str = ""
    task: str = ""
    task_kind: str = ""
    batch: str = ""
    agent: str = ""
    agent_version: str = ""
    model: str = ""
    mode: str = ""
    sandbox: str = ""
    attempt: int = 1
    status: Status = "starting"
    stage: str = ""
    kind: OutcomeClass | Literal[""] = ""
    reward: float | None = None
    resolved: bool | None = None
    stop: str = ""
    message: str = ""
    warning: str = ""  # warnings about its training data
    excluded: str = ""  # why its outcome does not count, such as `superseded by attempt 2`
    opened: float = 0.0
    closed: float | None = None
    seen: float = 0.0
    seconds: float = 0.0
    turns: int = 0
    sampled_tokens: int = 0
    version_start: int | None = None
    version_end: int | None = None

    @property
    def counted_reward(self) -> float | None:
        """The rollout's reward, or None if its outcome does not count."""
        return None if self.excluded else self.reward

    @property
    def trained_reward(self) -> float | None:
        """The rollout's reward, or None if its outcome does not count or its runner reported that no tokens are trained."""
        return None if self.warning.startswith(NO_TOKENS) else self.counted_reward


class _OutcomeSummary(msgspec.Struct, frozen=True):
    """The fields of an outcome that are shown in a list of rollouts. Other fields are not decoded."""

    kind: OutcomeClass
    reward: float | None = None
    resolved: bool | None = None
    message: str = ""
    group: str = ""
    task: str = ""
    attempt: int = 1
    data: msgspec.Raw = msgspec.Raw(b"null")


class _OutcomeData(msgspec.Struct, frozen=True):
    """The part of an outcome's data that a list of rollouts shows, as Turngate's runner records it. Other runners may record other data."""

    warnings: list[str] = []


class _SessionSettings(msgspec.Struct, frozen=True):
    """The settings of a session that a list of rollouts shows."""

    model: str = ""
    mode: Mode = "exact"
    metadata: dict[str, Json] = {}
    rollout: str = ""
    attempt: int = 1


class _StageEvent(msgspec.Struct, frozen=True):
    """A stage that a runner has reported. Clients can send arbitrary values, so every field accepts any JSON."""

    stage: Json = ""
    rollout: Json = ""
    attempt: Json = 1
    task: Json = ""
    group: Json = ""
    agent: Json = ""
    model: Json = ""
    batch: Json = ""
    status: Json = ""
    kind: Annotated[Json, msgspec.Meta(description="outcome class, sent with the last stage")] = msgspec.field(
        default=None, name="class"
    )
    message: Json = ""


_outcome_decoder = msgspec.json.Decoder(_OutcomeSummary)
_outcome_data_decoder = msgspec.json.Decoder(_OutcomeData)
_settings_decoder = msgspec.json.Decoder(_SessionSettings)
_stage_decoder = msgspec.json.Decoder(_StageEvent)


class RolloutEntry:
    """One rollout in the index: its row, and the state from which the row is computed."""

    __slots__ = ("damage", "done", "key", "recorded", "row", "search_text", "state", "versions_of")

    def __init__(self, row: RolloutRow) -> None:
        self.row = row
        self.key = 0  # key of its session; 0 if it has none yet
        self.state = ""  # status of its session
        self.damage = ""  # description of its damaged data
        self.done = ""  # final status that its runner has reported; empty until then
        self.recorded: float | None = None  # time at which its outcome was recorded
        self.versions_of = 0, 0  # turns and tokens when its versions were last read
        self.search_text = ""  # built on first search

    def use_session(self, session: RawSession, outcome: tuple[float, bytes] | None) -> None:
        """Fill in the row from a session and its outcome, if any. `outcome` is a pair: when it was recorded, and its JSON."""
        row = self.row
        self.key, self.state, self.search_text = session.key, session.status, ""
        row.opened, row.closed, row.stop = session.opened, session.closed, session.stop
        row.seen = max(row.seen, session.closed or session.opened)
        config = decode_or(_settings_decoder, session.config, _SessionSettings())
        metadata = config.metadata
        row.model, row.mode = config.model, config.mode
        row.name = config.rollout or _text(metadata.get("rollout")) or row.name
        row.group, row.task = _text(metadata.get("group")) or row.group, _text(metadata.get("task")) or row.task
        row.task_kind = _text(metadata.get("task_kind"))
        row.agent, row.agent_version = _text(metadata.get("agent")), _text(metadata.get("agent_version"))
        row.sandbox, row.batch = _text(metadata.get("sandbox")), _text(metadata.get("batch")) or row.batch
        row.attempt = config.attempt if config.rollout else _positive_int(metadata.get("attempt"))
        if outcome is not None:
            self._use_outcome(*outcome)
        if session.damaged:
            row.message = self.damage = DAMAGED_ROW

    def _use_outcome(self, at: float, written: bytes) -> None:
        row, self.recorded = self.row, at
        row.seen = max(row.seen, at)
        recorded = decode_or(_outcome_decoder, written, None)
        if recorded is None:  # the outcome cannot be read
            row.kind, row.reward, row.resolved = "", None, None
            row.message = self.damage = DAMAGED
            return
        self.damage = ""
        row.kind, row.reward, row.resolved = recorded.kind, recorded.reward, recorded.resolved
        row.message, row.attempt = recorded.message[:_LONG], recorded.attempt
        row.group, row.task = recorded.group or row.group, recorded.task or row.task
        data = decode_or(_outcome_data_decoder, bytes(recorded.data), _OutcomeData())
        row.warning = "; ".join(data.warnings)[:_LONG]

    def use_first_stage(self, event: RawEvent) -> None:
        """Fill in the row from the runner's first report, for a rollout that has no session yet and may never have one."""
        self.row.opened = event.time
        self._describe(decode_or(_stage_decoder, event.data, _StageEvent()))

    def use_stage(self, event: RawEvent) -> None:
        """Update the row from a report of the runner."""
        stage, row = decode_or(_stage_decoder, event.data, _StageEvent()), self.row
        row.stage, row.seen, self.search_text = _text(stage.stage), max(row.seen, event.time), ""
        self._describe(stage)
        if stage.stage == DONE:
            self.done = _text(stage.status) or "finished"
            if not self.key:
                row.closed = event.time
            if (
                not row.kind
                and not self.damage
                and stage.kind in ("graded", "agent failed", "invalid task", "infrastructure fault")
            ):
                row.kind = stage.kind
            row.message = row.message or _text(stage.message)[:_LONG]

    def _describe(self, stage: _StageEvent) -> None:
        row = self.row
        row.name = row.name or _text(stage.rollout)
        row.task, row.agent, row.model = (
            row.task or _text(stage.task),
            row.agent or _text(stage.agent),
            row.model or _text(stage.model),
        )
        row.group, row.batch = row.group or _text(stage.group), row.batch or _text(stage.batch)
        row.attempt = max(row.attempt, _positive_int(stage.attempt))

    def status_at(self, now: float) -> Status:
        if not self.key:
            if self.done:
                return "cancelled" if self.done == "cancelled" else "done"
            return "starting" if now - self.row.seen < SILENT_S else "done"
        if self.state == "open":
            return "running"
        if self.state == "cancelled":
            return "cancelled"
        is_reported = self.recorded is not None or self.done or not self.row.stage
        return "done" if is_reported or now - self.row.seen > SILENT_S else "finishing"

    def build_search_text(self) -> str:
        """Return the text that searches look through, in lower case."""
        if not self.search_text:
            row = self.row
            parts = (row.id, row.name, row.group, row.task, row.agent, row.model, row.message, row.stop)
            self.search_text = "\n".join(dict.fromkeys(parts)).casefold()
        return self.search_text

    @property
    def failure(self) -> tuple[str, str]:
        """The class and message under which the rollout is listed as a failure, or empty strings if it did not fail."""
        row = self.row
        kind: str = row.kind or ("damaged" if self.damage else "cancelled" if row.status == "cancelled" else "")
        return ("", "") if kind in ("", "graded") else (kind, row.message or row.stop or self.done)


def decode_or(decoder: msgspec.json.Decoder[T], written: bytes, otherwise: Else) -> T | Else:
    """Decode stored JSON. Return `otherwise` if that fails, so that one damaged record does not break a whole view."""
    try:
        return decoder.decode(written)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return otherwise


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def _positive_int(value: Json) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1
