"""The arguments of `run`, `group`, `batch` and clients: typed for type checkers and validated at run time.

An error names the unknown or invalid argument. For an unknown argument, it suggests a similar name or lists the valid ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import msgspec

from turngate.common.validation import explain_error, suggestion
from turngate.errors import BadRequest
from turngate.rollout.sampling import NEUTRAL_CHOICE
from turngate.service.config import ServiceConfig

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=1)]


class ClientArguments(TypedDict, total=False):
    """The arguments of a client besides `model`: the agent, how to reach the model, and where rollouts run. All are optional."""

    agent: str  # a preset (`turngate agents`), or your own TOML file
    options: Mapping[str, str]  # the agent's options
    gateway: str  # URL of a running gateway; its key is read from TURNGATE_ADMIN_KEY
    tokenizer: str  # folder with tokenizer.json and a chat template, or a model in the Hugging Face cache
    key_env: str  # name of the environment variable with the endpoint's key
    config: ServiceConfig | Path | str  # service settings, with a catalog of endpoints
    sandbox: str  # local, bubblewrap (the default), docker, e2b, huggingface
    image: str  # the image of sandboxes that use images, such as docker
    network: Literal["none", "open"]  # network access of the sandboxes
    # Folder for everything that is recorded; by default, nothing is kept. With `cluster`: postgresql://user@host/database.
    data: Path | str
    cluster: str  # address of a Ray cluster to run on: auto, HOST:PORT or ray://HOST:PORT
    concurrency: int  # number of rollouts that run in parallel; 8 by default


class RunArguments(TypedDict, total=False):
    """Arguments of one rollout. All are optional. The first four (up to `task_id`) are allowed only if the task is an instruction."""

    test_script: str  # bash script that grades the agent's work in a fresh sandbox; without one, there is no reward
    files: Mapping[str, str | bytes]  # files for the working folder, path → content
    setup: str  # sh script that runs in the working folder before the agent starts
    task_id: str
    agent: str  # overrides the client's agent
    mode: str  # exact, observe, gate or direct; by default, the endpoint's mode
    thinking: bool  # whether the model thinks before it answers, if its chat template supports the switch
    sampling: str | Mapping[str, float]  # neutral (temperature 1, the default), agent, or settings to pin
    max_tokens_cap: int  # maximum number of tokens that the model may sample per turn
    max_turns: int
    timeout_s: float  # how long the agent may run
    progress: bool  # False hides the progress display


class AllArguments(ClientArguments, RunArguments, total=False):
    """The keyword arguments of `run`, `group` and `batch`: those of a client and those of a rollout."""


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The validated values of `ClientArguments`."""

    agent: str = ""
    options: dict[str, str] = {}
    gateway: str = ""
    tokenizer: str = ""
    key_env: str = ""
    config: Any = None
    sandbox: str | None = None
    image: str | None = None
    network: str | None = None
    data: Any = None
    cluster: str = ""
    concurrency: Count | None = None


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The validated values of `RunArguments`."""

    test_script: str = ""
    files: dict[str, Any] = {}
    setup: str = ""
    task_id: str = ""
    agent: str = ""
    mode: str = ""
    thinking: bool | None = None
    sampling: str | dict[str, int | float] = NEUTRAL_CHOICE
    max_tokens_cap: int | None = None
    max_turns: Count | None = None
    timeout_s: float | None = None
    progress: bool | None = None


_PATHS = {
    "data": ("a path", (str, Path, type(None))),
    "config": ("a path or a ServiceConfig", (str, Path, ServiceConfig, type(None))),
}
_CLIENT_NAMES = frozenset(ClientSettings.__struct_fields__)


def split_arguments(everything: AllArguments) -> tuple[ClientArguments, RunArguments]:
    """Split the arguments into those of the client and those of the rollout. Raise `BadRequest` if one is unknown.

    Both accept `agent`. It goes to the client, because only the client's agent may be a TOML file.
    """
    known = [*ClientSettings.__struct_fields__, *RunSettings.__struct_fields__]
    for name in everything:
        if name not in known:
            raise BadRequest(f"{name} is not a known argument{suggestion(name, known)}", param=name)
    where = {name: value for name, value in everything.items() if name in _CLIENT_NAMES}
    how = {name: value for name, value in everything.items() if name not in _CLIENT_NAMES}
    return where, how  # type: ignore[return-value]


def parse_arguments(given: Mapping[str, Any], kind: type[T]) -> T:
    """Validate arguments and convert them to settings. Raise `BadRequest` if an argument is unknown or invalid."""
    for name, (expected, kinds) in _PATHS.items():
        if not isinstance(given.get(name), kinds):
            raise BadRequest(f"{name} must be {expected}, not {type(given[name]).__name__}", param=name)
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        message, field = explain_error(error, kind, "argument")
        raise BadRequest(message, param=field) from None


def check_n(n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise BadRequest(f"n must be an integer of at least 1, not {n!r}", param="n")
    return n
