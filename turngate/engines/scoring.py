"""Requests to engines that score given token ids, for teachers.

An engine returns each token's log-probability in its context, and the most likely tokens at its position. The methods are blocking. To send
several requests to a server at the same time, use several threads. Scores are those of the model's unmodified distribution, at temperature
1. `local/scoring.py` scores with a model in this process.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import orjson

from turngate.engines.http import DECODE_ERRORS, NO_LOGPROB, error_from_status, extract_message
from turngate.errors import EngineError, EngineTimeout, EngineUnavailable, TurngateError
from turngate.types import ID_DTYPE, LOGPROB_DTYPE, Ids, Logprobs, TokenId

T = TypeVar("T")
Span = tuple[int, int]  # start and end; the end is not included
TOLERANCE = 1e-3  # rounding may make a log-probability slightly greater than 0


class TokenScores(msgspec.Struct, frozen=True, eq=False):
    """The scores of consecutive tokens. If they were requested with `top_k=0`, `top_ids` and `top_logprobs` have no columns."""

    logprobs: Logprobs
    top_ids: Ids  # tokens × k: the most likely tokens in the same context, most likely first
    top_logprobs: Logprobs  # tokens × k


class InvalidScores(EngineError):
    """An engine returned unusable scores or a reply that cannot be decoded.

    For example, scores are missing or not finite, or belong to tokens that were not sent.
    """

    kind = "invalid_scores"


class ScoringEngine(Protocol):
    """An engine that scores token ids. Implementations raise only `EngineError`s and `ContextOverflow`."""

    name: str

    def score(self, ids: Ids, spans: Sequence[Span], top_k: int = 0) -> list[TokenScores]:
        """Return the scores of the tokens in each span of `ids`, in the order of the spans. The scores have passed `check_scores`."""

    def find_model(self) -> str:
        """Return the name of the model that computes the scores. Raise an error if the engine does not serve the requested model."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids with the model's tokenizer. Special tokens are included."""


def check_scores(engine: str, spans: Sequence[Span], scores: Sequence[TokenScores], top_k: int) -> None:
    """Raise `InvalidScores` if scores are missing, not finite, greater than 0 or contradictory."""
    for (start, end), found in zip(spans, scores, strict=True):
        where = f"{engine}: the tokens at positions {start} to {end - 1}"
        at = f"{engine}: at positions {start} to {end - 1}"
        if found.logprobs.shape != (end - start,):
            raise InvalidScores(
                f"{where} have the wrong number of log-probabilities: {len(found.logprobs)} instead of {end - start}"
            )
        shapes = {found.top_ids.shape, found.top_logprobs.shape}
        if shapes != {(end - start, top_k)}:
            raise InvalidScores(f"{where} have the wrong number of top tokens: each must have {top_k}")
        for name, values in (
            ("a log-probability", found.logprobs),
            ("the log-probability of one of the most likely tokens", found.top_logprobs),
        ):
            if not np.isfinite(values).all() or (values <= NO_LOGPROB).any():
                raise InvalidScores(f"{at}, {name} is missing or not finite")
            if (values > TOLERANCE).any():
                raise InvalidScores(f"{at}, {name} is greater than 0")
        if (found.top_ids < 0).any():
            raise InvalidScores(f"{at}, one of the most likely tokens has a negative id")
        ordered = np.column_stack([found.top_logprobs, found.logprobs]) if top_k else found.logprobs[:, None]
        best = ordered.max(axis=1, initial=-np.inf)
        if top_k and (np.diff(found.top_logprobs, axis=1) > TOLERANCE).any():
            raise InvalidScores(f"{at}, the most likely tokens are not sorted by probability")
        if top_k and (best > found.top_logprobs[:, 0] + TOLERANCE).any():
            raise InvalidScores(
                f"{where} include a token that is more likely than the tokens listed as most likely at its position"
            )


class _Candidate(msgspec.Struct):
    """The log-probability and rank of one token that vLLM lists at one position of a prompt."""

    logprob: float
    rank: int | None = None


class _ScoredChoice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _Candidate] | None] | None = None


class _Completion(msgspec.Struct):
    choices: tuple[_ScoredChoice, ...]


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


class _Text(msgspec.Struct):
    prompt: str | None = None  # vLLM
    text: str | None = None  # SGLang


class _ScoredToken(NamedTuple):
    """A token in SGLang's log-probabilities. The first token of a prompt has no log-probability."""

    logprob: float | None
    token_id: TokenId
    text: str | None = None


class _ScoredPrompt(msgspec.Struct):
    input_token_logprobs: list[_ScoredToken] | None = None
    input_top_logprobs: list[list[_ScoredToken] | None] | None = None


class _Generated(msgspec.Struct):
    meta_info: _ScoredPrompt


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    """Treats redirects as errors. Following one could send the API key to another server."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class _ScoringServer:
    """The base class of servers that score over HTTP."""

    def __init__(self, name: str, url: str, model: str, *, key: str = "", timeout_s: float = 600.0) -> None:
        self.name = name
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model, self._key, self._timeout_s = model, key, timeout_s
        self._opener = urllib.request.build_opener(_RefuseRedirects)

    def find_model(self) -> str:
        served = [card.id for card in self._request("/v1/models", _Models).data]
        if not served or (self._model and self._model not in served):
            problem = "serves no models"
            if self._model:
                problem = f"does not serve the model {self._model!r}; it serves: {', '.join(served) or 'none'}"
            raise EngineError(f"{self.name} at {self._url} {problem}")
        self._model = self._model or served[0]
        return self._model

    def decode(self, ids: Sequence[int]) -> str:
        body = {"model": self._model, "tokens": list(ids), "skip_special_tokens": False}
        reply = self._request("/detokenize", _Text, body)
        return reply.prompt if reply.prompt is not None else reply.text or ""

    def _request(self, path: str, shape: type[T], body: Mapping[str, Any] | None = None) -> T:
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            request = urllib.request.Request(self._url + path, data, headers)  # noqa: S310  # the engine that the user named
            status, answer = self._send(request)
        except TimeoutError:
            raise EngineTimeout(f"timed out waiting for {self.name} at {self._url}") from None
        except (OSError, ValueError, http.client.InvalidURL) as error:
            raise EngineUnavailable(f"the request to {self.name} at {self._url} failed: {error}") from None
        except http.client.HTTPException as error:
            raise EngineUnavailable(
                f"{self.name} at {self._url} sent an incomplete or invalid HTTP response: {error!r:.200}"
            ) from None
        if status >= 300:
            raise self._make_error(status, answer)
        try:
            return msgspec.json.decode(answer, type=shape)
        except DECODE_ERRORS as error:
            raise InvalidScores(f"{self.name} sent a reply that cannot be read: {error}") from None

    def _send(self, request: urllib.request.Request) -> tuple[int, bytes]:
        """Return the status and the body of the response. The body of an error is cut to 2000 bytes."""
        try:
            with self._opener.open(request, timeout=self._timeout_s) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(2000)

    def _make_error(self, status: int, body: bytes) -> TurngateError:
        if status == 401:
            problem = (
                "rejected the API key; check it"
                if self._key
                else "requires an API key; for a teacher, set TURNGATE_TEACHER_KEY; for `turngate verify`, pass --engine-key-env"
            )
            return EngineError(f"{self.name} at {self._url} {problem}")
        if 300 <= status < 400:
            return EngineError(
                f"{self.name} at {self._url} answered with a redirect ({status}), which is not followed; "
                "use the server's own URL"
            )
        message = f"status {status}: {extract_message(body)[:500]}"
        return error_from_status(self.name, status, message, body.decode("utf-8", "replace"))


class VLLMScoring(_ScoringServer):
    """A vLLM server, which scores a prompt with `prompt_logprobs`. The server's `--max-logprobs` setting limits `top_k`."""

    def score(self, ids: Ids, spans: Sequence[Span], top_k: int = 0) -> list[TokenScores]:
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top_k}
        reply = self._request("/v1/completions", _Completion, body)
        scored = reply.choices[0].prompt_logprobs if reply.choices else None
        if scored is None:
            raise InvalidScores(f"{self.name} returned no prompt log-probabilities")
        if len(scored) != len(ids):
            raise InvalidScores(f"{self.name} returned the wrong number of scores: {len(scored)} instead of {len(ids)}")
        found = [self._read_span(ids, scored, span, top_k) for span in spans]
        check_scores(self.name, spans, found, top_k)
        return found

    def _read_span(
        self, ids: Ids, scored: Sequence[Mapping[int, _Candidate] | None], span: Span, top_k: int
    ) -> TokenScores:
        logprobs, tops = [], []
        for place in range(*span):
            candidates = scored[place]
            own = None if candidates is None else candidates.get(int(ids[place]))
            if candidates is None or own is None:
                raise InvalidScores(
                    f"{self.name} returned no score for the token at position {place} (id {ids[place]})"
                )
            logprobs.append(own.logprob)
            # The token itself is also listed if it is not one of the most likely ones.
            ranked = [(each.rank, token, each.logprob) for token, each in candidates.items() if each.rank is not None]
            tops.append([(token, logprob) for rank, token, logprob in sorted(ranked) if rank <= top_k])
        return _build_scores(self.name, logprobs, tops, span, top_k)


class SGLangScoring(_ScoringServer):
    """An SGLang server, which scores the input of a request. The one token that the request samples is ignored."""

    def score(self, ids: Ids, spans: Sequence[Span], top_k: int = 0) -> list[TokenScores]:
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top_k,
        }
        info = self._request("/generate", _Generated, body).meta_info
        scored, tops = info.input_token_logprobs, info.input_top_logprobs
        if scored is None:
            raise InvalidScores(f"{self.name} returned no log-probabilities for the input")
        if top_k and tops is None:
            raise InvalidScores(f"{self.name} returned no top tokens for the input")
        counts = [len(scored), len(scored) if tops is None or not top_k else len(tops)]
        if wrong := [count for count in counts if count != len(ids)]:
            raise InvalidScores(f"{self.name} returned the wrong number of scores: {wrong[0]} instead of {len(ids)}")
        if not np.array_equal(np.array([token.token_id for token in scored], ID_DTYPE), ids):
            raise InvalidScores(f"{self.name} returned scores for ids that differ from those sent")
        found = [self._read_span(scored, tops if top_k else None, span, top_k) for span in spans]
        check_scores(self.name, spans, found, top_k)
        return found

    def _read_span(
        self,
        scored: Sequence[_ScoredToken],
        tops: Sequence[Sequence[_ScoredToken] | None] | None,
        span: Span,
        top_k: int,
    ) -> TokenScores:
        logprobs, likely = [], []
        for place in range(*span):
            own, candidates = scored[place].logprob, [] if tops is None else tops[place]
            if own is None or candidates is None:
                raise InvalidScores(f"{self.name} returned no log-probability or no top tokens for position {place}")
            logprobs.append(own)
            likely.append([(each.token_id, np.nan if each.logprob is None else each.logprob) for each in candidates])
        return _build_scores(self.name, logprobs, likely, span, top_k)


def _build_scores(
    engine: str, logprobs: Sequence[float], tops: Sequence[Sequence[tuple[int, float]]], span: Span, top_k: int
) -> TokenScores:
    for position, top in enumerate(tops, span[0]):
        if len(top) != top_k:
            raise InvalidScores(
                f"{engine} returned the wrong number of top tokens at position {position}: {len(top)} instead of {top_k}"
            )
    shape = (len(tops), top_k)
    with np.errstate(over="ignore"):  # `check_scores` rejects numbers that become infinite
        return TokenScores(
            np.array(logprobs, LOGPROB_DTYPE),
            np.array([[token for token, _ in top] for top in tops], ID_DTYPE).reshape(shape),
            np.array([[logprob for _, logprob in top] for top in tops], LOGPROB_DTYPE).reshape(shape),
        )
