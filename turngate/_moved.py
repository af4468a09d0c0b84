"""Documented names that were renamed in November 2026. The old names work until 0.2.0, with a DeprecationWarning."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder

TYPE_CHECKING = False  # `import turngate` loads this module; importing `typing` or `importlib.abc` would take longer than everything else
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
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
    "turngate.sandboxes.owner": "turngate.common.owner",
    "turngate.service.asked": "turngate.service.request",
    "turngate.trainers.feed": "turngate.client.feed",
    "turngate.trainers.gate": "turngate.client.gate",
    "turngate.trainers.openenv": "turngate.views.training_trace",
    "turngate.verdicts": "turngate.views.background_verifier",
    "turngate.views.verdict": "turngate.views.background_verifier",
}
# Old name → new name.
NAMES = {
    "turngate.agents.install.Installed": "turngate.agents.installation.Installation",
    "turngate.agents.install.ensure": "turngate.agents.install.ensure_installed",
    "turngate.agents.install.missing": "turngate.agents.install.explain_missing",
    "turngate.agents.launch.Limits": "turngate.agents.launch.ModelLimits",
    "turngate.agents.launch.plan": "turngate.agents.launch.plan_launch",
    "turngate.agents.spec.File": "turngate.agents.spec.AgentFile",
    "turngate.agents.spec.Found": "turngate.agents.spec.CatalogEntry",
    "turngate.agents.spec.catalog": "turngate.agents.spec.load_catalog",
    "turngate.agents.spec.find": "turngate.agents.spec.find_agent",
    "turngate.agents.spec.parse": "turngate.agents.spec.parse_spec",
    "turngate.agents.spec.read": "turngate.agents.spec.load_spec",
    "turngate.config.load": "turngate.config.load_config",
    "turngate.engines.gate.Waiting": "turngate.engines.gate.QueueStatus",
    "turngate.engines.scripted.Turn": "turngate.engines.scripted.ScriptedTurn",
    "turngate.errors.DataInUse": "turngate.errors.DataFolderInUse",
    "turngate.errors.TooMany": "turngate.errors.TooManyRequests",
    "turngate.feed.FeedConfig": "turngate.client.protocol.FeedConfig",
    "turngate.render.find": "turngate.render.find_tokenizer",
    "turngate.render.load": "turngate.render.load_renderer",
    "turngate.rollout.batch.Stopped": "turngate.rollout.batch.BatchStopped",
    "turngate.rollout.client.Opened": "turngate.client.gateway.OpenedSession",
    "turngate.rollout.client.Refused": "turngate.client.gateway.RequestRejected",
    "turngate.rollout.client.Unreachable": "turngate.client.gateway.GatewayUnreachable",
    "turngate.rollout.client.admin_key_given": "turngate.client.keys.read_admin_key",
    "turngate.rollout.gates.Gates": "turngate.rollout.concurrency.Concurrency",
    "turngate.rollout.ledger.Finished": "turngate.rollout.ledger.FinishedRollout",
    "turngate.rollout.ledger.read": "turngate.rollout.ledger.read_ledger",
    "turngate.rollout.outcome.AtEnd": "turngate.rollout.spec.EndAction",
    "turngate.rollout.outcome.EndPolicy": "turngate.rollout.spec.EndPolicy",
    "turngate.rollout.outcome.Order": "turngate.rollout.spec.RolloutSpec",
    "turngate.rollout.outcome.Progress": "turngate.rollout.outcome.RolloutProgress",
    "turngate.rollout.outcome.Watch": "turngate.rollout.outcome.ProgressCallback",
    "turngate.rollout.pace.Ahead": "turngate.rollout.throttle.TrainerThrottle",
    "turngate.rollout.pace.Pace": "turngate.rollout.throttle.Throttle",
    "turngate.rollout.pace.at_once": "turngate.rollout.throttle.no_throttle",
    "turngate.rollout.playbook.filled": "turngate.rollout.playbook.fill_steps",
    "turngate.rollout.playbook.spoken": "turngate.rollout.playbook.format_step",
    "turngate.rollout.summary.Group": "turngate.rollout.summary.GroupStats",
    "turngate.rollout.summary.Numbers": "turngate.rollout.summary.RolloutStats",
    "turngate.rollout.summary.RoundNumbers": "turngate.rollout.summary.RoundStats",
    "turngate.rollout.summary.TaskNumbers": "turngate.rollout.summary.TaskStats",
    "turngate.rollout.summary.summed_up": "turngate.rollout.summary.summarize",
    "turngate.rollout.wayout.WayOut": "turngate.rollout.connection.GatewayConnector",
    "turngate.sandboxes.backend": "turngate.sandboxes.get_backend",
    "turngate.sandboxes.base.Result": "turngate.sandboxes.base.ExecResult",
    "turngate.server.auth.given_key": "turngate.client.keys.read_key",
    "turngate.server.run.Address": "turngate.server.run.GatewayAddress",
    "turngate.server.run.embedded": "turngate.server.run.run_embedded",
    "turngate.service.asked.Asked": "turngate.service.request.RolloutRequest",
    "turngate.service.asked.AskedSwe": "turngate.service.request.SweRolloutRequest",
    "turngate.service.asked.AskedTask": "turngate.service.request.TaskRolloutRequest",
    "turngate.service.asked.Encoded": "turngate.service.request.Base64File",
    "turngate.service.catalog.Choice": "turngate.service.catalog.EndpointChoice",
    "turngate.service.catalog.Kind": "turngate.service.catalog.EndpointKind",
    "turngate.service.config.load": "turngate.service.config.load_config",
    "turngate.service.result.Listing": "turngate.service.result.RolloutList",
    "turngate.service.result.Messages": "turngate.service.result.MessagePage",
    "turngate.service.result.Said": "turngate.service.result.ConversationMessage",
    "turngate.service.result.SaidCall": "turngate.service.result.ConversationToolCall",
    "turngate.service.result.Trouble": "turngate.service.result.ErrorInfo",
    "turngate.service.mcp_tools.Endpoints": "turngate.service.mcp_tools.EndpointList",
    "turngate.service.mcp_tools.Started": "turngate.service.mcp_tools.StartedRollout",
    "turngate.tasks.grading.work.take": "turngate.tasks.grading.work.collect_work",
    "turngate.tasks.load": "turngate.tasks.load_task",
    "turngate.tasks.read": "turngate.tasks.read_tasks",
    "turngate.tasks.said": "turngate.tasks.task_from_prompt",
    "turngate.tasks.task.said": "turngate.tasks.task.task_from_prompt",
    "turngate.trainers.export.Choices": "turngate.trainers.export.ExportChoices",
    "turngate.trainers.export.Exported": "turngate.trainers.export.ExportResult",
    "turngate.trainers.export.Wanted": "turngate.trainers.export.RolloutFilter",
    "turngate.trainers.feed.Damaged": "turngate.client.feed.DamagedDelivery",
    "turngate.trainers.feed.Rolled": "turngate.client.feed.DeliveredRollout",
    "turngate.trainers.local.grpo.NotFinite": "turngate.trainers.local.grpo.NonFiniteGradient",
    "turngate.trainers.local.grpo.NotTheSame": "turngate.trainers.local.grpo.LogprobMismatch",
    "turngate.trainers.local.grpo.Settings": "turngate.trainers.local.grpo.GrpoSettings",
    "turngate.trainers.local.training.Goal": "turngate.trainers.local.training.TrainingGoal",
    "turngate.trainers.local.training.Place": "turngate.trainers.local.training.TrainingEnvironment",
    "turngate.trainers.local.training.opened": "turngate.trainers.local.training.open_environment",
    "turngate.trainers.trl.rows.items": "turngate.trainers.trl.rows.build_items",
    "turngate.trainers.trl.weights.fenced": "turngate.trainers.trl.weights.fence_weight_sync",
    "turngate.verify.Derived": "turngate.verify.ScriptedScorer",
    "turngate.verify.Folder": "turngate.verify.SessionReader",
    "turngate.verify.Means": "turngate.verify.VerifyOptions",
    "turngate.verify.VLLM": "turngate.verify.VLLMScorer",
}
_RENAMED_IN = {old.rpartition(".")[0] for old in NAMES}


class _Finder:
    """An import hook that finds modules by their old names, and adds old names to modules that still exist."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name in MODULES:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        if name not in _RENAMED_IN:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _add_old_names(spec.loader.exec_module)  # type: ignore[method-assign, assignment]
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        _warn(module.__name__, MODULES[module.__name__])
        module.__dict__["__getattr__"] = lambda name: _look_up(module.__name__, name)


def install() -> None:
    """Make the old names importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _add_old_names(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def execute_with_old_names(module: ModuleType) -> None:
        execute(module)
        module.__dict__["__getattr__"] = lambda name: _look_up(module.__name__, name)

    return execute_with_old_names


def _look_up(module: str, name: str) -> Any:
    """Return the value of an old name. In a module that was replaced, names that were not renamed are looked up in the new module."""
    from importlib import import_module

    old = f"{module}.{name}"
    if old in NAMES:
        _warn(old, NAMES[old])
    elif name.startswith("__") or module not in MODULES:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    new_module, _, new_name = NAMES.get(old, f"{MODULES.get(module)}.{name}").rpartition(".")
    return getattr(import_module(new_module), new_name)


def _warn(old: str, new: str) -> None:
    import warnings

    warnings.warn(f"{old} was renamed to {new}; the old name works until 0.2.0", DeprecationWarning, stacklevel=3)
