"""An order: everything that one attempt at a rollout needs, as plain data, so that any machine can run it.

    order = decode_order(data)
    attempt = executor.prepare(order)           # `executor.py`
    result = await attempt.run()                # first turns the order into a spec (`resolve.py`)

An order contains no live objects, no paths from the machine that made it, and no values of environment variables:

    task      its fields, and the SHA-256 of the archive with its files (`tasks/archive.py`)
    agent     its whole description; the machine that runs the order installs the agent
    sandbox   its name and settings, from which the machine creates the backend
    env       the names of environment variables; each machine takes the values from its own environment

A secret that the user wrote in the task, the agent's description or options, or the session's settings is part of the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import msgspec

from turngate.agents.launch import ModelLimits
from turngate.agents.spec import AgentSpec
from turngate.common.validation import explain_error
from turngate.errors import BadRequest
from turngate.rollout.spec import EndPolicy
from turngate.sandboxes.base import Network, Resources
from turngate.tasks.archive import PackedTask
from turngate.types import Json

FORMAT = 1  # increase this when machines with an older version would misread an order


class SandboxChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kind of sandbox to use, and the settings of its backend."""

    name: str
    settings: Mapping[str, Json] = {}


class RolloutOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that one attempt at a rollout needs, as plain data."""

    format: int = FORMAT
    rollout: str
    attempt: int
    group: str
    session_id: str  # the id of the session that the attempt opens
    project: str = ""  # the session's project; empty for the project of the gateway's key
    task: PackedTask
    agent: AgentSpec
    options: Mapping[str, str] = {}  # the agent's options
    sandbox: SandboxChoice
    image: str = ""
    network: Network = "none"
    resources: Resources = Resources()
    folders: tuple[str, ...] = ()  # additional writable folders inside the sandbox
    env: tuple[str, ...] = ()  # names of environment variables for every command in the sandbox
    model: str
    model_limits: ModelLimits = ModelLimits()
    timeout_s: float
    session: Mapping[str, Json] = {}  # additional session settings: limits, sampling, policy …
    endpoint_sampling: Mapping[str, Json] = {}
    policy: EndPolicy = EndPolicy()
    grade: bool = True
    keep_work: bool = True
    reuse_grades: bool = False


def encode_order(order: RolloutOrder) -> bytes:
    """Encode an order as JSON. Raise `BadRequest` if JSON cannot represent a value in it."""
    try:
        return msgspec.json.encode(order, enc_hook=_encode_path)
    except (UnicodeEncodeError, TypeError, ValueError) as error:
        raise BadRequest(
            f"order: rollout {order.rollout} contains a value that JSON cannot represent ({error}); change it in the task, the agent's "
            "options or the session's settings",
            param="order",
        ) from None


def decode_order(data: bytes) -> RolloutOrder:
    """Decode and check an order. Raise `BadRequest` if it is invalid."""
    try:
        version = msgspec.json.decode(data, type=_Version)
        if version.format != FORMAT:
            raise BadRequest(
                f"order: the format is {version.format}, but this machine reads format {FORMAT}; install the same version of Turngate "
                "on all machines",
                param="format",
            )
        return msgspec.json.decode(data, type=RolloutOrder, dec_hook=_decode_path)
    except msgspec.ValidationError as error:
        message, field = explain_error(error, RolloutOrder)
        raise BadRequest(f"order: {message}", param=field) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"order: not valid JSON: {error}", param="order") from None


class _Version(msgspec.Struct):
    format: int


def _encode_path(value: object) -> str:
    if not isinstance(value, Path):
        raise TypeError(f"{type(value).__name__} is not plain data")
    return value.as_posix()


def _decode_path(kind: type, value: object) -> Path:
    """Decode a path in a task's archive. Raise `ValueError` if it is not a path inside the archive."""
    if kind is not Path or not isinstance(value, str):
        raise NotImplementedError(kind)
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or "\0" in value or not path.parts:
        raise ValueError(f"{value!r} is not a path inside the task's archive")
    return Path(path)
