"""Convert the routed experts of a row to the formats that trainers accept for router replay.

The last token of a row was never an input of the engine. It has no experts and needs none, because nothing is predicted from it. If any
other token has none, `to_verl`, `to_miles` and `to_prime_rl` raise `IncompleteExperts`. `to_nemo_rl` accepts such rows, because NeMo-RL's
format can mark experts as missing.

    column = row.side["routed_experts"]                                        # from a feed with side=("routed_experts",)
    AgentLoopOutput(…, routed_experts=to_verl(column, len(row.ids)))
"""

from __future__ import annotations

import base64

import msgspec
import numpy as np

from turngate.trace.side_data import SideColumn

_NEMO_RL_VERSION = "nrlre1"
_NEMO_RL_MISSING = -1  # NeMo-RL routes such a token with the trainer's own router


class IncompleteExperts(ValueError):
    """A token that needs routed experts has none."""


class PrimeRlExperts(msgspec.Struct, frozen=True):
    """The fields of prime-rl's `RoutedExperts`."""

    data: bytes
    shape: list[int]  # tokens, layers, experts per token
    dtype: str


def to_verl(column: SideColumn, tokens: int) -> np.ndarray:
    """Return `AgentLoopOutput.routed_experts`: one entry for each token of the prompt and the response, except the last token."""
    if not has_all_experts(column, tokens):
        raise IncompleteExperts(
            f"a trainer needs the routed experts of all {tokens} tokens except the last, but they were recorded only for these spans: "
            f"{column.spans or 'none'}; skip this row, or train on it without router replay"
        )
    return _get_array(column.cut(0, tokens - 1))


def to_miles(column: SideColumn, tokens: int) -> np.ndarray:
    """Return `Sample.rollout_routed_experts` for slime and miles, as `int32`."""
    return to_verl(column, tokens).astype(np.int32)


def to_prime_rl(column: SideColumn, tokens: int) -> PrimeRlExperts:
    """Return `TrainingSample.routed_experts`. As in prime-rl's own code, the last token also has an entry, filled with zeros."""
    values = to_verl(column, tokens)
    whole = np.concatenate([values, np.zeros_like(values[:1])])
    return PrimeRlExperts(whole.tobytes(), list(whole.shape), whole.dtype.name)


def to_nemo_rl(column: SideColumn, tokens: int) -> str:
    """Return the `routed_experts` of a NeMo-RL output item: a string for `decode_routed_experts`, with -1 for missing experts."""
    high = int(_get_array(column).max(initial=0))
    dtype = "int8" if high < 2**7 else "int16" if high < 2**15 else "int32"
    whole = column.fill(tokens, _NEMO_RL_MISSING, dtype)
    shape = "x".join(map(str, whole.shape))
    return f"{_NEMO_RL_VERSION}:{dtype}:{shape}:{base64.b64encode(whole.tobytes()).decode()}"


def has_all_experts(column: SideColumn, tokens: int) -> bool:
    """Return whether the first `tokens` - 1 tokens of a row all have routed experts."""
    return tokens < 2 or column.cut(0, tokens - 1).spans == ((0, tokens - 1),)


def _get_array(column: SideColumn) -> np.ndarray:
    assert isinstance(column.values, np.ndarray), "every token has the same number of experts"
    return column.values
