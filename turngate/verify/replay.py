"""Score sampled tokens again in their context, and compare the scores with the recorded log-probabilities.

Only this check can detect a consistent forgery. A forger who changes an id, a log-probability or a parent can correct every checksum, but
then the model's scores of the tokens no longer match the recorded log-probabilities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np

from turngate.types import Json, Logprobs
from turngate.verify.findings import CheckResults, Replay
from turngate.verify.scorers import Scorer
from turngate.verify.store_reader import DECODE_ERRORS, StoredSession, StoredTurn, path, path_ids

_MAX_TOKENS_SHOWN = 5  # differing tokens of one turn that are listed individually
TOLERANCE = 0.02  # allows for bfloat16 engines, where prefill and sampling use different kernels


def check_replay(
    session: StoredSession, scorer: Scorer, results: CheckResults, *, tolerance: float, version: int | None = None
) -> None:
    """Compare the session's log-probabilities with those that `scorer` computes.

    If `version` is set, score only turns of this policy version. The engine must be serving that version.
    """
    with results.check(
        "replay", "logprobs", "the engine assigns the recorded log-probabilities to the recorded tokens"
    ) as check:
        obstacles = {turn.id: _find_obstacle(turn, scorer, version) for turn in session.turns}
        due = {turn.id for turn in session.turns if not obstacles[turn.id]}
        if not due:
            check.skip(_explain_skip(obstacles.values()))
            return
        differences: list[Logprobs] = []
        for leaf in sorted(session.leaves, key=lambda leaf: -leaf.length):
            mine = [turn for turn in path(leaf) if isinstance(turn, StoredTurn) and turn.id in due]
            if not mine:
                continue
            due -= {turn.id for turn in mine}
            spans = [(turn.parent.length, turn.length) for turn in mine]
            for turn, scores in zip(mine, scorer.score(path_ids(mine[-1]), spans), strict=True):
                assert turn.logprobs is not None
                difference = np.abs(scores - turn.logprobs)
                differences.append(difference)
                far = np.flatnonzero(~(difference <= tolerance))
                excerpt = "; ".join(
                    f"the log-probability of token {turn.parent.length + n} is recorded as {turn.logprobs[n]:.4f}, but the engine "
                    f"computes {scores[n]:.4f}"
                    for n in far[:_MAX_TOKENS_SHOWN].tolist()
                )
                more = f" and {len(far) - _MAX_TOKENS_SHOWN} more" if len(far) > _MAX_TOKENS_SHOWN else ""
                check.expect(not len(far), excerpt + more, node=turn.id)
        every = np.concatenate(differences) if differences else np.zeros(0, np.float32)
        results.replay = Replay(
            engine=scorer.name,
            tolerance=tolerance,
            turns=len(differences),
            tokens=len(every),
            largest=float(np.max(every)) if len(every) else 0.0,
            mean=float(np.mean(every)) if len(every) else 0.0,
            outliers=int(np.sum(~(every <= tolerance))),
        )
        if len(every) and float(np.median(every)) > tolerance:
            results.note("logprobs", "most tokens differ; check that the engine has the weights that sampled them")


def _explain_skip(unmet: Iterable[str]) -> str:
    """Return why no turn of a session can be scored. `unmet` contains, for each turn, the condition that it does not meet."""
    conditions = [condition for condition, _ in Counter(unmet).most_common()]
    return f"no turn {' and '.join(conditions)}" if conditions else "nothing was sampled"


def _find_obstacle(turn: StoredTurn, scorer: Scorer, version: int | None) -> str:
    """Return the condition that a turn does not meet, as a phrase that follows "no turn", or "" if the turn can be scored."""
    info, scores = turn.info, turn.logprobs
    if version is not None and not info.version_start == info.version_end == version:
        return f"has policy version {version}"
    if scores is None or info.capture != "tokens" or len(scores) != len(turn.ids) or not len(scores):
        return "has a log-probability for each of its tokens"
    if np.isnan(scores).any():
        return "has a log-probability for each of its tokens"
    if (path_ids(turn) < 0).any():
        return "has only non-negative ids on its path"
    if scorer.any_temperature or (not info.biases and read_temperature(info.sampling) == 1.0):
        return ""
    return f"was sampled without bias at temperature 1, which {scorer.name} requires"


def read_temperature(sampling: bytes) -> Json:
    """Return the temperature in a turn's recorded sampling parameters (1.0 if they contain none), or None if they cannot be read."""
    try:
        return msgspec.json.decode(sampling or b"{}", type=dict[str, Json]).get("temperature", 1.0)
    except DECODE_ERRORS:
        return None  # reported by the structure checks
