"""Side data in the store, on both databases: pieces, damage, crashes and removal."""

from __future__ import annotations

import numpy as np
import pytest

from tests.store.kit import add_session, turn_with
from turngate.errors import StoreError
from turngate.store import side_data
from turngate.store.side_data import split_array
from turngate.store.store import Store
from turngate.types import SideArray

EXPERTS = SideArray("routed_experts", -3, np.arange(4 * 6, dtype=np.uint16).reshape(4, 2, 3))
SCORES = SideArray("scores", 0, np.array([0.5, -1.5], np.float32))


def load(store: Store, name: str = "a", names: tuple[str, ...] | None = None) -> dict[int, list[SideArray]]:
    row = store.find(name)
    assert row is not None
    return store.side_data.load(store.load(row), names)


def count(store: Store) -> int:
    with store._reading() as db:
        return int(db.execute("SELECT count(*) FROM side_data").fetchone()[0])


def same(one: SideArray, other: SideArray) -> bool:
    kinds = one.values.dtype.name, one.values.shape, other.values.dtype.name, other.values.shape
    return (
        (one.name, one.first) == (other.name, other.first)
        and kinds[:2] == kinds[2:]
        and (one.values == other.values).all()
    )


def test_side_data_round_trips(store: Store) -> None:
    key = add_session(store, "a")
    store.commit([turn_with(key, 0, EXPERTS, SCORES), turn_with(key, 1), turn_with(key, 2, SCORES)])
    found = load(store)
    assert sorted(found) == [2, 6] and same(found[2][0], EXPERTS) and same(found[2][1], SCORES)
    assert [array.name for arrays in load(store, names=("scores",)).values() for array in arrays] == [
        "scores",
        "scores",
    ]
    assert load(store, names=("other",)) == {} == load(store, names=())


def test_large_array_is_written_in_pieces(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_data, "PIECE_BYTES", 30)
    key = add_session(store, "a")
    store.commit([turn_with(key, 0, EXPERTS)])
    assert count(store) == 2
    assert same(load(store)[2][0], EXPERTS)


@pytest.mark.parametrize(("size", "pieces"), [(1, 4), (12, 4), (24, 2), (35, 2), (48, 1), (1000, 1)])
def test_pieces_have_whole_values(size: int, pieces: int) -> None:
    split = list(split_array(EXPERTS, size))
    assert len(split) == pieces
    assert np.concatenate([piece.values for piece in split]).tolist() == EXPERTS.values.tolist()
    assert [piece.first for piece in split] == [-3 + n * 4 // pieces for n in range(pieces)]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE side_data SET data=CAST('damaged!' AS BLOB) WHERE name='routed_experts' AND 1=?",
        "UPDATE side_data SET checksum=checksum+? WHERE name='routed_experts'",
        "UPDATE side_data SET first=first+? WHERE name='routed_experts'",
        "UPDATE side_data SET dtype='int32' WHERE name='routed_experts' AND 1=?",
        "UPDATE side_data SET shape='3x2' WHERE name='routed_experts' AND 1=?",
        "DELETE FROM side_data WHERE name='routed_experts' AND 1=?",
    ],
)
def test_damaged_side_data_is_refused(store: Store, damage: str) -> None:
    key = add_session(store, "a")
    store.commit([turn_with(key, 0, EXPERTS, SCORES)])
    with store._writing() as db:
        assert db.execute(damage, (1,)).rowcount == 1
    with pytest.raises(StoreError, match="session a: the side data routed_experts of node 2 is damaged on disk"):
        load(store)
    assert len(load(store, names=("scores",))[2]) == 1, "the rest can be used"
    assert len(store.load(store.find("a")).trace.nodes) == 2


def test_side_data_of_a_turn_that_was_not_written_is_ignored_and_replaced(store: Store) -> None:
    key = add_session(store, "a")
    store.side_data.write(key, 2, [EXPERTS, SCORES])  # the gateway was killed before it wrote the turn
    store.commit([turn_with(key, 1)])
    assert load(store) == {}
    store.commit([turn_with(key, 0, SCORES)])
    assert [array.name for array in load(store)[2]] == ["scores"] and count(store) == 1


def test_side_data_is_deleted_with_its_session(store: Store) -> None:
    for name in "ab":
        store.commit([turn_with(add_session(store, name), 0, EXPERTS)])
    row = store.find("a")
    assert row is not None
    store.delete_session(row.key)
    assert count(store) == 1 and same(load(store, "b")[2][0], EXPERTS)
    store.side_data.write(row.key, 2, [EXPERTS])
    assert count(store) == 1, "the session is gone"
