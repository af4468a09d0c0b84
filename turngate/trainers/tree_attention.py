"""Attention over packed trees: which tokens may attend to which, as one range per token. Needs torch.

The tokens of a tree are in depth-first order. Therefore, a token is attended to by the tokens from itself to the end of its segment's
subtree (`until`), and by no others. For n tokens, FlexAttention needs only these n ends, but a dense mask needs n² bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_BLOCK = 128  # tokens in a block, as in `create_block_mask`


def make_mask_mod(until: Tensor) -> MaskMod:
    """Return the `mask_mod` for FlexAttention: a function that says whether the token `query` may attend to the token `key`."""

    def may_attend(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < until[key])

    return may_attend


def make_dense_mask(until: Tensor) -> Tensor:
    """Return the mask as a Boolean tensor (query, key), for `scaled_dot_product_attention`."""
    place = torch.arange(len(until), device=until.device)
    return make_mask_mod(until)(place, place, place[:, None], place[None, :])


def make_block_mask(until: Tensor) -> BlockMask:
    """Return the mask for `flex_attention`. It is computed from the ranges of whole blocks, without a value for each pair of tokens."""
    size = len(until)
    blocks = -(-size // _BLOCK)
    # No token attends to the padding after the last token.
    by_block = F.pad(until, (0, blocks * _BLOCK - size)).view(blocks, _BLOCK)
    query = torch.arange(blocks, device=until.device)[:, None]
    key = torch.arange(blocks, device=until.device)[None, :]
    # Every range starts in the block of its token, so the blocks that attend to some token of a block are also one range.
    some = (key <= query) & (query * _BLOCK < by_block.amax(1))
    every = (key < query) & ((query + 1) * _BLOCK <= by_block.amin(1))
    return BlockMask.from_kv_blocks(
        *_list_blocks(some & ~every),
        *_list_blocks(every),
        BLOCK_SIZE=_BLOCK,
        mask_mod=make_mask_mod(until),
        seq_lengths=(size, size),
    )


def _list_blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each block of queries, the number of chosen blocks of keys and the indices of all blocks, with the chosen ones first."""
    indices = (~chosen).to(torch.int32).argsort(dim=1, stable=True).to(torch.int32)
    return chosen.sum(1, dtype=torch.int32)[None, None], indices[None, None]
