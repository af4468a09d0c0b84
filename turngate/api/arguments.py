"""The arguments of `run`, `group`, `batch` and of clients: where rollouts run, and how. Listed for type checkers, checked for others.

`client.py` and `blocking.py` take them. One that is not known, or of another type, is named, with the one that was meant.
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


class Where(TypedDict, total=False):
    """Where rollouts run. Each is optional."""

    agent: str  # a preset (`turngate agents`), or a TOML file of your own
    options: Mapping[str, str]  # of that agent
    gateway: str  # URL of a gateway that runs already; its key comes from TURNGATE_ADMIN_KEY
    tokenizer: str  # folder with tokenizer.json and a chat template, or a name in the Hugging Face cache
    key_env: str  # name of the environment variable that holds the endpoint's key
    config: ServiceConfig | Path | str  # settings of a service, with a catalog of endpoints
    sandbox: str  # local, bubblewrap (the default), docker, e2b, huggingface
    image: str  # for sandboxes that have one
    network: Literal["none", "open"]  # of the sandboxes
    data: Path | str  # a folder that keeps what is recorded; left out, nothing stays on disk
    concurrency: int  # rollouts at once; left out, 8


class How(TypedDict, total=False):
    """How one rollout runs. Each is optional; the first four go with a task in words."""

    test_script: str  # bash, run on the agent's work in a fresh sandbox; left out, there is no reward
    files: Mapping[str, str | bytes]  # laid into the working folder before the agent starts, by path
    setup: str  # sh, run there before the agent starts
    task_id: str
    agent: str  # instead of the client's
    mode: str  # exact, observe, gate, direct; left out, the endpoint's own
    thinking: bool  # whether the model thinks first, where its template lets one choose
    max_tokens_cap: int  # the most tokens of one turn
    max_turns: int
    timeout_s: float  # the agent's time
    progress: bool  # False: nothing is shown while it runs


class Everything(Where, How, total=False):
    """What `run`, `group` and `batch` take: where, and how."""


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`Where`, checked."""

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


class Given(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`How`, checked."""

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
_PLACE = frozenset(Place.__struct_fields__)


def split(everything: Everything) -> tuple[Where, How]:
    """What is said about where, and what about how. The agent is the client's: it may be a file."""
    known = [*Place.__struct_fields__, *Given.__struct_fields__]
    for name in everything:
        if name not in known:
            raise BadRequest(f"{name}: there is no such argument{suggestion(name, known)}", param=name)
    where = {name: value for name, value in everything.items() if name in _PLACE}
    how = {name: value for name, value in everything.items() if name not in _PLACE}
    return where, how  # type: ignore[return-value]


def read(given: Mapping[str, Any], kind: type[T]) -> T:
    """Checked: an argument that is not known, or of another type, is named."""
    for name, kinds in _PATHS.items():
        if not isinstance(given.get(name), kinds):
            raise BadRequest(f"{name}: has to be a path, not {type(given[name]).__name__}", param=name)
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        message, field = explain_error(error, kind, "argument")
        raise BadRequest(message, param=field) from None


def checked_n(n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise BadRequest(f"n: {n!r} is not 1 or more", param="n")
    return n
