"""Decide the sampling settings of a rollout. Each setting comes from the first of these sources that sets it:

    1. the caller: flags, the `sampling` of a request, the session settings of a plan, or a trainer
    2. the agent's file, in [sampling]
    3. the session settings of a service's endpoint
    4. the gateway, which in exact and gate mode pins temperature 1, whatever the agent requests, so that turns can be trained on

For evaluations, a caller can set `sampling` to `agent`. Then only the caller's settings are pinned, and the agent's own requests decide
all other settings.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from turngate.common.validation import explain_error
from turngate.errors import BadRequest
from turngate.types import Json, Sampling

NEUTRAL_CHOICE, AGENT_CHOICE = "neutral", "agent"


def parse_sampling(choice: str | Mapping[str, Json]) -> dict[str, Json]:
    """Return the session settings for a choice: `neutral`, `agent`, or the settings to pin. Raise `BadRequest` if the choice is invalid."""
    if isinstance(choice, str):
        if choice not in (NEUTRAL_CHOICE, AGENT_CHOICE):
            raise BadRequest(
                f'sampling must be "neutral", "agent", or an object such as {{"temperature": 0.7}}, not {choice[:80]!r}',
                param="sampling",
            )
        return {"bias": "record"} if choice == AGENT_CHOICE else {}
    check_pinned(choice)
    return {"sampling": dict(choice)} if choice else {}


def check_pinned(pinned: Mapping[str, Json]) -> None:
    """Check the settings to pin. Raise `BadRequest` with the name of the first setting that is unknown or has an invalid value."""
    try:
        msgspec.convert(dict(pinned), Sampling)
    except msgspec.ValidationError as error:
        message, field = explain_error(error, Sampling, "setting")
        raise BadRequest(f"sampling.{message}", param=f"sampling.{field}") from None


def resolve_settings(
    session: Mapping[str, Json], agent: Mapping[str, Json], endpoint: Mapping[str, Json]
) -> dict[str, Json]:
    """Return the session settings that concern sampling.

    `session` contains the caller's session settings, `agent` the sampling settings in the agent's file, and `endpoint` those of the
    service's endpoint.
    """
    chosen = session.get("sampling", {})
    if session.get("bias") == "record":
        return {"sampling": chosen} if chosen else {}
    pinned = {**endpoint, **agent, **chosen}
    return {"purpose": "train", **({"sampling": pinned} if pinned else {})}
