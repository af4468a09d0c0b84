"""Routed experts in the forms of verl, miles, prime-rl and NeMo-RL."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from turngate.trace.side_data import SideColumn
from turngate.trainers.routed_experts import IncompleteExperts, to_miles, to_nemo_rl, to_prime_rl, to_verl

VALUES = np.arange(4 * 6, dtype=np.uint8).reshape(4, 2, 3)
WHOLE = SideColumn(((0, 4),), VALUES)  # of a row of 5 tokens


def test_trainers_get_one_entry_for_each_input() -> None:
    assert to_verl(WHOLE, 5).tolist() == VALUES.tolist()
    assert to_verl(WHOLE, 3).tolist() == VALUES[:2].tolist(), "a row that ends earlier"
    assert to_miles(WHOLE, 5).tolist() == VALUES.tolist() and to_miles(WHOLE, 5).dtype == np.int32
    prime = to_prime_rl(WHOLE, 5)
    found = np.frombuffer(prime.data, prime.dtype).reshape(prime.shape)
    assert prime.shape == [5, 2, 3] and found[:4].tolist() == VALUES.tolist() and not found[4].any()


@pytest.mark.parametrize("spans", [((0, 3),), ((1, 5),), ((0, 2), (3, 5)), ()])
def test_incomplete_experts_are_rejected(spans: tuple[tuple[int, int], ...]) -> None:
    column = SideColumn(spans, VALUES[: sum(end - start for start, end in spans)])
    for convert in (to_verl, to_miles, to_prime_rl):
        with pytest.raises(
            IncompleteExperts, match="a trainer needs the routed experts of all 5 tokens except the last"
        ):
            convert(column, 5)


@pytest.mark.parametrize(("high", "dtype"), [(127, "int8"), (128, "int16"), (255, "int16"), (40_000, "int32")])
def test_nemo_rl_marks_missing_experts(high: int, dtype: str) -> None:
    values = np.array([[[1, 2]], [[3, high]]], np.uint16)
    name, kind, shape, data = to_nemo_rl(SideColumn(((0, 1), (2, 3)), values), 4).split(":")
    assert (name, kind, shape) == ("nrlre1", dtype, "4x1x2")
    found = np.frombuffer(base64.b64decode(data), kind).reshape(4, 1, 2)
    assert found.tolist() == [[[1, 2]], [[-1, -1]], [[3, high]], [[-1, -1]]]
