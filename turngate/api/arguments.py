"""The arguments of `run`, `group`, `batch` and of clients: typed for type checkers, and checked at run time.

An error names the argument that is unknown or of the wrong type, and suggests the one that was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import msgspec

from turngate.common.validation import explain_error, suggestion
from turngate.errors import BadRequest
from turngate.service.config import ServiceConfig

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=1)]


class ClientArguments(TypedDict, total=False):
    """Where rollouts run. All are optional."""

    agent: str  # a preset (`turngate agents`), or your own TOML file
    options: Mapping[str, str]  # of that agent
    gateway: str  # URL of a gateway that already runs; its key comes from TURNGATE_ADMIN_KEY
    tokenizer: str  # folder with tokenizer.json and a chat template, or a name in the Hugging Face cache
    key_env: str  # name of the environment variable that holds the endpoint's key
    config: ServiceConfig | Path | str  # settings of a service, with a catalog of endpoints
    sandbox: str  # local, bubblewrap (the default), docker, e2b, huggingface
    image: str  # for sandboxes that have one
    network: Literal["none", "open"]  # of the sandboxes
    data: Path | str  # a folder for everything that is recorded; left out, nothing stays on disk
    concurrency: int  # rollouts at once; left out, 8


class RunArguments(TypedDict, total=False):
    """How one rollout runs. All are optional; the first four apply only to a task that is an instruction."""

    test_script: str  # bash, grades the agent's work in a fresh sandbox; left out, there is no reward
    files: Mapping[str, str | bytes]  # files for the working folder, path → content
    setup: str  # sh, runs in the working folder before the agent starts
    task_id: str
    agent: str  # instead of the client's
    mode: str  # exact, observe, gate, direct; left out, the endpoint's default
    thinking: bool  # whether the model thinks first, if its chat template supports the choice
    max_tokens_cap: int  # per turn
    max_turns: int
    timeout_s: float  # for the agent
    progress: bool  # False: display nothing while it runs


class AllArguments(ClientArguments, RunArguments, total=False):
    """The arguments of `run`, `group` and `batch`."""


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`ClientArguments` after validation."""

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
    concurrency: Count | None = None


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`RunArguments` after validation."""

    test_script: str = ""
    files: dict[str, Any] = {}
    setup: str = ""
    task_id: str = ""
    agent: str = ""
    mode: str = ""
    thinking: bool | None = None
    max_tokens_cap: int | None = None
    max_turns: Count | None = None
    timeout_s: float | None = None
    progress: bool | None = None


_PATHS = {"data": (str, Path, type(None)), "config": (str, Path, ServiceConfig, type(None))}
_CLIENT_NAMES = frozenset(ClientSettings.__struct_fields__)


def split_arguments(everything: AllArguments) -> tuple[ClientArguments, RunArguments]:
    """Split the arguments into those of the client and those of the run. `agent` goes to the client, which accepts a file too."""
    known = [*ClientSettings.__struct_fields__, *RunSettings.__struct_fields__]
    for name in everything:
        if name not in known:
            raise BadRequest(f"{name}: is not an argument{suggestion(name, known)}", param=name)
    where = {name: value for name, value in everything.items() if name in _CLIENT_NAMES}
    how = {name: value for name, value in everything.items() if name not in _CLIENT_NAMES}
    return where, how  # type: ignore[return-value]


def parse_arguments(given: Mapping[str, Any], kind: type[T]) -> T:
    """Validate arguments. `BadRequest` names the one that is unknown or of the wrong type."""
    for name, kinds in _PATHS.items():
        if not isinstance(given.get(name), kinds):
            raise BadRequest(f"{name}: has to be a path, not {type(given[name]).__name__}", param=name)
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        message, field = explain_error(error, kind, "argument")
        raise BadRequest(message, param=field) from None


def check_n(n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise BadRequest(f"n: {n!r} has to be an integer of at least 1", param="n")
    return n
