"""Compute the log-probabilities of recorded tokens again, with the scripted engine's formula or with a vLLM server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from turngate.engines.scoring import VLLMScoring
from turngate.engines.scripted import derive_logprobs
from turngate.types import Ids, Logprobs


class Scorer(Protocol):
    """An engine that computes the log-probabilities of tokens in their context."""

    name: str
    any_temperature: bool  # whether it can score turns sampled at any temperature, not only at 1

    def score(self, ids: Ids, spans: Sequence[tuple[int, int]]) -> list[Logprobs]:
        """Return the log-probabilities of the tokens in each span of `ids`. A span is a start and an end (exclusive)."""


class ScriptedScorer:
    """Computes the log-probabilities of the scripted engine, which are derived from the ids."""

    name = "scripted"
    any_temperature = True

    def score(self, ids: Ids, spans: Sequence[tuple[int, int]]) -> list[Logprobs]:
        return [np.array(derive_logprobs(ids[:start], ids[start:end].tolist()), np.float32) for start, end in spans]


class VLLMScorer:
    """Computes log-probabilities with a vLLM server, as prompt log-probabilities at temperature 1."""

    name = "vllm"
    any_temperature = False

    def __init__(self, url: str, model: str, *, key: str = "", timeout_s: float = 600.0) -> None:
        self._engine = VLLMScoring(self.name, url, model, key=key, timeout_s=timeout_s)

    def score(self, ids: Ids, spans: Sequence[tuple[int, int]]) -> list[Logprobs]:
        return [scores.logprobs for scores in self._engine.score(ids, spans)]
