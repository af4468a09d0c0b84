"""Places to run an agent in, by name. `base.py` is the seam; `wayout.py` lets an agent in there reach the gateway."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from turngate.errors import SandboxUnavailable
from turngate.sandboxes.base import Backend

# module, class. Imported when asked for: the remote ones need SDKs that are extras.
BACKENDS: dict[str, tuple[str, str]] = {
    "local": ("turngate.sandboxes.local", "LocalBackend"),
    "bubblewrap": ("turngate.sandboxes.bubblewrap", "BubblewrapBackend"),
    "docker": ("turngate.sandboxes.docker", "DockerBackend"),
    "e2b": ("turngate.sandboxes.e2b", "E2BBackend"),
    "huggingface": ("turngate.sandboxes.huggingface", "HuggingFaceBackend"),
}


def get_backend(name: str) -> Backend:
    """The backend of that name, with its defaults."""
    if name not in BACKENDS:
        raise SandboxUnavailable(f"no sandbox is called {name!r}; there are: {', '.join(BACKENDS)}")
    module, factory = BACKENDS[name]
    make: Callable[[], Backend] = vars(import_module(module))[factory]
    return make()
