"""Pack rows into one sequence, in which shared prefixes occur once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from turngate.client.delivery import Row
from turngate.trace.prefix_tree import PrefixLayout, find_shared_prefixes, lay_out_paths


class PackedRows(msgspec.Struct, frozen=True):
    """Rows packed into one sequence, in which shared prefixes occur once.

    `pack_rows` shares only the prefix that all rows have in common, and `pack_tree` each prefix that at least two rows have in common.
    """

    ids: np.ndarray
    positions: np.ndarray
    until: np.ndarray  # a token is attended to by the tokens from itself to this index, excluding the index itself
    at: np.ndarray  # indices of the tokens whose scores predict the trained tokens


def pack_rows(rows: Sequence[Row]) -> PackedRows:
    """Pack rows: first the prefix that all rows share, then the remaining tokens of each row."""
    shared = count_shared_prefix(rows)
    lengths = [row.ids.size - shared for row in rows]
    ends = shared + np.cumsum(lengths)
    return PackedRows(
        ids=np.concatenate([rows[0].ids[:shared], *(row.ids[shared:] for row in rows)]).astype(np.int64),
        positions=np.concatenate([np.arange(shared), *(np.arange(shared, row.ids.size) for row in rows)]),
        until=np.repeat(np.array([ends[-1], *ends]), [shared, *lengths]),
        at=np.concatenate(
            [np.flatnonzero(row.mask) + end - row.ids.size - 1 for row, end in zip(rows, ends, strict=True)]
        ),
    )


def pack_tree(rows: Sequence[Row]) -> PackedRows:
    """Pack rows as a tree, in which each prefix that two or more rows share occurs once."""
    layout = _find_layout(rows)
    return PackedRows(
        ids=layout.pack([row.ids for row in rows]).astype(np.int64),
        positions=layout.positions(),
        until=layout.until(),
        at=np.concatenate([layout.places(n)[np.flatnonzero(row.mask) - 1] for n, row in enumerate(rows)]),
    )


def _find_layout(rows: Sequence[Row]) -> PrefixLayout:
    """Return the layout of the delivered trees. If any row was not delivered in a tree, find the shared prefixes of all rows instead."""
    paths = [row.path for row in rows if row.path is not None]
    if len(paths) == len(rows):
        return lay_out_paths(paths)
    # Equal ids suffice here, even in different turns: the recorded log-probabilities are taken from the rows.
    return find_shared_prefixes([[row.ids] for row in rows])


def count_shared_prefix(rows: Sequence[Row]) -> int:
    """Return the length of the prefix that all rows share.

    The prefix ends before the first position, in any row, that predicts a trained token. Each row therefore has its own copy of that
    position.
    """
    most = min(int(row.mask.argmax()) for row in rows) - 1
    differs = np.zeros(max(0, most), np.bool_)
    for row in rows[1:]:
        differs |= row.ids[: differs.size] != rows[0].ids[: differs.size]
    return int(differs.argmax()) if differs.any() else differs.size


def count_packed_tokens(rows: Sequence[Row], *, tree: bool = False) -> int:
    """Return the number of tokens in `pack_rows(rows)`, or in `pack_tree(rows)` if `tree` is set."""
    if tree:
        return _find_layout(rows).starts[-1]
    shared = count_shared_prefix(rows)
    return shared + sum(row.ids.size - shared for row in rows)


def split_batches(rows: Sequence[Row], tokens: int, *, tree: bool = False) -> Iterator[list[Row]]:
    """Split rows into batches of at most `tokens` packed tokens. A longer row gets its own batch."""
    batch: list[Row] = []
    for row in rows:
        more = [*batch, row]
        if batch and count_packed_tokens(more, tree=tree) > tokens:
            yield batch
            more = [row]
        batch = more
    if batch:
        yield batch
