"""The settings of the service: from a TOML file, with overrides. Callers cannot change them."""

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
from turngate.service.request import MAX_BYTES, MAX_SCRIPT

Size = Annotated[int, msgspec.Meta(ge=0)]  # 0: no bound
Bytes = Annotated[int, msgspec.Meta(ge=MAX_BYTES + MAX_SCRIPT)]  # at least as much as one request may have
Positive = Annotated[float, msgspec.Meta(gt=0)]


class Clamp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of a large field a result includes. 0: all of it."""

    text: Size = 20_000  # characters of one text, reasoning, or a tool call's arguments
    turns: Size = 300  # the newest turns
    logprobs: Size = 50_000  # numbers, of all turns together
    files: Size = 100  # of the working folder
    file: Size = 20_000  # characters of one file
    all_files: Size = 200_000  # characters of all files together
    log: Size = 8_000  # characters at the end of one log
    verifier: Size = 16_000  # characters at the end of the grader's output


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the service."""

    data: str = "turngate-data"  # the folder that holds results, events and the gateways' traces
    endpoints: dict[str, Endpoint] = {}  # the catalog
    allowed_hosts: list[str] = []  # HOST or HOST:PORT of callers' own endpoints; empty: callers cannot bring any
    sandbox: str = "bubblewrap"  # local, bubblewrap, docker, e2b, huggingface
    image: str = ""  # for tasks without an image
    images: tuple[str, ...] = ("xingyaoww/*", "swebench/*", "swerebench/*")  # the images that a SWE row may name
    network: Network = "none"  # of the sandboxes; none: only the model is reachable
    resources: Resources = Resources()  # cpus, memory_mb, pids of a sandbox
    public_url: str = ""  # remote sandboxes: a public URL of the gateway
    tunnel: str = ""  # remote sandboxes: a command that opens a tunnel and prints its URL
    agent: str = ""  # the default agent; left out, the first of `agents`, or mini-swe-agent
    agents: list[str] = []  # the agents that callers may use: names or spec files; left out, every preset but `shell`
    agent_options: dict[str, dict[str, str]] = {}  # options per agent
    running: Annotated[int, msgspec.Meta(ge=1)] = 8  # rollouts at once
    queued: Annotated[int, msgspec.Meta(ge=0)] = 256  # rollouts that may wait; further ones are rejected
    queued_bytes: Bytes = 2_000_000_000  # uploaded files of all rollouts that run or wait; further ones are rejected
    starting: Annotated[int, msgspec.Meta(ge=1)] | None = None  # sandboxes started at once; left out, twice the cores
    grading: Annotated[int, msgspec.Meta(ge=1)] | None = None  # rollouts graded at once; left out, the cores
    most_agent_timeout_s: Positive = 3600.0  # the longest `agent_timeout_s` that a caller may set
    setup_timeout_s: Positive = 900.0  # for setup_shell
    test_timeout_s: Positive = 900.0  # for test_script
    keep: Annotated[int, msgspec.Meta(ge=1)] = 2000  # rollouts to remember; the oldest are deleted
    keep_work: bool = True  # keep the agents' working folders on disk as long
    clamp: Clamp = Clamp()  # how much of large fields a result includes, see below

    def check(self) -> ServiceConfig:
        """Validate what the types cannot express."""
        if self.sandbox not in BACKENDS:
            raise ConfigError(f"sandbox: {self.sandbox!r} is none of {', '.join(BACKENDS)}", param="sandbox")
        if self.public_url and self.tunnel:
            raise ConfigError("tunnel: set either public_url or tunnel, not both", param="tunnel")
        Catalog(self.endpoints, self.allowed_hosts)
        return self

    def allows_image(self, image: str) -> bool:
        """Whether a task may use an image."""
        return any(fnmatchcase(image, pattern) for pattern in self.images)


def load_config(file: Path | None, overrides: dict[str, Any] | None = None) -> ServiceConfig:
    """Load the settings from a file, and apply the overrides that are not None."""
    values = read_toml(file)
    values.update({name: value for name, value in (overrides or {}).items() if value is not None})
    for key, entry in values.get("endpoints", {}).items():
        if isinstance(entry, dict) and (wrong := {"key", "api_key", "token"} & set(entry)):
            raise ConfigError(
                f'endpoints."{key}".{wrong.pop()}: settings never hold secrets; put the key into an environment '
                "variable and set key_env to its name",
                param="key_env",
            )
    try:
        return msgspec.convert(values, ServiceConfig).check()
    except msgspec.ValidationError as error:
        message, field = explain_error(error, ServiceConfig, "setting")
        raise ConfigError(message, param=field) from None
