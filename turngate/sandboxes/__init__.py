"""The sandbox backends, by name. A backend creates the sandboxes in which agents run.

`base.py` defines the interface of a sandbox, and `egress.py` connects a sandbox to the gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING

from turngate.errors import SandboxUnavailable
from turngate.sandboxes.base import NO_SETTINGS, Backend

if TYPE_CHECKING:
    from turngate.types import Json

# Module and class of each backend. Modules are imported on demand, because the remote backends need optional SDKs.
BACKENDS: dict[str, tuple[str, str]] = {
    "local": ("turngate.sandboxes.local", "LocalBackend"),
    "bubblewrap": ("turngate.sandboxes.bubblewrap", "BubblewrapBackend"),
    "docker": ("turngate.sandboxes.docker", "DockerBackend"),
    "e2b": ("turngate.sandboxes.e2b", "E2BBackend"),
    "huggingface": ("turngate.sandboxes.huggingface", "HuggingFaceBackend"),
}


def get_backend(name: str, settings: Mapping[str, Json] = NO_SETTINGS) -> Backend:
    """Create the backend called `name`. Settings that are not given have their default values."""
    if name not in BACKENDS:
        raise SandboxUnavailable(f"sandbox must be one of {', '.join(BACKENDS)}, not {name!r}", param="sandbox")
    module, factory = BACKENDS[name]
    make: Callable[..., Backend] = vars(import_module(module))[factory]
    known = [key for key in signature(make).parameters if key != "root"]  # `root` is a folder of one machine
    for key in settings:
        if key not in known:
            raise SandboxUnavailable(
                f"sandbox {name} has no setting {key!r}; available settings: {', '.join(known) or 'none'}"
            )
    return make(**settings)
