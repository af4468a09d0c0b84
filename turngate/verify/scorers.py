"""Compute the log-probabilities of recorded tokens again, with the scripted engine's formula or with a vLLM server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import orjson

from turngate.engines.scripted import derive_logprobs
from turngate.errors import EngineError, EngineUnavailable
from turngate.types import Ids, Logprobs


class Scorer(Protocol):
    """An engine that computes the log-probabilities of tokens in their context."""

    name: str
    any_temperature: bool  # whether it can score turns sampled at any temperature, not only at 1

    def score(self, ids: Ids, spans: Sequence[tuple[int, int]]) -> list[Logprobs]:
        """Return the log-probabilities of the tokens in each span of `ids`. A span is a start and an end."""


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
