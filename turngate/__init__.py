"""Turngate: the gateway that lets people train the coding agents they really use.

    import turngate as tg
    result = await tg.run("examples/tasks/fix-add", agent="pi", model="vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000")

The names in `__all__` come from `turngate.api` (docs/python.md) and are loaded on first use, so importing the package is cheap.
"""

from __future__ import annotations

from turngate import _moved

TYPE_CHECKING = False  # type checkers recognize this name; importing `typing` would take longer than the whole package
if TYPE_CHECKING:
    from typing import Any

    from turngate.api import (
        BlockingClient,
        Client,
        Endpoint,
        Result,
        Results,
        ServiceConfig,
        Task,
        Turn,
        TurngateError,
        batch,
        batch_sync,
        group,
        group_sync,
        open,
        run,
        run_sync,
    )

_moved.install()

__version__ = "0.1.0"
__all__ = [
    "BlockingClient",
    "Client",
    "Endpoint",
    "Result",
    "Results",
    "ServiceConfig",
    "Task",
    "Turn",
    "TurngateError",
    "batch",
    "batch_sync",
    "group",
    "group_sync",
    "open",
    "run",
    "run_sync",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'turngate' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module("turngate.api"), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
