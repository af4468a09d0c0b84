"""The messages that a gateway and its clients exchange.

Messages are JSON unless they are described as msgpack. Clients ignore unknown fields, except in the settings of a feed, the quotas of a
project and the turn rewards of an outcome, so they can usually talk to a newer gateway.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Annotated, Generic, Literal, TypeVar

import msgspec

from turngate.errors import BadRequest
from turngate.store.attempts import AttemptRow
from turngate.store.audit import AuditEntry
from turngate.store.feeds import IncompleteGroup
from turngate.store.outcomes import OutcomeClass, RecordedOutcome
from turngate.store.projects import Quotas, ScopeName
from turngate.store.tool_calls import AnsweredBy
from turngate.trace.advantage import Choice
from turngate.trace.mismatch import LagMismatch, MismatchAlarm
from turngate.trace.prefix_tree import SegmentTurn
from turngate.trace.sample import RowSpan
from turngate.trace.session import CacheUse, CallError, Status
from turngate.trace.training_report import TrainingReport
from turngate.trace.tree import RefusedCalls
from turngate.trace.turn_advantage import TurnCredit
from turngate.trace.turn_rewards import RowReward
from turngate.types import Ids, Json, Logprobs, Message, Mode, encode_array

# All modes hold new calls. `drain` also waits until calls in flight have ended, and `keep` freezes them in the engine.
PauseMode = Literal["hold", "drain", "keep"]
CutPolicy = Literal["train", "mask", "exclude"]
# rows: each row with all its tokens; tree: the rows of a group as a tree, with each shared prefix once
FeedForm = Literal["rows", "tree"]
MAX_WAIT_S = 60.0  # the longest that a request for deliveries or gate calls waits at the gateway
ConfigT = TypeVar("ConfigT")
OutcomeT = TypeVar("OutcomeT")
NodeT = TypeVar("NodeT")
_FEED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    param: str | None = None


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorDetail


# ── sessions ────────────────────────────────────────────────────────────────────────────────────────────────────────


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings of a session as clients decode them: like `SessionConfig`, but a newer gateway may add fields and values."""

    model: str = ""
    mode: Mode = "exact"
    limits: dict[str, Json] = {}
    sampling: dict[str, Json] = {}
    bias: str = "neutral"
    thinking: str = "keep"
    policy: dict[str, Json] = {}
    template_kwargs: dict[str, Json] = {}
    metadata: dict[str, Json] = {}
    rollout: str = ""
    attempt: int = 1
    max_tokens: int | None = None
    at_limit: str = "final_message"
    signals: dict[str, Json] = {}
    tools: list[dict[str, Json]] = []
    show_logprobs: bool = False


class SessionOutcome(RecordedOutcome, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The outcome of a session as clients decode it. Unknown fields are ignored, except in its turn rewards."""


class Fork(msgspec.Struct, frozen=True):
    node: int
    cause: str


class SessionSummary(msgspec.Struct, Generic[ConfigT, OutcomeT], frozen=True, kw_only=True, omit_defaults=True):
    """A session in a list. Settings and outcome have strict types in the gateway and lenient types in clients."""

    id: str
    key: int
    status: Status
    stop: str
    opened: float
    closed: float | None
    config: ConfigT
    outcome: OutcomeT | None
    damaged: str = ""  # which part of the session cannot be read
    # Why the outcome does not count (the attempt was superseded, or the session cancelled). Such a session is in no group, feed or export.
    excluded: str = ""


class SessionDescription(
    SessionSummary[ConfigT, OutcomeT], Generic[ConfigT, OutcomeT], frozen=True, kw_only=True, omit_defaults=True
):
    """A session with its counters. `tokens`, `roles` and `forks` are None if its trace cannot be read."""

    turns: int
    sampled_tokens: int
    cache: CacheUse | None = None  # None: the engine did not report it
    in_flight: int
    last_error: CallError | None
    refused: RefusedCalls | None = None  # model calls that were refused because of their content
    # How long calls have been waiting for the engine, in seconds. Older gateways do not send this field.
    unheard_s: float = msgspec.field(default_factory=float)
    last_used: float
    tokens: int | None
    roles: dict[str, int] | None
    training: TrainingReport | None = None  # None if the trace is empty or unreadable; older gateways do not send it
    forks: list[Fork] | None
    unreadable: str = ""  # why the trace cannot be read


class NewSession(
    SessionDescription[ConfigT, OutcomeT], Generic[ConfigT, OutcomeT], frozen=True, kw_only=True, omit_defaults=True
):
    """The reply to a request that opens a session."""

    api_key: str


SessionInfo = SessionDescription[SessionSettings, SessionOutcome]  # the type that clients decode


class OpenedSession(msgspec.Struct, frozen=True):
    """A new session, with only the fields that clients use."""

    id: str
    key: str = msgspec.field(name="api_key")  # the secret


class SessionId(msgspec.Struct, frozen=True):
    id: str


class SessionList(msgspec.Struct, frozen=True):
    sessions: list[SessionId]


class ModelList(msgspec.Struct, frozen=True):
    data: list[SessionId]


class OutcomeReceipt(msgspec.Struct, frozen=True):
    """The reply to a request that records an outcome. `excluded` says why the outcome does not count, or is empty if it counts."""

    excluded: str = ""


class AttemptList(msgspec.Struct, frozen=True):
    attempts: list[AttemptRow]


class SupersededAttempt(msgspec.Struct, Generic[OutcomeT], frozen=True):
    """An attempt after a request to supersede it.

    If its state is `superseded`, its outcome does not count. Otherwise, the caller must use the outcome.
    """

    attempt: AttemptRow
    outcome: OutcomeT | None


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One training row of a session. `logprobs` contains None for tokens that were not sampled or have no log-probability."""

    branch: int
    ids: list[int]
    mask: list[int | bool]
    logprobs: list[float | None]
    spans: tuple[RowSpan, ...]


class SampleList(msgspec.Struct, frozen=True):
    session: str
    samples: list[SampleRow]


# ── traces ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class TraceContext(msgspec.Struct, frozen=True, eq=False, kw_only=True, tag_field="kind", tag="context"):
    """Messages that were added to a conversation, and their token ids."""

    id: int
    parent: int | None
    ids: Ids
    messages: msgspec.Raw  # a list of messages, in the form of `dialect`
    preamble: str  # the key of the tools and template arguments in `SessionTrace.preambles`
    cause: str | None
    detail: str | msgspec.UnsetType = msgspec.UNSET  # why the template caused a fork here
    dialect: str
    signals: Mapping[str, str] = msgspec.field(name="told")


class TraceSideData(msgspec.Struct, frozen=True):
    """A description of side data that was recorded with a turn: which tokens have values, and the type and shape of each value."""

    name: str
    first: int  # the first token, counted from the start of the reply; negative: in the prompt
    count: int
    dtype: str
    shape: tuple[int, ...]


class TraceTurn(msgspec.Struct, frozen=True, eq=False, kw_only=True, tag_field="kind", tag="sampled"):
    """One model call: the sampled ids, and how they were sampled."""

    id: int
    parent: int
    role: str  # a `TurnRole`; a newer gateway may send other values, here and in `finish` and `capture`
    evidence: str = ""  # what decided the role, such as `signal: header:x-kind: title`
    ids: Ids
    logprobs: Logprobs | None  # NaN for tokens without a log-probability
    message: msgspec.Raw
    finish: str
    cause: str | None
    version_start: int
    version_end: int
    started: float
    ended: float
    sampling: msgspec.Raw
    biases: tuple[str, ...]
    capture: str
    fault: str
    engine: str
    lost: tuple[str, ...]
    # Set if the engine reports them: how many prompt tokens were cached, and the sampled tokens as (policy version, count) runs.
    cached: int | msgspec.UnsetType = msgspec.UNSET
    version_runs: tuple[tuple[int, int], ...] | msgspec.UnsetType = msgspec.UNSET
    side: tuple[TraceSideData, ...] | msgspec.UnsetType = msgspec.UNSET  # its side data, without the values
    delivered: bool

    def decode_message(self) -> Message:
        return msgspec.json.decode(self.message, type=Message)


class TracePreamble(msgspec.Struct, frozen=True):
    """The tools and the template arguments of a conversation."""

    tools: msgspec.Raw
    template_kwargs: msgspec.Raw


class SessionTrace(msgspec.Struct, Generic[ConfigT, NodeT], frozen=True, eq=False, kw_only=True, omit_defaults=True):
    """The whole tree of a session. The gateway encodes its nodes one by one; clients decode them as `TraceContext` and `TraceTurn`."""

    session: str
    status: Status
    stop: str
    config: ConfigT
    vocabulary: str
    preambles: dict[str, TracePreamble]
    nodes: list[NodeT]
    refused: RefusedCalls | None = None

    def __getitem__(self, field: str) -> Json:
        """Return a field as plain JSON. Deprecated, like all access by key: use the attributes instead."""
        return self._to_dict()[field]

    def get(self, field: str, default: Json = None) -> Json:
        return self._to_dict().get(field, default)

    def __contains__(self, field: object) -> bool:
        return field in self._list_fields()

    def __iter__(self) -> Iterator[str]:
        return iter(self._to_dict())

    def keys(self) -> list[str]:
        return self._list_fields()

    def _list_fields(self) -> list[str]:
        """Return the names of the fields in the trace's JSON, which omits `refused` if it is None."""
        return [name for name in self.__struct_fields__ if name != "refused" or self.refused is not None]

    def _to_dict(self) -> dict[str, Json]:
        warnings.warn(
            "traces stop being mappings in turngate 0.2.0; use their attributes, such as trace.nodes",
            DeprecationWarning,
            3,
        )
        return msgspec.json.decode(msgspec.json.encode(self, enc_hook=encode_array), type=dict[str, Json])


TraceNode = TraceContext | TraceTurn
DecodedTrace = SessionTrace[SessionSettings, TraceNode]  # the type that clients decode


# ── host tools and events ───────────────────────────────────────────────────────────────────────────────────────────


class ToolCallView(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a host tool."""

    call: int
    tool: str
    arguments: Json
    time: float
    reply: Json
    answered: float | None
    answered_by: AnsweredBy
    waiting: bool  # whether the call is waiting for the host's reply


class ToolCallPage(msgspec.Struct, frozen=True):
    session: str
    calls: list[ToolCallView]


class AnsweredToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a host tool and its answer, as the gateway recorded them."""

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
    """The policy version, and whether calls are paused."""

    version: int
    paused: bool
    in_flight: int
    model: str = ""  # the engine's name for this version; empty: the engine's default model


# ── engines ─────────────────────────────────────────────────────────────────────────────────────────────────────────

EngineState = Literal["active", "draining", "failed"]  # failed: it could not load weights, so it gets no calls


class EngineView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine of the pool. The engine itself reports `running`, `waiting` and `kv_use`, which include the calls of other gateways."""

    url: str
    state: EngineState
    up: bool
    in_flight: int  # calls of this gateway
    sessions: int = 0  # sessions of this gateway whose calls go to this engine
    detail: str = ""  # why it is down
    running: int | None = None
    waiting: int | None = None
    kv_use: float | None = None  # from 0 to 1
    crowded: bool = False  # new sessions are sent to other engines


class EnginesView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The engines of a gateway. While they are saturated, runners start no further rollouts."""

    engines: list[EngineView]
    waiting: int = 0  # calls that are waiting in the gateway for a busy engine
    saturated: bool = False  # additional calls would have to wait
    scripted: bool = False  # replies are scripted, and not sampled from a model


# ── feeds ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class FeedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a feed. They cannot be changed after the feed is created. For different settings, create another feed."""

    n: Annotated[int, msgspec.Meta(ge=1, le=100_000)]  # a group is complete once this many rollouts have an outcome
    advantage: Choice = "normalised"
    max_staleness: Annotated[int, msgspec.Meta(ge=0, le=2**62)] | None = None  # in policy versions; None: no limit
    on_truncated: CutPolicy = "train"  # for rollouts that a limit ended; mask: in the baseline, but not trained on
    on_timeout: CutPolicy = "train"  # for rollouts that timed out
    groups: str = ""  # only groups whose names start with this prefix
    from_start: bool = False  # include rollouts recorded before the feed was created
    # Names of the side data to deliver with each row. Not sent if unset, because older clients reject unknown settings.
    side: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    credit: TurnCredit | msgspec.UnsetType = msgspec.UNSET  # how to compute advantages of turns; unset: deliver none


def parse_history(mark: str) -> str:
    """Return the name of the store's history (`store/restores.py`) from a feed's mark, or "" if the store has never been restored."""
    return mark.split("-", 2)[2] if mark.count("-") == 2 else ""


def remove_history(mark: str) -> str:
    """Return a feed's mark without the name of the store's history, which changes when the store is restored from a backup."""
    return "-".join(mark.split("-", 2)[:2])


class FeedView(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a feed."""

    name: str
    mark: str  # identifies this feed; a recreated feed with the same name has a different mark
    config: FeedConfig
    opened: float
    newest: int  # the last number assigned
    handed: int  # the highest number that a reader has fetched
    committed: int
    read: bool  # whether the feed has or had a reader
    waiting: tuple[IncompleteGroup, ...] = ()


class WireColumn(msgspec.Struct, frozen=True):
    """Side data of a row or a tree. There is one value for each token inside a span, and none for other tokens."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # the shape of one value; (-1,): lists of different lengths
    spans: tuple[tuple[int, int], ...]
    data: memoryview  # the bytes of all values (`trace/side_data.py`)


class WireRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One training row. Numbers are little-endian."""

    branch: int
    ids: bytes  # int32
    mask: bytes  # one bit per token, the first token in the highest bit
    logprobs: bytes  # float32, one for each token inside a span, and none for other tokens
    spans: tuple[RowSpan, ...]
    weight: float
    side: tuple[WireColumn, ...] = ()
    turn_rewards: tuple[RowReward, ...] = ()
    # One per span. Empty if they were not requested or could not be computed.
    turn_advantages: tuple[float | None, ...] = ()


class WireSegment(msgspec.Struct, frozen=True, omit_defaults=True):
    """Consecutive tokens of a tree that are the same in all rows that contain them (`trace/prefix_tree.py`)."""

    tokens: int
    parent: int | None  # index of the segment before it; None: it starts its rows
    turn: SegmentTurn | None = None  # None: context


class WireTreeRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row of a tree. Its fields have the same meaning as the fields of `WireRow` with the same names."""

    rollout: int  # index in the delivery
    last: int  # index of its last segment
    branch: int
    weight: float
    empty_turns: tuple[RowSpan, ...] = ()  # turns without tokens, which have no segment
    turn_rewards: tuple[RowReward, ...] = ()
    turn_advantages: tuple[float | None, ...] = ()


class WireTree(msgspec.Struct, frozen=True):
    """Rows of one group as a tree. The segments are in depth-first order, and so are their tokens."""

    ids: memoryview  # int32
    logprobs: memoryview  # float32, one for each token of a segment with a turn
    segments: tuple[WireSegment, ...]
    rows: tuple[WireTreeRow, ...]
    side: tuple[WireColumn, ...] = ()


class WireRollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout in a delivery."""

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
    # Why the rows have no turn advantages, although they were requested.
    uncredited: str | msgspec.UnsetType = msgspec.UNSET


class WireDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """One complete group of rollouts."""

    number: int
    group: str
    task: str
    version: int
    rollouts: tuple[WireRollout, ...]
    # All rows of the delivery, if they were requested as trees; the rollouts then have none. Usually there is one tree. Rows whose side
    # data differs in name, type or shape are in different trees.
    trees: tuple[WireTree, ...] | msgspec.UnsetType = msgspec.UNSET


class DeliveryPage(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a request for deliveries, as msgpack."""

    feed: str
    newest: int
    committed: int
    version: int
    deliveries: tuple[msgspec.Raw, ...]  # each a WireDelivery


class MismatchReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the log-probabilities of a trainer differ from the recorded ones, over the rows of an update."""

    reader: str  # the token of the feed's reader
    number: Annotated[int, msgspec.Meta(ge=1, le=2**62)]  # the last delivery of the update
    version: Annotated[int, msgspec.Meta(ge=0, le=2**62)]  # of the weights with which the trainer computed its values
    lags: tuple[LagMismatch, ...]
    id: Annotated[str, msgspec.Meta(max_length=64)] = ""  # a report sent again with the same id is counted once


class MismatchReply(msgspec.Struct, frozen=True):
    """The alarms that a report caused."""

    alarms: tuple[MismatchAlarm, ...]


class FeedList(msgspec.Struct, frozen=True):
    feeds: list[FeedView]


class FeedReader(msgspec.Struct, frozen=True):
    """The reply to a request that takes over a feed. `reader` is the token for fetching and committing deliveries."""

    reader: str


def check_feed_name(name: str) -> None:
    if not _FEED_NAME.fullmatch(name):
        raise BadRequest(
            f"invalid feed name: {name[:200]!r}; use 1 to 128 letters, digits, '-', '_', '.' or ':', and start with a letter or digit",
            param="name",
        )


# ── projects and keys ───────────────────────────────────────────────────────────────────────────────────────────────


class ProjectView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    created: float
    weight: float
    quotas: Quotas
    keys: int  # the number of valid keys


class ProjectList(msgspec.Struct, frozen=True):
    projects: list[ProjectView]


class DeletedProject(msgspec.Struct, frozen=True):
    deleted: str  # its name


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """A description of a key, without the key itself."""

    prefix: str
    project: str
    scopes: tuple[ScopeName, ...]
    note: str = ""
    created: float
    expires: float | None = None
    revoked: float | None = None
    valid: bool


class NewKey(KeyView, frozen=True, kw_only=True):
    """A new key, which is shown only in this reply."""

    key: str


class KeyList(msgspec.Struct, frozen=True):
    keys: list[KeyView]


class AuditPage(msgspec.Struct, frozen=True):
    entries: list[AuditEntry]
