"""The settings of the service: their types, their defaults, and how they are loaded from a TOML file. Callers cannot change them."""

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

Size = Annotated[int, msgspec.Meta(ge=0)]  # 0 means no limit
Bytes = Annotated[int, msgspec.Meta(ge=MAX_BYTES + MAX_SCRIPT)]  # at least the size of the largest request
Positive = Annotated[float, msgspec.Meta(gt=0)]


class Clamp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on the large fields of a result. 0 means no limit."""

    text: Size = 20_000  # characters per text, reasoning, or tool call's arguments
    turns: Size = 300  # number of turns; the newest are kept
    logprobs: Size = 50_000  # log-probabilities in all turns together
    files: Size = 100  # number of files from the working folder
    file: Size = 20_000  # characters per file
    all_files: Size = 200_000  # characters in all files together
    log: Size = 8_000  # characters at the end of one log
    verifier: Size = 16_000  # characters at the end of the grader's output


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of the service."""

    data: str = "turngate-data"  # the folder for results, events and the gateways' traces
    endpoints: dict[str, Endpoint] = {}  # the catalog
    allowed_hosts: list[str] = []  # HOST or HOST:PORT of callers' own endpoints; if empty, callers cannot use their own
    sandbox: str = "bubblewrap"  # local, bubblewrap, docker, e2b or huggingface
    image: str = ""  # for tasks without an image
    images: tuple[str, ...] = ("xingyaoww/*", "swebench/*", "swerebench/*")  # the images that a SWE row may name
    network: Network = "none"  # network access of sandboxes; with none, only the model is reachable
    resources: Resources = Resources()  # limits per sandbox: cpus, memory_mb, pids, disk_mb, open_files
    public_url: str = ""  # remote sandboxes: a public URL of the gateway
    tunnel: str = ""  # remote sandboxes: a command that opens a tunnel and prints its URL
    agent: str = ""  # the default agent; defaults to the first of `agents`, or mini-swe-agent
    agents: list[str] = []  # names or files of allowed agents; defaults to all presets and your own, except `shell`
    agent_options: dict[str, dict[str, str]] = {}  # options per agent
    running: Annotated[int, msgspec.Meta(ge=1)] = 8  # maximum concurrent rollouts
    queued: Annotated[int, msgspec.Meta(ge=0)] = 256  # maximum waiting rollouts; further rollouts are rejected
    queued_bytes: Bytes = 2_000_000_000  # maximum bytes uploaded for active rollouts; further rollouts are rejected
    starting: Annotated[int, msgspec.Meta(ge=1)] | None = None  # concurrent sandbox starts; defaults to 2 × CPU cores
    grading: Annotated[int, msgspec.Meta(ge=1)] | None = None  # concurrent gradings; defaults to one per CPU core
    most_agent_timeout_s: Positive = 3600.0  # the longest `agent_timeout_s` that a caller may set
    setup_timeout_s: Positive = 900.0  # time limit of setup_shell
    test_timeout_s: Positive = 900.0  # time limit of test_script
    keep: Annotated[int, msgspec.Meta(ge=1)] = 2000  # rollouts to remember; older ones are deleted
    keep_work: bool = True  # keep each agent's working folder on disk for as long as its rollout is remembered
    clamp: Clamp = Clamp()  # limits on the large fields of a result, see below

    def check(self) -> ServiceConfig:
        """Return the settings unchanged, or raise `ConfigError` if they are invalid."""
        if self.sandbox not in BACKENDS:
            raise ConfigError(f"sandbox must be one of {', '.join(BACKENDS)}, not {self.sandbox!r}", param="sandbox")
        if self.public_url and self.tunnel:
            raise ConfigError("set either public_url or tunnel, not both", param="tunnel")
        Catalog(self.endpoints, self.allowed_hosts)
        return self

    def allows_image(self, image: str) -> bool:
        """Return whether a SWE row may name this image."""
        return any(fnmatchcase(image, pattern) for pattern in self.images)


def load_config(file: Path | None, overrides: dict[str, Any] | None = None) -> ServiceConfig:
    """Load the settings from a TOML file. Values in `overrides` take precedence, unless they are None."""
    values = read_toml(file)
    values.update({name: value for name, value in (overrides or {}).items() if value is not None})
    endpoints = values.get("endpoints")
    for key, entry in endpoints.items() if isinstance(endpoints, dict) else ():
        if isinstance(entry, dict) and (wrong := {"key", "api_key", "token"} & set(entry)):
            raise ConfigError(
                f'endpoints."{key}".{wrong.pop()} is a secret and cannot be a setting; put the key in an environment '
                "variable and set key_env to the variable's name",
                param="key_env",
            )
    try:
        return msgspec.convert(values, ServiceConfig).check()
    except msgspec.ValidationError as error:
        message, field = explain_error(error, ServiceConfig, "setting")
        raise ConfigError(message, param=field) from None
