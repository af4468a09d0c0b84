"""Types shared by every layer: messages, tools, calls, sampling parameters and reply events.

`dialects/` converts wire JSON to and from these types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, get_args

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

ID_DTYPE = np.int32
LOGPROB_DTYPE = np.float32
LOGPROB_TOLERANCE = 1e-3  # rounding may raise a log-probability this far above 0
Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]
Json = Any  # a JSON value that is passed through as data

Role = Literal["system", "user", "assistant", "tool"]
Mode = Literal["exact", "gate", "observe"]
Finish = Literal["stop", "length", "tool_calls", "abort"]
Capture = Literal["tokens", "logprobs", "text"]
SUPERSEDED = "superseded"  # stop reason of a session whose attempt was given up or replaced by a later one
RUNNER_LOST = "runner lost"  # stop reason of a session whose runner has ended without ending the session
STALE = "stale"  # stop reason of a session that is too old for every feed
BATCH_STREAM = "batch:"  # prefix of a batch's event stream; the batch id follows

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # as engines send it; fits into `ID_DTYPE`

NO_IDS: Ids = np.empty(0, ID_DTYPE)
SAMPLING_MASK = "sampling_mask"  # name of the side data with the ids that each token was sampled from
TRUNCATIONS = ("top_p", "top_k", "min_p")  # sampling parameters that a sampling mask describes completely
VARIABLE = -1  # in a value's shape: a dimension whose length differs from token to token


class RaggedArray(msgspec.Struct, frozen=True, eq=False):
    """Lists of different lengths, one per token, such as the ids that a sampling mask keeps. Slicing does not copy them."""

    offsets: np.ndarray  # int64: where each list starts in `items`, and where the last one ends; the first is 0
    items: np.ndarray

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int] | np.ndarray], dtype: Any = ID_DTYPE) -> RaggedArray:
        parts = [np.asarray(each, dtype) for each in lists]
        return cls.from_sizes([len(part) for part in parts], np.concatenate([np.empty(0, dtype), *parts]))

    @classmethod
    def from_sizes(cls, sizes: Sequence[int] | np.ndarray, items: np.ndarray) -> RaggedArray:
        return cls(np.concatenate(([0], np.cumsum(np.asarray(sizes, np.int64)))), items)

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.items.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self), VARIABLE

    @property
    def nbytes(self) -> int:
        return int(4 * len(self) + self.items.nbytes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, where: slice) -> RaggedArray:
        start, end, _ = where.indices(len(self))
        offsets = self.offsets[start : max(start, end) + 1]
        return RaggedArray(offsets - offsets[0], self.items[offsets[0] : offsets[-1]])

    def lists(self) -> list[np.ndarray]:
        return np.split(self.items, self.offsets[1:-1]) if len(self) else []


SideValues = np.ndarray | RaggedArray


class SideArray(msgspec.Struct, frozen=True, eq=False):
    """Side data: extra data about consecutive tokens, such as sampling masks, with one value per token.

    The first token of the reply has index 0, and tokens of the prompt have negative indexes.
    """

    name: str
    first: int  # the first token that has a value
    values: SideValues  # tokens × the shape of one value

    @property
    def end(self) -> int:
        """The index of the token after the last one that has a value."""
        return self.first + len(self.values)

    def cut(self, first: int, end: int) -> SideArray:
        """Return the values of the tokens from `first` up to but not including `end`. All of them must have values."""
        return SideArray(self.name, first, self.values[first - self.first : end - self.first])


def ids_to_json(ids: Ids) -> bytes:
    """Encode ids as a JSON list without the brackets: `1,2,3`."""
    return orjson.dumps(np.ascontiguousarray(ids, ID_DTYPE), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def ids_from_json(items: bytes) -> Ids:
    """Decode the output of `ids_to_json`."""
    return np.array(orjson.loads(b"[%b]" % items), ID_DTYPE)


def encode_array(value: object) -> Json:
    """Encode an array as a list, with null for NaN and infinity. Used as `enc_hook` of `msgspec.json.encode`."""
    if isinstance(value, np.ndarray):
        # Encoded as 64-bit numbers, because the shortest form of a 32-bit number would be read back as a different 64-bit number.
        wide = value.astype(np.float64 if value.dtype.kind == "f" else np.int64)
        return msgspec.Raw(orjson.dumps(wide, option=orjson.OPT_SERIALIZE_NUMPY))
    raise TypeError(f"cannot encode {type(value).__name__}")


def decode_array(kind: type, items: list[Any]) -> Ids | Logprobs:
    """Decode a list of token ids or log-probabilities as an array. A log-probability of null becomes NaN.

    Used as `dec_hook` of `msgspec.json.decode`.
    """
    dtype = get_args(kind)[-1:]  # compared instead of `kind`, because NDArray is a type alias from numpy 2.5 on
    if not isinstance(items, list):
        raise ValueError(f"expected a list, not {type(items).__name__}")
    if dtype == (np.dtype[np.int32],):
        if not all(type(item) is int and 0 <= item < 2**31 for item in items):
            raise ValueError("expected token ids, which are integers from 0 to 2147483647")
        return np.array(items, ID_DTYPE)
    if dtype == (np.dtype[np.float32],):
        if not all(item is None or type(item) in (int, float) for item in items):
            raise ValueError("expected numbers or null")
        return np.array([np.nan if item is None else item for item in items], LOGPROB_DTYPE)
    raise NotImplementedError(f"cannot decode {kind}")


class PromptIds:
    """The ids of a whole prompt, stored as the JSON list that engines accept.

    The list is joined from parts. Most of a prompt usually repeats the prompt before it, so parts that are already encoded are used again.
    The array is decoded on first use.
    """

    __slots__ = ("_array", "items", "size")

    def __init__(self, parts: Sequence[bytes], size: int) -> None:
        """Join `parts`, each encoded by `ids_to_json`."""
        self.items = b",".join([part for part in parts if part])  # of the JSON list, without brackets
        self.size = size
        self._array: Ids | None = None

    @property
    def json(self) -> bytes:
        return b"[%b]" % self.items

    def __len__(self) -> int:
        return self.size

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Ids:
        if self._array is None:
            self._array = ids_from_json(self.items)
        return self._array

    def __getitem__(self, index: slice) -> Ids:
        return np.asarray(self)[index]

    def tolist(self) -> list[int]:
        ids: list[int] = np.asarray(self).tolist()
        return ids

    def tobytes(self) -> bytes:
        return np.asarray(self).tobytes()


NO_LOGPROBS: Logprobs = np.empty(0, LOGPROB_DTYPE)


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function call by the model. `arguments` is text that is usually, but not always, valid JSON.

    `signature` is a provider's opaque token for the model's thinking (observe mode), which the agent must send back.
    """

    id: str
    name: str
    arguments: str
    signature: str = msgspec.field(default="", name="seal")


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation, independent of any wire format."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    signature: str = msgspec.field(default="", name="seal")  # like ToolCall.signature, but for the reasoning
    # Why a text-only model cannot read the message, such as an image in it. Only an endpoint of the same dialect can read the message.
    unsupported: str = msgspec.field(default="", name="beyond")


class DeliveredTurn(msgspec.Struct, frozen=True):
    """A recorded turn that reached the agent. The agent's own transcript should contain it."""

    role: str
    conversation: str  # the agent's name for its thread, or the root of the tree
    message: Message


class Tool(msgspec.Struct, frozen=True):
    """A function that the agent lets the model call. `wire` is in OpenAI's function format, which chat templates expect."""

    name: str
    wire: Json


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters. The defaults are neutral: they sample from the model's own distribution."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    top_k: Count = 0  # 0 means off
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] = 1.0
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    min_tokens: Count = 0

    def biases(self) -> tuple[str, ...]:
        """Return the names of the parameters other than the temperature that bias sampling, and `greedy` if the temperature is 0."""
        neutral = NEUTRAL
        if self is neutral:
            return ()
        names = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")
        biases = [name for name in names if getattr(self, name) != getattr(neutral, name)]
        if self.temperature == 0:
            biases.append("greedy")
        return tuple(biases)

    @property
    def is_truncated(self) -> bool:
        """Whether these parameters bias sampling, and only in ways that a sampling mask describes completely."""
        biases = self.biases()
        return bool(biases) and set(biases) <= set(TRUNCATIONS)


NEUTRAL = Sampling()


class Constraint(msgspec.Struct, frozen=True):
    """A format that the output must have.

    With kind `tools`, the output is a JSON list of calls; with `tool`, the arguments for the named tool. With `after_reasoning`, the
    model may reason first.
    """

    kind: Literal["json_object", "json_schema", "tools", "tool"]
    schema: Json = None
    tool: str = ""
    after_reasoning: bool = False


class ReasoningTokens(msgspec.Struct, frozen=True):
    """The tokens that open and close the reasoning at the start of a reply. `is_open` says whether the prompt ends with `opening`."""

    opening: int
    closing: int
    is_open: bool


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Usage limits of one session. `None` means no limit."""

    turns: Count | None = None
    sampled_tokens: Count | None = None
    context_tokens: Count | None = None
    seconds: Seconds | None = None


class History(Protocol):
    """The messages of a call, as raw fragments of wire JSON that are decoded on demand.

    One fragment may contain several messages, because some wire formats combine tool results and text.
    """

    @property
    def raws(self) -> list[bytes]: ...

    @property
    def items(self) -> Sequence[bytes]:
        """The items of the request's list of messages, in wire format. The fragments in `raws` are made from these items."""

    def decode(self, index: int) -> tuple[Message, ...]: ...

    def extend(self, items: Sequence[bytes]) -> History:
        """Return the history for `items`, a longer list that starts with this history's items."""


class CallSignals(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """A call's conversation, parent conversation and role, read from the request as the agent's description specifies."""

    thread: str = ""
    parent: str = ""
    role: Literal["", "main", "subagent", "side", "summary"] = ""
    why: str = ""
    source: str = ""  # the part of the request that determined the role, such as `header:x-kind` or `system`

    @property
    def is_aside(self) -> bool:
        """Whether the call is outside the conversation itself: a title, a probe or a summary."""
        return self.role in ("side", "summary")

    @property
    def is_subagent(self) -> bool:
        return self.role == "subagent" or bool(self.parent and self.parent != self.thread)


NO_SIGNALS = CallSignals()


class Tools(Protocol):
    """The tools of a call, as raw wire JSON that is decoded on demand."""

    @property
    def raw(self) -> bytes: ...

    @property
    def replaceable(self) -> bool:
        """Whether a later tool may replace an earlier one with the same name."""

    def decode(self) -> tuple[Tool, ...]: ...


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One model call, in any dialect."""

    model: str
    history: History
    tools: Tools | None = None
    sampling: dict[str, Any] = {}  # fields of `Sampling` that the agent set, validated by the dialect
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    constraint: Constraint | None = None
    parallel_tool_calls: bool = True
    top_logprobs: int | None = None  # alternatives to report per token; None if the agent wants no log-probabilities
    template_kwargs: dict[str, Json] = {}
    template_hints: dict[str, Json] = {}  # template arguments, ignored if the template does not use them
    stream: bool = False
    include_usage: bool = False
    store: bool = False  # keep the reply, so that later calls can refer to it by id
    retried: bool = False  # the client reports this call as a retry
    idempotency_key: str = ""
    dialect: str = "chat"
    body: bytes = b""  # the request as received, for observe mode
    forwarded_headers: Mapping[str, str] = {}  # headers to forward to a provider of the same dialect
    reply_options: object = None  # the dialect's options for encoding the reply; opaque to other code
    signals: CallSignals = NO_SIGNALS


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class TokenScore(msgspec.Struct, frozen=True):
    """A token and its log-probability, as an agent may see them: with the token's text and bytes, but not its id."""

    text: str
    data: bytes | None  # None if the vocabulary does not consist of bytes
    logprob: float | None
    alternatives: tuple[TokenScore, ...] = ()  # the most likely tokens at this position, likeliest first


class Delta(msgspec.Struct, frozen=True):
    """Newly sampled text.

    In observe mode, a delta of kind `signature` contains the provider's signature for the model's thinking.
    """

    kind: Literal["content", "reasoning", "signature"]
    text: str
    scores: tuple[TokenScore, ...] = ()  # of newly sampled tokens, if the agent requested them


class CallDelta(msgspec.Struct, frozen=True):
    """A complete tool call in a reply."""

    index: int
    call: ToolCall


class KeepAlive(msgspec.Struct, frozen=True):
    """A sign that the turn is still running although there is no new output."""


class Done(msgspec.Struct, frozen=True):
    """The last event of a reply. If tokens were sampled, the turn is already stored."""

    finish: Finish
    message: Message
    usage: Usage | None
    node: int | None = None  # the turn's node in the trace; None if no tokens were sampled
    stopped_by: str = ""  # the stop string that ended the turn, if any
    scores: tuple[TokenScore, ...] = ()  # of all sampled tokens, if the agent requested them


ReplyEvent = Delta | CallDelta | KeepAlive | Done
