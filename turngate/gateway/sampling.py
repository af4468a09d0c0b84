"""Determine the sampling parameters of a turn, and how many tokens it may sample."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from turngate.errors import BadRequest, ContextOverflow
from turngate.trace.session import Session
from turngate.types import NEUTRAL, Call, Json, Mode, Sampling

_DEFAULT_MAX_TOKENS = 4096
_TRAINING_TEMPERATURE = 1.0


def pin_for_training(sampling: Mapping[str, Json], mode: Mode, bias: str = "neutral") -> dict[str, Json]:
    """Return the session's `sampling`, with a temperature for training added if it has none.

    Without one, the agent's temperature would apply, and many agents ask for 0. Nothing is added for an observed endpoint, or for a session
    that applies the agent's own sampling and records the bias (`bias="record"`).
    """
    if mode == "observe" or bias == "record":
        return dict(sampling)
    return {"temperature": _TRAINING_TEMPERATURE, **sampling}


def resolve_sampling(session: Session, call: Call, *, neutral: bool | None = None) -> Sampling:
    """Return the merged sampling parameters. The session's values override the agent's, which override neutral defaults.

    If the session's `bias` is `neutral`, only temperature and seed are taken from the agent. The argument `neutral` overrides this setting.
    """
    only = session.config.bias == "neutral" if neutral is None else neutral
    agent = {k: v for k, v in call.sampling.items() if not only or k in ("temperature", "seed")}
    merged = {**agent, **session.config.sampling}
    if not merged:
        return NEUTRAL
    try:
        return msgspec.convert(merged, Sampling)
    except msgspec.ValidationError as error:
        raise BadRequest(f"sampling: {error}", param="sampling") from None


def find_constraint_bias(call: Call) -> tuple[str, ...]:
    """Return the bias that a grammar or a forced tool causes in the reply to a call, or an empty tuple."""
    if call.constraint is None:
        return ()
    return (f"constrained: {call.constraint.kind}{' after reasoning' if call.constraint.after_reasoning else ''}",)


def count_room(session: Session, call: Call, size: int, max_context: int | None) -> int:
    """Return the number of tokens that may be sampled after a prompt of `size` tokens.

    If the call, the session and the model set no limit, return 4096. The caller must already have checked that the prompt itself fits.
    """
    limit = session.config.limits.context_tokens
    requested = call.max_tokens if session.config.max_tokens is None else session.config.max_tokens
    room = [
        requested,
        session.tokens_left,
        None if max_context is None else max_context - size,
        None if limit is None else limit - size,
    ]
    return min((n for n in room if n is not None), default=_DEFAULT_MAX_TOKENS)


def context_overflow(limit: int, size: int) -> ContextOverflow:
    """Return the error for a prompt that is too long, in the words that agents recognize."""
    return ContextOverflow(
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in {size} tokens. "
        "Please reduce the length of the messages.",
        param="messages",
        limit=limit,
        size=size,
    )
