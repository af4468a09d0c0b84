"""Turn exported trees into packed batches for PyTorch, in which each prefix that rows share is computed once.

    batch = pack_trees(list(read_trees(Path("trees.jsonl"))))
    output = flex_attention(q, k, v, block_mask=batch.block_mask(), enable_gqa=True)                            # on a GPU
    output = scaled_dot_product_attention(q, k, v, attn_mask=batch.dense_mask(), enable_gqa=True)               # everywhere
    now = log_softmax(scores[batch.previous[batch.trained]], -1)       # of the trained tokens, given the token before each

PyTorch's FlexAttention has no backward pass on CPUs. Functions import torch when they are called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from turngate.client.feed import Row
from turngate.errors import ConfigError
from turngate.trace.prefix_tree import find_attended_until
from turngate.trainers.export.tree import ExportedTree, decode_tree

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class TreeBatch(msgspec.Struct, frozen=True, eq=False):
    """The tokens of one or more trees as one sequence. Each tensor except `row_tokens` has one value per token."""

    ids: Tensor
    positions: Tensor
    until: Tensor  # a token is attended to by the tokens from itself to this index, excluding the index itself
    previous: Tensor  # index of the token before it in its rows, from which it is predicted; -1: it starts its rows
    trained: Tensor  # bool: the loss mask
    logprobs: Tensor  # as recorded; NaN if there is none
    advantages: Tensor  # of the token's rollout
    weights: Tensor  # 1/K if the token's rollout has K rows
    rows: Tensor  # index of the row that trains it, in the order of the trees and their rows; -1: none does
    row_tokens: Tensor  # by row: the number of trained tokens

    @property
    def mask_mod(self) -> MaskMod:
        """The `mask_mod` for FlexAttention: whether the token `query` may attend to the token `key`."""
        until = self.until

        def may_attend(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < until[key])

        return may_attend

    def block_mask(self) -> BlockMask:
        """Return the mask for `flex_attention`."""
        from torch.nn.attention.flex_attention import create_block_mask

        size = len(self.ids)
        return create_block_mask(self.mask_mod, None, None, size, size, device=str(self.ids.device))

    def dense_mask(self) -> Tensor:
        """Return the mask as (token, token), for `scaled_dot_product_attention`. For n tokens, it takes n² bytes."""
        import torch

        place = torch.arange(len(self.ids), device=self.ids.device)
        return self.mask_mod(place, place, place[:, None], place[None, :])


def read_trees(path: Path) -> Iterator[ExportedTree]:
    """Read the trees of a file that `turngate export tree` wrote."""
    if path.suffix == ".parquet":
        if find_spec("pyarrow") is None:
            raise ConfigError(
                f"path: {path}: reading a Parquet file needs pyarrow; run pip install 'turngate[parquet]'", param="path"
            )
        with import_module("pyarrow.parquet").ParquetFile(path) as file:
            for part in file.iter_batches():
                yield from map(decode_tree, part.to_pylist())
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}: line {number} is not JSON: {error}", param="path") from None
            if not isinstance(record, dict):
                raise ConfigError(f"{path}: line {number} is not a JSON object", param="path")
            yield decode_tree(record)


def pack_trees(trees: Sequence[ExportedTree], device: str = "cpu") -> TreeBatch:
    """Pack trees into one batch. Raise `ConfigError` if a tree has no advantage."""
    import torch

    if not trees:
        raise ConfigError("trees must contain at least one tree", param="trees")
    sizes = [len(exported.tree.ids) for exported in trees]
    offsets = [0, *np.cumsum(sizes).tolist()]
    previous: list[np.ndarray] = []
    until: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    counts: list[int] = []  # trained tokens by row
    for exported, offset in zip(trees, offsets, strict=False):
        tree, first = exported.tree, len(counts)
        starts = [0, *(segment.end for segment in tree.segments)]
        before = np.arange(offset - 1, offset - 1 + len(tree.ids))
        trained_in = np.full(len(tree.ids), -1, np.int64)
        for segment in tree.segments:
            parent = None if segment.parent is None else tree.segments[segment.parent]
            before[segment.start] = -1 if parent is None else offset + parent.end - 1
            if segment.turn is not None and segment.turn.trained_in is not None:
                trained_in[segment.start : segment.end] = first + segment.turn.trained_in
        previous.append(before)
        until.append(offset + find_attended_until(starts, [segment.parent for segment in tree.segments]))
        rows.append(trained_in)
        counts += [int((trained_in == first + row).sum()) for row in range(len(tree.rows))]

    def to_tensor(arrays: Sequence[np.ndarray], dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(dtype)).to(device)

    return TreeBatch(
        ids=to_tensor([exported.tree.ids for exported in trees], np.int64),
        positions=to_tensor([exported.tree.positions for exported in trees], np.int64),
        until=to_tensor(until, np.int64),
        previous=to_tensor(previous, np.int64),
        trained=to_tensor([exported.tree.mask for exported in trees], np.bool_),
        logprobs=to_tensor([exported.tree.logprobs for exported in trees], np.float32),
        advantages=to_tensor(
            [np.repeat([find_advantage(exported)], len(exported.tree.ids)) for exported in trees], np.float32
        ),
        weights=to_tensor([np.repeat([exported.weight], len(exported.tree.ids)) for exported in trees], np.float32),
        rows=to_tensor(rows, np.int64),
        row_tokens=to_tensor([np.array(counts)], np.int64),
    )


def find_advantage(exported: ExportedTree) -> float:
    """Return the advantage of a tree's rollout. Raise `ConfigError` if it is unknown."""
    if exported.advantage is None:
        raise ConfigError(
            f"session {exported.session} has no advantage, because its reward is unknown or it is alone in its group; export with "
            "--unscored drop, or with another --advantage",
            param="advantage",
        )
    return exported.advantage


def list_rows(exported: ExportedTree) -> list[Row]:
    """Return the rows of a tree in the form in which feeds deliver rows."""
    advantage = find_advantage(exported)
    return [
        Row(
            ids=row.ids,
            mask=row.mask,
            logprobs=row.logprobs,
            spans=row.spans,
            branch=row.branch,
            weight=exported.weight,
            advantage=advantage,
            side=row.side,
        )
        for row in exported.tree.rebuild_rows()
    ]
