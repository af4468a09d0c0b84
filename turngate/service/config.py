"""Every setting of the service, once: from a TOML file, with overrides laid over it. What callers may not choose is here."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import msgspec

from turngate.common.validation import explain_error
from turngate.config import read_toml
from turngate.errors import ConfigError
from turngate.sandboxes import BACKENDS
from turngate.sandboxes.base import Network, Resources
from turngate.service.catalog import Catalog, Endpoint
from turngate.service.request import MOST_BYTES, MOST_SCRIPT

Size = Annotated[int, msgspec.Meta(ge=0)]  # 0: no bound
Bytes = Annotated[int, msgspec.Meta(ge=MOST_BYTES + MOST_SCRIPT)]  # as many as one caller may give
Positive = Annotated[float, msgspec.Meta(gt=0)]


class Clamp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of a large field a result has. 0: all of it."""

    text: Size = 20_000  # characters of one text, reasoning, or a tool call's arguments
    turns: Size = 300  # the newest of them
    logprobs: Size = 50_000  # numbers, of all turns together
    files: Size = 100  # of the working folder
    file: Size = 20_000  # characters of one of them
    all_files: Size = 200_000  # characters of all of them
    log: Size = 8_000  # characters at the end of one log
    verifier: Size = 16_000  # characters at the end of what the grader printed


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the service."""

    data: str = "turngate-data"  # the folder that holds results, events and the gateways' traces
    endpoints: dict[str, Endpoint] = {}  # the catalog
    allowed_hosts: list[str] = []  # HOST or HOST:PORT that a caller's own endpoint may be at; none: callers have none
    sandbox: str = "bubblewrap"  # local, bubblewrap, docker, e2b, huggingface
    image: str = ""  # for tasks that bring none
    images: tuple[str, ...] = ("xingyaoww/*", "swebench/*", "swerebench/*")  # that a SWE row may name
    network: Network = "none"  # of the sandboxes; none: nothing but the model
    resources: Resources = Resources()  # cpus, memory_mb, pids of a sandbox
    public_url: str = ""  # remote sandboxes: an address that leads to the gateway
    tunnel: str = ""  # remote sandboxes: a command that prints one
    agent: str = ""  # the default; left out, the first of `agents`, or mini-swe-agent
    agents: list[str] = []  # that callers may use: names, or files of your own; left out, every preset but `shell`
    agent_options: dict[str, dict[str, str]] = {}  # per agent
    running: Annotated[int, msgspec.Meta(ge=1)] = 8  # rollouts at once
    queued: Annotated[int, msgspec.Meta(ge=0)] = 256  # that wait, at most; one more is refused
    queued_bytes: Bytes = 2_000_000_000  # of what callers gave to all that run or wait, on disk; more is refused
    starting: Annotated[int, msgspec.Meta(ge=1)] | None = None  # sandboxes made at once; left out, twice the cores
    grading: Annotated[int, msgspec.Meta(ge=1)] | None = None  # graded at once; left out, the cores
    most_agent_timeout_s: Positive = 3600.0  # the longest that a caller may ask for
    setup_timeout_s: Positive = 900.0  # of setup_shell
    test_timeout_s: Positive = 900.0  # of test_script
    keep: Annotated[int, msgspec.Meta(ge=1)] = 2000  # rollouts that are remembered; the oldest are removed
    keep_work: bool = True  # what agents left stays on disk as long
    clamp: Clamp = Clamp()  # how much of large fields results have, see below

    def check(self) -> ServiceConfig:
        """What types cannot say."""
        if self.sandbox not in BACKENDS:
            raise ConfigError(f"sandbox: {self.sandbox!r} is none of {', '.join(BACKENDS)}", param="sandbox")
        if self.public_url and self.tunnel:
            raise ConfigError("tunnel: give either a public URL or a tunnel's command", param="tunnel")
        Catalog(self.endpoints, self.allowed_hosts)
        return self

    def takes_image(self, image: str) -> bool:
        """Whether a task may bring that image."""
        return any(fnmatchcase(image, pattern) for pattern in self.images)


def load(file: Path | None, overrides: dict[str, Any] | None = None) -> ServiceConfig:
    """The file's settings with the overrides that are not None laid over them."""
    values = read_toml(file)
    values.update({name: value for name, value in (overrides or {}).items() if value is not None})
    for key, entry in values.get("endpoints", {}).items():
        if isinstance(entry, dict) and (wrong := {"key", "api_key", "token"} & set(entry)):
            raise ConfigError(
                f'endpoints."{key}".{wrong.pop()}: secrets are never settings; put it into an environment variable and give '
                "its name as key_env",
                param="key_env",
            )
    try:
        return msgspec.convert(values, ServiceConfig).check()
    except msgspec.ValidationError as error:
        message, field = explain_error(error, ServiceConfig, "setting")
        raise ConfigError(message, param=field) from None
