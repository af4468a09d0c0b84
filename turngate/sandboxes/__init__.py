"""Sandboxes to run agents in, by name. `base.py` defines the interface, and `egress.py` connects a sandbox to the gateway."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from turngate.errors import SandboxUnavailable
from turngate.sandboxes.base import Backend

# Module and class, imported on demand because the remote backends need optional SDKs.
BACKENDS: dict[str, tuple[str, str]] = {
    "local": ("turngate.sandboxes.local", "LocalBackend"),
    "bubblewrap": ("turngate.sandboxes.bubblewrap", "BubblewrapBackend"),
    "docker": ("turngate.sandboxes.docker", "DockerBackend"),
    "e2b": ("turngate.sandboxes.e2b", "E2BBackend"),
    "huggingface": ("turngate.sandboxes.huggingface", "HuggingFaceBackend"),
}


def get_backend(name: str) -> Backend:
    """Create the backend with this name, with its default settings."""
    if name not in BACKENDS:
        raise SandboxUnavailable(f"sandbox must be one of {', '.join(BACKENDS)}, not {name!r}")
    module, factory = BACKENDS[name]
    make: Callable[[], Backend] = vars(import_module(module))[factory]
    return make()
