"""The facts that the web page compares between the rollouts of a group, such as turns, tokens, entropy and forks."""

from __future__ import annotations

from collections import Counter

import numpy as np

from turngate.trace.tree import Context, Sampled
from turngate.types import Json
from turngate.views.rollout import RolloutView


def collect_facts(rollout: RolloutView) -> dict[str, Json]:
    """Collect the facts of one rollout. The entropy is estimated from the known log-probabilities of the tokens sampled in all turns."""
    turns = [node for node in rollout.nodes if isinstance(node, Sampled)]
    known = [turn.logprobs for turn in turns if turn.logprobs is not None and len(turn.logprobs) == turn.size]
    logprobs = np.concatenate(known).astype(np.float64) if known else np.empty(0)
    logprobs = logprobs[np.isfinite(logprobs)]
    causes: Counter[str] = Counter(node.info.cause for node in rollout.nodes if node.info.cause is not None)
    fork_tokens: Counter[str] = Counter()
    for node in rollout.nodes:
        if isinstance(node, Context) and node.info.cause is not None:
            fork_tokens[node.info.cause] += node.size
    totals = rollout.totals()
    return {
        "turns": totals["turns"],
        "sampled_tokens": totals["sampled_tokens"],
        "trained_tokens": totals["trained_tokens"],
        "rows": totals["rows"],
        "exported_rows": len(rollout.exported_rows),
        "roles": totals["roles"],
        "entropy": float(-logprobs.mean()) if len(logprobs) else None,
        "entropy_tokens": len(logprobs),
        "forks": dict(causes),
        "anew": dict(fork_tokens),
        "versions": sorted({v for turn in turns for v in (turn.info.version_start, turn.info.version_end)}),
        "error": "",
    }
