"""Score every sampled token again, in its own context, and compare with the recorded log-probabilities.

This is the only check that a consistent forgery cannot pass. A forger who changes an id, a log-probability or a parent can correct every
checksum, but cannot change the model's scores for the tokens.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import orjson

from turngate.engines.scripted import derive_logprobs
from turngate.errors import EngineError, EngineUnavailable
from turngate.types import Ids, Json, Logprobs
from turngate.verify.findings import CheckResults, Replay
from turngate.verify.store_reader import DECODE_ERRORS, StoredSession, StoredTurn, path, path_ids

_MAX_TOKENS_SHOWN = 5  # differing tokens of one turn that are listed individually
TOLERANCE = 0.02  # allows for bfloat16 engines, where prefill and sampling use different kernels


class Scorer(Protocol):
    """An engine that computes the log-probabilities of tokens, given the tokens before them."""

    name: str
    any_temperature: bool  # whether it can score turns sampled at any temperature, not only at 1

    def score(self, ids: Ids, spans: Sequence[tuple[int, int]]) -> list[Logprobs]:
        """Score the tokens in each span of `ids`."""


class ScriptedScorer:
    """A scorer for the scripted engine, whose log-probabilities are derived from the ids."""

    name = "scripted"
    any_temperature = True

    def score(self, ids: Ids, spans: Sequence[tuple[int, int]]) -> list[Logprobs]:
        return [np.array(derive_logprobs(ids[:start], ids[start:end].tolist()), np.float32) for start, end in spans]


class VLLMScorer:
    """A scorer that uses the prompt log-probabilities of a vLLM server, which are those at temperature 1."""

    name = "vllm"
    any_temperature = False

    def __init__(self, url: str, model: str, *, key: str = "", timeout_s: float = 600.0) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/completions"
        self._model, self._key, self._timeout_s = model, key, timeout_s

    def score(self, ids: Ids, spans: Sequence[tuple[int, int]]) -> list[Logprobs]:
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        scored = self._request_scores(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY))
        if len(scored) != len(ids):
            raise EngineError(f"{self.name} scored {len(scored)} of {len(ids)} tokens")
        try:
            return [
                np.array([scored[n][str(ids[n])]["logprob"] for n in range(start, end)], np.float32)
                for start, end in spans
            ]
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self.name} returned no score for a token ({error!r})") from None

    def _request_scores(self, body: bytes) -> list[dict[str, dict[str, float]]]:
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, body, headers)  # noqa: S310  # the engine that the user named
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:  # noqa: S310
                found = json.load(reply)["choices"][0]["prompt_logprobs"]
        except urllib.error.HTTPError as error:
            text = error.read(500).decode("utf-8", "replace")
            raise EngineError(f"{self.name} answered {error.code}: {text}") from None
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise EngineUnavailable(f"{self.name} could not be reached at {self._url}: {error}") from None
        if not isinstance(found, list):
            raise EngineError(f"{self.name} returned no prompt log-probabilities")
        return found


def check_replay(
    session: StoredSession, scorer: Scorer, results: CheckResults, *, tolerance: float, version: int | None = None
) -> None:
    """Compare the session's log-probabilities with those of `scorer`.

    If `version` is set, score only turns of this policy version, which the engine must serve.
    """
    with results.check(
        "replay", "logprobs", "the engine assigns the recorded log-probabilities to the recorded tokens"
    ) as check:
        obstacles = {turn.id: _find_obstacle(turn, scorer, version) for turn in session.turns}
        due = {turn.id for turn in session.turns if not obstacles[turn.id]}
        if not due:
            check.skip(_most_common_reason(obstacles.values()))
            return
        differences: list[Logprobs] = []
        for leaf in sorted(session.leaves, key=lambda leaf: -leaf.length):
            mine = [turn for turn in path(leaf) if isinstance(turn, StoredTurn) and turn.id in due]
            if not mine:
                continue
            due -= {turn.id for turn in mine}
            spans = [(turn.parent.length, turn.length) for turn in mine]
            for turn, scores in zip(mine, scorer.score(path_ids(leaf), spans), strict=True):
                assert turn.logprobs is not None
                difference = np.abs(scores - turn.logprobs)
                differences.append(difference)
                far = np.flatnonzero(~(difference <= tolerance))
                excerpt = "; ".join(
                    f"token {turn.parent.length + n} was recorded as {turn.logprobs[n]:.4f}, but scored as {scores[n]:.4f}"
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


def _most_common_reason(reasons: Iterable[str]) -> str:
    """Return the most common reason why none of a session's turns can be scored."""
    counted = Counter(reasons).most_common(1)
    return f"no turn {counted[0][0]}" if counted else "nothing was sampled"


def _find_obstacle(turn: StoredTurn, scorer: Scorer, version: int | None) -> str:
    """Return the condition that a turn fails to meet, phrased to follow "no turn", or "" if the turn can be scored."""
    info, scores = turn.info, turn.logprobs
    if version is not None and not info.version_start == info.version_end == version:
        return f"has policy version {version}"
    if scores is None or info.capture != "tokens" or len(scores) != len(turn.ids) or not len(scores):
        return "has a log-probability for each of its tokens"
    if np.isnan(scores).any():
        return "has a log-probability for each of its tokens"
    if scorer.any_temperature or (not info.biases and _read_temperature(info.sampling) == 1.0):
        return ""
    return f"was sampled without bias at temperature 1, which {scorer.name} requires"


def _read_temperature(sampling: bytes) -> Json:
    try:
        return msgspec.json.decode(sampling or b"{}", type=dict[str, Json]).get("temperature", 1.0)
    except DECODE_ERRORS:
        return None  # reported by the structure checks
