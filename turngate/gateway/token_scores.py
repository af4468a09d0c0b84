"""Log-probabilities for agents that request them.

Agents receive them only if the session allows it, and with token texts instead of token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turngate.errors import BadRequest
from turngate.render import Tokenizer
from turngate.trace.session import Session
from turngate.types import Call, TokenScore


def require_shown_logprobs(session: Session, call: Call) -> None:
    """Raise `BadRequest` if the agent requests log-probabilities, but the session does not show them or its mode does not support them."""
    if call.top_logprobs is None:
        return
    if session.config.mode == "observe":
        raise BadRequest("logprobs is not supported in observe mode; leave it out", param="logprobs")
    if not session.config.show_logprobs:
        raise BadRequest(
            "logprobs is not allowed: the gateway records log-probabilities but does not show them to this session's agent; "
            "leave logprobs out, or open the session with show_logprobs",
            param="logprobs",
        )


def score_tokens(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    logprobs: Sequence[float | None] | None,
    alternatives: Sequence[Mapping[int, float]] | None,
) -> tuple[TokenScore, ...]:
    """Return the text, log-probability and alternatives of each sampled token. A log-probability that the engine did not return is None."""
    scores = []
    for n, token in enumerate(ids):
        others = alternatives[n] if alternatives is not None and n < len(alternatives) else {}
        listed = tuple(_score(tokenizer, other, value) for other, value in others.items())
        scores.append(_score(tokenizer, token, None if logprobs is None else logprobs[n], listed))
    return tuple(scores)


def _score(
    tokenizer: Tokenizer, token: int, logprob: float | None, alternatives: tuple[TokenScore, ...] = ()
) -> TokenScore:
    if tokenizer.vocabulary.table is None:
        return TokenScore(tokenizer.decode(token), None, logprob, alternatives)
    data = tokenizer.bytes_of(token)
    return TokenScore(data.decode("utf-8", "replace"), data, logprob, alternatives)
