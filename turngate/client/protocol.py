"""The protocol between a gateway and its own clients: what the server encodes and the clients decode.

JSON, unless a comment says msgpack. A client ignores fields that it does not know, so that it can talk to a newer gateway.
"""

from __future__ import annotations

import re
from typing import Annotated, Generic, Literal, TypeVar

import msgspec

from turngate.engines.gate_call import GateFault, GateFinish
from turngate.errors import BadRequest
from turngate.store.feeds import IncompleteGroup
from turngate.store.outcomes import OutcomeClass, RecordedOutcome
from turngate.store.tool_calls import AnsweredBy
from turngate.trace.advantage import Choice
from turngate.trace.sample import RowSpan
from turngate.trace.session import CallError, Status
from turngate.types import Constraint, Json, Mode, Sampling

PauseMode = Literal[
    "hold", "drain", "keep"
]  # hold new calls; also wait for calls in flight; also freeze them in the engine
CutPolicy = Literal["train", "mask", "exclude"]
MAX_WAIT_S = 60.0  # the longest that the gateway holds one request for deliveries or gate calls
ConfigT = TypeVar("ConfigT")
OutcomeT = TypeVar("OutcomeT")
_FEED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    param: str | None = None


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorDetail


# ── sessions ────────────────────────────────────────────────────────────────────────────────────────────────────────


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of a session as clients read them: a `SessionConfig`, lenient towards what a newer gateway adds."""

    model: str = ""
    mode: Mode = "exact"
    limits: dict[str, Json] = {}
    sampling: dict[str, Json] = {}
    bias: str = "neutral"
    thinking: str = "keep"
    policy: dict[str, Json] = {}
    template_kwargs: dict[str, Json] = {}
    metadata: dict[str, Json] = {}
    max_tokens: int | None = None
    at_limit: str = "final_message"
    signals: dict[str, Json] = {}
    tools: list[dict[str, Json]] = []


class SessionOutcome(RecordedOutcome, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The outcome of a session as clients read it."""


class Fork(msgspec.Struct, frozen=True):
    node: int
    cause: str


class SessionSummary(msgspec.Struct, Generic[ConfigT, OutcomeT], frozen=True, kw_only=True, omit_defaults=True):
    """A session in a list. The gateway encodes its own types for settings and outcome; clients decode lenient ones."""

    id: str
    key: int
    status: Status
    stop: str
    opened: float
    closed: float | None
    config: ConfigT
    outcome: OutcomeT | None
    damaged: str = ""  # what of it cannot be read


class SessionDescription(
    SessionSummary[ConfigT, OutcomeT], Generic[ConfigT, OutcomeT], frozen=True, kw_only=True, omit_defaults=True
):
    """A session with its counters. `tokens`, `roles` and `forks` are None where its trace cannot be read."""

    turns: int
    sampled_tokens: int
    in_flight: int
    last_error: CallError | None
    # For how long calls have waited for the engine. An older gateway does not send it.
    unheard_s: float = msgspec.field(default_factory=float)
    last_used: float
    tokens: int | None
    roles: dict[str, int] | None
    forks: list[Fork] | None
    unreadable: str = ""  # why not


class NewSession(
    SessionDescription[ConfigT, OutcomeT], Generic[ConfigT, OutcomeT], frozen=True, kw_only=True, omit_defaults=True
):
    """The reply to opening a session."""

    api_key: str


SessionInfo = SessionDescription[SessionSettings, SessionOutcome]  # as clients decode it


class OpenedSession(msgspec.Struct, frozen=True):
    """What a client needs of a new session."""

    id: str
    key: str = msgspec.field(name="api_key")  # the secret


class SessionId(msgspec.Struct, frozen=True):
    id: str


class SessionList(msgspec.Struct, frozen=True):
    sessions: list[SessionId]


class ModelList(msgspec.Struct, frozen=True):
    data: list[SessionId]


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One training row of a session, as JSON. `logprobs` is None for tokens that were not sampled."""

    branch: int
    ids: list[int]
    mask: list[int | bool]
    logprobs: list[float | None]
    spans: tuple[RowSpan, ...]


class SampleList(msgspec.Struct, frozen=True):
    session: str
    samples: list[SampleRow]


class ToolCallView(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a host tool."""

    call: int
    tool: str
    arguments: Json
    time: float
    reply: Json
    answered: float | None
    answered_by: AnsweredBy
    waiting: bool  # for the host's reply


class ToolCallPage(msgspec.Struct, frozen=True):
    session: str
    calls: list[ToolCallView]


class AnsweredToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to answering a call of a host tool."""

    call: int
    tool: str
    arguments: Json
    called: float
    repeat: str
    reply: Json
    answered: float
    answered_by: AnsweredBy


class EventReceipt(msgspec.Struct, frozen=True):
    seq: int


# ── the fence ───────────────────────────────────────────────────────────────────────────────────────────────────────


class FenceView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The policy version, and whether calls are held for an update."""

    version: int
    paused: bool
    in_flight: int
    model: str = ""  # the name under which the engine has this version; empty: the engine's own


# ── feeds ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class FeedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a feed, fixed when it is opened. A feed with other settings needs another name."""

    n: Annotated[int, msgspec.Meta(ge=1, le=100_000)]  # rollouts with an outcome that make a group complete
    advantage: Choice = "normalised"
    max_staleness: Annotated[int, msgspec.Meta(ge=0, le=2**62)] | None = None  # policy versions; None: any
    on_truncated: CutPolicy = "train"  # rollouts that a limit cut short; mask: in the baseline, but not trained
    on_timeout: CutPolicy = "train"  # rollouts whose time ran out
    groups: str = ""  # the feed takes groups whose names begin so
    from_start: bool = False  # also what was recorded before the feed was opened


class FeedView(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a feed."""

    name: str
    mark: str  # identifies this feed: one that is opened under its name after it was deleted has another mark
    config: FeedConfig
    opened: float
    newest: int  # the last number given
    handed: int  # the highest number that a reader fetched
    committed: int
    read: bool  # it has, or had, a reader
    waiting: tuple[IncompleteGroup, ...] = ()  # groups that are not complete


class WireRow(msgspec.Struct, frozen=True):
    """One training row. Numbers are little endian."""

    branch: int
    ids: bytes  # int32
    mask: bytes  # bits, the first token in the highest bit
    logprobs: bytes  # float32, one for each token of each span; the other tokens have none
    spans: tuple[RowSpan, ...]
    weight: float


class WireRollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of a delivery."""

    session: str
    task: str
    attempt: int
    kind: OutcomeClass
    reward: float | None
    resolved: bool | None
    advantage: float | None
    excluded: str
    truncated: bool
    timed_out: bool
    turns: int
    sampled_tokens: int
    data: bytes  # JSON
    rows: tuple[WireRow, ...]


class WireDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """One complete group of rollouts."""

    number: int
    group: str
    task: str
    version: int
    rollouts: tuple[WireRollout, ...]


class DeliveryPage(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a request for deliveries, as msgpack."""

    feed: str
    newest: int
    committed: int
    version: int
    deliveries: tuple[msgspec.Raw, ...]  # each a WireDelivery


class FeedList(msgspec.Struct, frozen=True):
    feeds: list[FeedView]


class FeedReader(msgspec.Struct, frozen=True):
    """The reply to taking over a feed: the token that reads and commits."""

    reader: str


def check_feed_name(name: str) -> None:
    if not _FEED_NAME.fullmatch(name):
        raise BadRequest(
            f"name: {name[:200]!r} must be 1 to 128 letters, digits, '-', '_', '.' or ':', starting with a letter or digit",
            param="name",
        )


# ── the gate: msgpack, with token ids as int32 and log-probabilities as float32, both little endian ─────────────────


class TakeCalls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask for calls to answer."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 20.0
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 60.0


class LeasedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call for a trainer. Only the holder of its `lease` may answer it."""

    id: str
    lease: str
    session: str
    version: int
    prompt: bytes
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    stream: bool = True


class LeasedCalls(msgspec.Struct, frozen=True):
    calls: list[LeasedCall]


class CallAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A piece of an answer that follows its first `at` tokens. With `finish` it is the last piece, and may be the only one."""

    lease: str
    ids: bytes
    logprobs: bytes | None
    at: Annotated[int, msgspec.Meta(ge=0)] = 0
    finish: GateFinish | None = None
    version: int | None = None


class CallFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lease: str
    message: str
    fault: GateFault = "unavailable"


class CallRelease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Give a call back, so that another trainer can take it."""

    lease: str


class RenewLeases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    leases: dict[str, str]  # by call


class RenewedLeases(msgspec.Struct, frozen=True):
    over: dict[str, str]  # calls whose lease is lost, and why
