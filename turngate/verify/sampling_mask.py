"""Check sampling masks: the ids that top-k, top-p and min-p left to sample from. This check is omitted for a session without masks."""

from __future__ import annotations

import numpy as np

from turngate.types import LOGPROB_TOLERANCE, RaggedArray
from turngate.verify.findings import CheckResults, VerifyCheck
from turngate.verify.side_data import StoredSideArrays
from turngate.verify.store_reader import SideFacts, StoredSession, StoredTurn

_NAME = "sampling_mask"
_TRUNCATIONS = {"top_p", "top_k", "min_p"}


def are_masks_complete(turn: StoredTurn) -> bool:
    """Return whether sampling masks describe all biases of a turn, and are recorded for all its tokens."""
    has_mask = np.zeros(len(turn.ids), bool)
    for facts in turn.info.side:
        if facts.name == _NAME:
            has_mask[max(0, facts.first) : max(0, facts.first + facts.count)] = True
    return bool(has_mask.all()) and set(turn.info.biases) <= _TRUNCATIONS


def check_sampling_masks(session: StoredSession, results: CheckResults) -> None:
    """Check that every mask belongs to a sampled token, and that the token and its log-probability match the mask."""
    listed = [(turn, facts) for turn in session.turns for facts in turn.info.side if facts.name == _NAME]
    if not listed:
        return
    stored = StoredSideArrays(session)
    with results.check(
        "structure",
        "sampling masks",
        "every sampled token is in its sampling mask, and has probability 1 if the mask has no other ids",
    ) as check:
        for turn, facts in listed:
            check.expect(
                bool(_TRUNCATIONS & set(turn.info.biases)),
                "it has sampling masks, but was sampled without top-p, top-k or min-p",
                node=turn.id,
            )
            masks = stored.read(turn, facts)
            if isinstance(masks, str):
                continue  # reported by the side data check
            if check.expect(
                isinstance(masks, RaggedArray) and facts.first >= 0,
                "its sampling masks are not lists of ids, or start before the sampled tokens",
                node=turn.id,
            ):
                assert isinstance(masks, RaggedArray)
                _check_turn(turn, facts, masks, check)


def _check_turn(turn: StoredTurn, facts: SideFacts, masks: RaggedArray, check: VerifyCheck) -> None:
    for at, kept in enumerate(masks.lists(), facts.first):
        if at >= len(turn.ids):
            return  # reported by the side data check
        token = int(turn.ids[at])
        check.expect(token in kept, f"its token {at} (id {token}) is not in its sampling mask", node=turn.id)
        unique = len(np.unique(kept)) == len(kept) and (kept >= 0).all()
        check.expect(bool(unique), f"the sampling mask of its token {at} has repeated or negative ids", node=turn.id)
        if len(kept) == 1 and turn.logprobs is not None and at < len(turn.logprobs):
            logprob = float(turn.logprobs[at])
            certain = not np.isfinite(logprob) or abs(logprob) <= LOGPROB_TOLERANCE
            check.expect(
                certain,
                f"the sampling mask of its token {at} has no other ids, but its log-probability is {logprob:.4g}, not 0",
                node=turn.id,
            )
