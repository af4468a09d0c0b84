"""The documented module names of version 0.1.0, importable until 0.3.0 with a DeprecationWarning."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False  # this is loaded with the package: `typing` and `importlib.abc` would take longer than all of it
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

MODULES = {
    "turngate.environment": "turngate.openenv",
    "turngate.environment.app": "turngate.openenv.app",
    "turngate.environment.client": "turngate.openenv.client",
    "turngate.environment.models": "turngate.openenv.models",
    "turngate.feed": "turngate.gateway.feeds",
    "turngate.rollout.client": "turngate.client.gateway",
    "turngate.rollout.gates": "turngate.rollout.concurrency",
    "turngate.rollout.one": "turngate.rollout.rollout",
    "turngate.rollout.pace": "turngate.rollout.throttle",
    "turngate.rollout.wayout": "turngate.rollout.connection",
    "turngate.service.asked": "turngate.service.request",
    "turngate.trainers.feed": "turngate.client.feed",
    "turngate.trainers.gate": "turngate.client.gate",
    "turngate.trainers.openenv": "turngate.views.training_trace",
    "turngate.verdicts": "turngate.views.verdict",
}
NAMES: dict[str, str] = {}  # old module and name -> today's module and name, where both changed


class _Finder:
    """Finds old modules, after every other finder has failed, and loads them as a copy of the new one."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in MODULES else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        import warnings
        from importlib import import_module

        old = module.__name__
        warnings.warn(f"{old} is now {MODULES[old]}", DeprecationWarning, stacklevel=2)

        def look_up(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            new_module, _, new_name = NAMES.get(f"{old}.{name}", f"{MODULES[old]}.{name}").rpartition(".")
            return getattr(import_module(new_module), new_name)

        module.__dict__["__getattr__"] = look_up


def install() -> None:
    """Make the old names importable."""
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.append(_Finder())
