"""The nouns that every layer shares: messages, tools, calls, sampling and the events of a reply.

Everything here is plain data. `dialects/` turns wire JSON into these types. No layer above it handles wire JSON, except where a JSON
value is the data itself (tool schemas and the tools' wire form).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

ID_DTYPE = np.int32
LOGPROB_DTYPE = np.float32
LOGPROB_TOLERANCE = 1e-3  # how far rounding may lift a log-probability above 0
Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]
Json = Any  # a JSON value that is passed through as data

Role = Literal["system", "user", "assistant", "tool"]
Mode = Literal["exact", "gate", "observe"]
Finish = Literal["stop", "length", "tool_calls", "abort"]
Capture = Literal["tokens", "logprobs", "text"]
STALE = "stale"  # the stop reason of a session that no feed can use any more
BATCH_STREAM = "batch:"  # the prefix of the event stream of a batch; its id follows

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]

NO_IDS: Ids = np.empty(0, ID_DTYPE)


def ids_to_json(ids: Ids) -> bytes:
    """Encode ids as the items of a JSON list, without its brackets: `1,2,3`."""
    return orjson.dumps(np.ascontiguousarray(ids, ID_DTYPE), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def ids_from_json(items: bytes) -> Ids:
    """Decode what `ids_to_json` encoded."""
    return np.array(orjson.loads(b"[%b]" % items), ID_DTYPE)


def encode_array(value: object) -> Json:
    """An `enc_hook` for `msgspec.json.encode`: arrays become lists, with null for NaN."""
    if isinstance(value, np.ndarray):
        # As 64-bit numbers: the shortest form of a 32-bit number would be read back as a different 64-bit number.
        wide = value.astype(np.float64 if value.dtype.kind == "f" else np.int64)
        return msgspec.Raw(orjson.dumps(wide, option=orjson.OPT_SERIALIZE_NUMPY))
    raise TypeError(f"cannot encode {type(value).__name__}")


def decode_array(kind: type, items: list[Any]) -> Ids | Logprobs:
    """A `dec_hook` for `msgspec.json.decode`: lists become arrays, with NaN for null."""
    if kind == Ids:
        return np.array(items, ID_DTYPE)
    if kind == Logprobs:
        return np.array([np.nan if item is None else item for item in items], LOGPROB_DTYPE)
    raise NotImplementedError(f"cannot decode {kind}")


class PromptIds:
    """The ids of a whole prompt, kept as the JSON list that engines accept.

    A turn adds about a hundredth to the list, so only the new part has to be encoded. The array is decoded on first use.
    """

    __slots__ = ("_array", "items", "size")

    def __init__(self, parts: Sequence[bytes], size: int) -> None:
        """`parts`: encoded by `ids_to_json`."""
        self.items = b",".join([part for part in parts if part])  # of the JSON list
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
    """A function call by the model. `arguments` is the JSON text as the model wrote it.

    `signature` is a provider's opaque token for its thinking (observe mode). The agent must send it back; the model never reads it.
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
    signature: str = msgspec.field(default="", name="seal")  # as in ToolCall, for the reasoning
    # Why a text-only model cannot read it (it holds an image, say). Only an endpoint of the message's own dialect can.
    unsupported: str = msgspec.field(default="", name="beyond")


class DeliveredTurn(msgspec.Struct, frozen=True):
    """A recorded turn that reached the agent. The agent's own transcript should contain it."""

    role: str
    conversation: str  # the agent's name for its thread, or the root of the tree
    message: Message


class Tool(msgspec.Struct, frozen=True):
    """A function that the agent offers. `wire` is OpenAI's function form, which chat templates expect."""

    name: str
    wire: Json


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling parameters. The defaults are neutral: they sample from the model's own distribution."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    top_k: Count = 0  # 0: off
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] = 1.0
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    min_tokens: Count = 0

    def biases(self) -> tuple[str, ...]:
        """Name the parameters that make the sampled distribution differ from the policy's own at this temperature."""
        neutral = NEUTRAL
        if self is neutral:
            return ()
        names = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")
        biases = [name for name in names if getattr(self, name) != getattr(neutral, name)]
        if self.temperature == 0:
            biases.append("greedy")
        return tuple(biases)


NEUTRAL = Sampling()


class Constraint(msgspec.Struct, frozen=True):
    """A shape that the output must have. `tools`: a JSON list of calls; `tool`: the arguments of one named tool."""

    kind: Literal["json_object", "json_schema", "tools", "tool"]
    schema: Json = None
    tool: str = ""


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one session may use. None: no limit."""

    turns: Count | None = None
    sampled_tokens: Count | None = None
    context_tokens: Count | None = None
    seconds: Seconds | None = None


class History(Protocol):
    """The messages of a call, as raw pieces of wire JSON that are decoded on demand.

    A raw piece may hold several messages: a wire format may put tool results and text together.
    """

    @property
    def raws(self) -> list[bytes]: ...

    @property
    def items(self) -> Sequence[bytes]:
        """The items of the wire format's own list, from which the pieces are made."""

    def decode(self, index: int) -> tuple[Message, ...]: ...

    def extend(self, items: Sequence[bytes]) -> History:
        """Build the history of a longer list, which starts with this history's items."""


class CallSignals(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """What the agent's own signals (headers, say) tell about a call: its conversation, the parent of that, and its role."""

    thread: str = ""
    parent: str = ""
    role: Literal["", "main", "subagent", "side"] = ""
    why: str = ""


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
    template_kwargs: dict[str, Json] = {}
    template_hints: dict[str, Json] = {}  # template arguments that are dropped if the template does not use them
    stream: bool = False
    include_usage: bool = False
    retried: bool = False  # the client says that it repeats a failed call
    idempotency_key: str = ""
    dialect: str = "chat"
    body: bytes = b""  # the request as received, for observe mode
    forwarded_headers: Mapping[str, str] = {}  # headers that are sent on to a provider of the same dialect
    reply_options: object = None  # what the dialect needs to encode the reply; opaque to others
    signals: CallSignals = CallSignals()


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class Delta(msgspec.Struct, frozen=True):
    """Newly sampled text. A `signature` closes the reasoning before it (observe mode)."""

    kind: Literal["content", "reasoning", "signature"]
    text: str


class CallDelta(msgspec.Struct, frozen=True):
    """A complete tool call."""

    index: int
    call: ToolCall


class KeepAlive(msgspec.Struct, frozen=True):
    """Nothing new yet, but the turn is still running."""


class Done(msgspec.Struct, frozen=True):
    """The turn is over and stored. Always the last event of a reply."""

    finish: Finish
    message: Message
    usage: Usage | None
    node: int | None = None  # the turn in the trace; None if nothing was sampled
    stopped_by: str = ""  # the stop string that ended it, if any


ReplyEvent = Delta | CallDelta | KeepAlive | Done
