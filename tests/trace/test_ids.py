"""Test token ids of trace nodes, as arrays and as JSON fragments of a prompt."""

from __future__ import annotations

import json

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turngate.trace.tree import Context, ContextInfo, Sampled, SampledInfo, path_ids, prompt_ids
from turngate.types import ID_DTYPE, NO_IDS, Ids, Logprobs, PromptIds, decode_array, ids_from_json, ids_to_json

_CONTEXT = ContextInfo(b"", b"", "", False)
_SAMPLED = SampledInfo(b"", b"", b"", "stop", 0, 0, 0.0, 0.0)
_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)


def _array(ids: list[int]) -> np.ndarray:
    return np.array(ids, ID_DTYPE)


@given(st.lists(st.tuples(_IDS, _IDS), max_size=5), _IDS)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_prompt_ids_are_path_ids_plus_added_ids(turns: list[tuple[list[int], list[int]]], added: list[int]) -> None:
    node: Sampled | None = None
    expected: list[int] = []
    for n, (said, sampled) in enumerate(turns):
        node = Sampled(2 * n + 2, Context(2 * n + 1, node, _array(said), _CONTEXT), _array(sampled), None, _SAMPLED)
        expected += said + sampled
        prompt = prompt_ids(node, _array(added))  # now the node keeps its ids as JSON
        assert json.loads(prompt.json) == prompt.tolist() == expected + added
        assert len(prompt) == len(expected) + len(added)
    again = prompt_ids(node, _array(added))
    assert np.array_equal(again, _array(expected + added))
    assert again.tobytes() == _array(expected + added).tobytes()
    assert path_ids(node).tolist() == expected
    assert path_ids(node).dtype == ID_DTYPE
    if node is not None:
        assert (node.ids.tolist(), node.size) == (turns[-1][1], len(turns[-1][1]))


def test_ids_survive_conversion_to_json() -> None:
    ids = _array([0, 1, 151_643, 2**31 - 1])
    node = Context(1, None, ids, _CONTEXT)
    assert node.ids is ids
    assert node.json == b"0,1,151643,2147483647"
    assert node.ids.tolist() == ids.tolist() and node.ids.dtype == ID_DTYPE and node.size == 4


def test_empty_ids() -> None:
    assert ids_to_json(NO_IDS) == b""
    assert ids_from_json(b"").tolist() == []
    prompt = PromptIds([b"", b"1,2", b""], 2)
    assert (prompt.json, len(prompt), prompt[1:].tolist()) == (b"[1,2]", 2, [2])


def test_ids_of_read_only_and_strided_arrays() -> None:
    """Arrays may be read-only (from the store) or not contiguous (a slice)."""
    assert ids_to_json(np.frombuffer(_array([7, 8]).tobytes(), ID_DTYPE)) == b"7,8"
    assert ids_to_json(_array([1, 2, 3, 4])[::2]) == b"1,3"


def test_arrays_are_decoded_whether_or_not_numpy_defines_their_type_as_an_alias() -> None:
    for dtype in (np.int32, np.float32):
        decoded = decode_array(np.ndarray[tuple[int, ...], np.dtype[dtype]], [1, 2])
        assert decoded.dtype == dtype and decoded.tolist() == [1, 2]
    assert msgspec.json.decode(b"[1,2]", type=Ids, dec_hook=decode_array).dtype == ID_DTYPE
    assert np.isnan(msgspec.json.decode(b"[null]", type=Logprobs, dec_hook=decode_array)).all()
