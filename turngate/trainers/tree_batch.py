"""Turn trees from exports and feeds into packed batches for PyTorch, so that each prefix that rows share is computed only once.

    batch = pack_trees(list(read_trees(Path("trees.jsonl"))))                              # from an export
    batch = pack_trees(delivery.trees)                                                     # from a feed opened with form="tree"
    output = flex_attention(q, k, v, block_mask=batch.block_mask(), enable_gqa=True)                            # on a GPU
    output = scaled_dot_product_attention(q, k, v, attn_mask=batch.dense_mask(), enable_gqa=True)               # on any device
    now = log_softmax(scores[batch.previous[batch.trained]], -1)       # for each trained token, predicted from the token before it

PyTorch's FlexAttention has no backward pass on CPUs. This module imports torch only when its functions are called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from turngate.client.delivery import DeliveredTree, Row, TreeRow
from turngate.common.validation import parse_json
from turngate.errors import ConfigError
from turngate.trace.prefix_tree import PrefixTree, find_attended_until
from turngate.trace.side_data import concatenate_values
from turngate.trace.turn_advantage import spread_advantages
from turngate.trace.turn_rewards import spread_rewards
from turngate.trainers.export.base import Record
from turngate.trainers.export.tree import ExportedTree, decode_tree
from turngate.types import RaggedArray

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    from turngate.trainers.tree_attention import MaskMod


class PackedSide(msgspec.Struct, frozen=True, eq=False):
    """The side data of a batch under one name, such as `routed_experts`. Some tokens may have no value."""

    tokens: Tensor  # indices of the tokens that have a value, in ascending order
    values: Tensor  # one per token; lists of different lengths are concatenated
    sizes: Tensor | None = None  # the length of each token's list, if the lists have different lengths


class TreeBatch(msgspec.Struct, frozen=True, eq=False):
    """The tokens of one or more trees as one sequence. Each tensor except `row_tokens` and those in `side` has one value per token."""

    ids: Tensor
    positions: Tensor
    until: Tensor  # a token is attended to by the tokens from itself to this index, excluding the index itself
    previous: Tensor  # index of the token before it in its rows, from which it is predicted; -1: it starts its rows
    trained: Tensor  # bool: the loss mask
    logprobs: Tensor  # as recorded; NaN if there is none
    advantages: Tensor  # of the token's rollout; NaN for untrained tokens
    turn_advantages: Tensor  # of the token's turn; NaN for tokens without a turn advantage
    turn_rewards: Tensor  # the sum of a turn's rewards at its last token, and 0 elsewhere
    weights: Tensor  # of the row that trains the token, 1/K if the rollout has K rows; NaN for untrained tokens
    rows: Tensor  # index of the row that trains the token, in the order of the trees and their rows; -1: untrained
    row_tokens: Tensor  # number of trained tokens in each row
    side: Mapping[str, PackedSide] = {}

    @property
    def mask_mod(self) -> MaskMod:
        """The `mask_mod` for FlexAttention: whether the token `query` may attend to the token `key`."""
        from turngate.trainers.tree_attention import make_mask_mod

        return make_mask_mod(self.until)

    def block_mask(self) -> BlockMask:
        """Return the mask for `flex_attention`. It is computed from `until`, without storing a value for each pair of tokens."""
        from turngate.trainers.tree_attention import make_block_mask

        return make_block_mask(self.until)

    def dense_mask(self) -> Tensor:
        """Return the mask as a Boolean tensor (query, key), for `scaled_dot_product_attention`. For n tokens, it takes n² bytes."""
        from turngate.trainers.tree_attention import make_dense_mask

        return make_dense_mask(self.until)


def read_trees(path: Path) -> Iterator[ExportedTree]:
    """Read trees from a file that `turngate export tree` wrote. Raise `ConfigError` if the file cannot be read or has other content."""
    for place, record in _read_parquet(path) if path.suffix == ".parquet" else _read_lines(path):
        try:
            tree = decode_tree(record)
        except ConfigError as error:
            raise ConfigError(f"{path}: {place}: {error.message}", param="path") from None
        yield tree


def _read_parquet(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield each record of a Parquet file, and its place for error messages."""
    if find_spec("pyarrow") is None:
        raise ConfigError(
            f"{path}: reading a Parquet file needs pyarrow; run `pip install 'turngate[parquet]'`", param="path"
        )
    arrow = import_module("pyarrow")
    try:
        with path.open("rb") as raw, import_module("pyarrow.parquet").ParquetFile(raw) as file:
            records = (record for part in file.iter_batches() for record in part.to_pylist())
            for number, record in enumerate(records, 1):
                yield f"row {number}", record
    except OSError as error:
        raise _read_error(path, error) from None
    except (arrow.ArrowException, ValueError) as error:
        raise ConfigError(f"{path}: it cannot be read as a Parquet file: {error}", param="path") from None


def _read_lines(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield each record of a JSON Lines file, and its place for error messages."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    record = parse_json(line.decode())
                except ValueError as error:
                    reason = f"{error.msg} at column {error.colno}" if isinstance(error, JSONDecodeError) else error
                    raise ConfigError(f"{path}: line {number} cannot be read as JSON: {reason}", param="path") from None
                if not isinstance(record, dict):
                    raise ConfigError(f"{path}: line {number} is not a JSON object", param="path")
                yield f"line {number}", record
    except OSError as error:
        raise _read_error(path, error) from None


def _read_error(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read ({error.strerror or error}); pass a file that `turngate export tree` wrote",
        param="path",
    )


def pack_trees(trees: Sequence[ExportedTree | DeliveredTree], device: str = "cpu") -> TreeBatch:
    """Pack trees into one batch.

    Raise `ConfigError` if there are no trees, if one has no advantage, or if side data differs in type or shape between trees.
    """
    import torch

    if not trees:
        raise ConfigError("trees must contain at least one tree", param="trees")
    parts: list[_Columns] = []
    counts: list[int] = []  # trained tokens by row
    offset = 0
    for one in trees:
        rows = list_tree_rows(one) if isinstance(one, ExportedTree) else list(one.rows)
        parts.append(_Columns.of_tree(one.tree, rows, offset, len(counts)))
        counts += [int((parts[-1].rows == len(counts) + row).sum()) for row in range(len(rows))]
        offset += len(one.tree.ids)

    def join(name: str, dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(part, name) for part in parts]).astype(dtype)).to(device)

    return TreeBatch(
        ids=join("ids", np.int64),
        positions=join("positions", np.int64),
        until=join("until", np.int64),
        previous=join("previous", np.int64),
        trained=join("trained", np.bool_),
        logprobs=join("logprobs", np.float32),
        advantages=join("advantages", np.float32),
        turn_advantages=join("turn_advantages", np.float32),
        turn_rewards=join("turn_rewards", np.float32),
        weights=join("weights", np.float32),
        rows=join("rows", np.int64),
        row_tokens=torch.tensor(counts, device=device),
        side=_pack_side([one.tree for one in trees], device),
    )


def _pack_side(trees: Sequence[PrefixTree], device: str) -> dict[str, PackedSide]:
    import torch

    offsets = [0, *np.cumsum([len(tree.ids) for tree in trees]).tolist()]
    packed = {}
    for name in dict.fromkeys(name for tree in trees for name in tree.side):
        found = [(offset, tree.side[name]) for offset, tree in zip(offsets, trees, strict=False) if name in tree.side]
        kinds = {(column.values.dtype, column.values.shape[1:]) for _, column in found}
        if len(kinds) > 1:
            raise ConfigError(
                f"trees: the side data {name!r} must have the same type and shape in all trees of a batch; pack trees with different "
                "types or shapes separately",
                param="trees",
            )
        tokens = [offset + np.arange(*span) for offset, column in found for span in column.spans]
        values = concatenate_values([column.values for _, column in found])
        packed[name] = PackedSide(
            tokens=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *tokens])).to(device),
            values=torch.from_numpy(values.items if isinstance(values, RaggedArray) else values).to(device),
            sizes=torch.from_numpy(values.sizes).to(device) if isinstance(values, RaggedArray) else None,
        )
    return packed


class _Columns(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The fields of `TreeBatch` that have one value per token, for one tree."""

    ids: np.ndarray
    positions: np.ndarray
    until: np.ndarray
    previous: np.ndarray
    trained: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    turn_advantages: np.ndarray
    turn_rewards: np.ndarray
    weights: np.ndarray
    rows: np.ndarray

    @classmethod
    def of_tree(cls, tree: PrefixTree, rows: Sequence[TreeRow], offset: int, first: int) -> _Columns:
        """Return the columns of a tree whose first token has the index `offset` in the batch, and whose first row has the index `first`."""
        starts = [0, *(segment.end for segment in tree.segments)]
        previous = np.arange(offset - 1, offset - 1 + len(tree.ids))
        trained_in = np.full(len(tree.ids), -1, np.int64)
        for segment in tree.segments:
            parent = None if segment.parent is None else tree.segments[segment.parent]
            previous[segment.start] = -1 if parent is None else offset + parent.end - 1
            if segment.turn is not None and segment.turn.trained_in is not None:
                trained_in[segment.start : segment.end] = segment.turn.trained_in
        turn_advantages, turn_rewards = _spread_turn_values(tree, rows)
        return cls(
            ids=tree.ids,
            positions=tree.positions,
            until=offset + find_attended_until(starts, [segment.parent for segment in tree.segments]),
            previous=previous,
            trained=tree.mask,
            logprobs=tree.logprobs,
            # Untrained tokens have the index -1, which selects the NaN at the end.
            advantages=np.array([*(row.advantage for row in rows), np.nan])[trained_in],
            turn_advantages=turn_advantages,
            turn_rewards=turn_rewards,
            weights=np.array([*(row.weight for row in rows), np.nan])[trained_in],
            rows=np.where(trained_in < 0, -1, first + trained_in),
        )


def _spread_turn_values(tree: PrefixTree, rows: Sequence[TreeRow]) -> tuple[np.ndarray, np.ndarray]:
    """Return the turn advantage and the turn reward at each token of a tree."""
    advantages = np.full(len(tree.ids), np.nan, np.float32)
    rewards = np.zeros(len(tree.ids), np.float32)
    if any(row.turn_advantages or row.turn_rewards for row in rows):
        for sample, path, row in zip(tree.rebuild_rows(), tree.rows, rows, strict=True):
            parts = [tree.segments[index] for index in path.segments]
            places = np.concatenate([np.arange(part.start, part.end) for part in parts])[sample.mask]
            advantages[places] = spread_advantages(len(sample.ids), sample.spans, row.turn_advantages)[sample.mask]
            rewards[places] = spread_rewards(len(sample.ids), row.turn_rewards)[sample.mask]
    return advantages, rewards


def list_tree_rows(exported: ExportedTree) -> list[TreeRow]:
    """Return the training data of the rows of an exported tree, as feeds deliver it."""
    advantage, rows = find_advantage(exported), len(exported.tree.rows)
    return [
        TreeRow(
            rollout=0,
            weight=exported.weight,
            advantage=advantage,
            turn_rewards=turn_rewards,
            turn_advantages=turn_advantages,
        )
        for turn_rewards, turn_advantages in zip(
            exported.turn_rewards or [()] * rows, exported.turn_advantages or [()] * rows, strict=True
        )
    ]


def find_advantage(exported: ExportedTree) -> float:
    """Return the advantage of a tree's rollout. Raise `ConfigError` if it is unknown."""
    if exported.advantage is None:
        raise ConfigError(
            f"session {exported.session} has no advantage; if its reward is unknown, export with `--unscored drop`; if its group has no "
            "other reward to compare it with, export with an --advantage other than leave_one_out",
            param="advantage",
        )
    return exported.advantage


def list_rows(exported: ExportedTree) -> list[Row]:
    """Return the rows of a tree as feeds deliver them."""
    return DeliveredTree(exported.tree, tuple(list_tree_rows(exported))).rebuild_rows()
