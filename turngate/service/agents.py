"""The agents that the server's settings allow. Callers choose an agent by name; they cannot send an agent file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from turngate.agents import spec as specs
from turngate.agents.install import ensure_installed
from turngate.agents.installation import Installation
from turngate.agents.launch import ModelLimits, plan_launch
from turngate.agents.spec import AgentSpec
from turngate.common.validation import suggestion
from turngate.errors import AgentError, BadRequest, ConfigError
from turngate.service.config import ServiceConfig

log = logging.getLogger("turngate")
_DEFAULT = "mini-swe-agent"
_SHELL = "shell"  # runs its instruction as a shell script, so it is allowed only if the settings name it


class Agents:
    """The allowed agents. Their descriptions are loaded when the service starts. An agent is installed when a rollout first needs it."""

    def __init__(self, config: ServiceConfig) -> None:
        agents = [specs.find_agent(name) for name in config.agents] or [
            agent for name, agent in specs.load_catalog().items() if name != _SHELL
        ]
        self._specs = {agent.spec.name: agent.spec for agent in agents}
        self._options = config.agent_options
        self._default = config.agent or (next(iter(self._specs)) if config.agents else _DEFAULT)
        self._installing: dict[str, asyncio.Task[Installation]] = {}
        self._install_lock = asyncio.Lock()  # several agents may need the same Node.js
        if self._default not in self._specs:
            raise ConfigError(
                f"agent: {self._default!r} is not an allowed agent{suggestion(self._default, list(self._specs))}",
                param="agent",
            )
        for name in config.agent_options:
            if name not in self._specs:
                raise ConfigError(
                    f"agent_options.{name} does not name an allowed agent (allowed: {', '.join(self._specs)})",
                    param="agent_options",
                )
        for spec in self._specs.values():
            self.check(spec, "x", ConfigError)

    @property
    def names(self) -> list[str]:
        """The names of all allowed agents, with the default agent first."""
        return [self._default, *(name for name in self._specs if name != self._default)]

    def find(self, name: str) -> AgentSpec:
        """Return the agent with a given name, or the default agent if the name is empty. Raise `BadRequest` if the agent is not allowed."""
        spec = self._specs.get(name or self._default)
        if spec is None:
            raise BadRequest(
                f"agent {name[:80]!r} is not allowed on this server; choose one of {', '.join(self._specs)}",
                param="agent",
            )
        return spec

    def options(self, spec: AgentSpec) -> Mapping[str, str]:
        return self._options.get(spec.name, {})

    def check(
        self, spec: AgentSpec, instruction: str, wrong: type[BadRequest] | type[ConfigError] = BadRequest
    ) -> None:
        """Raise an error of type `wrong` if the agent cannot be started with this instruction and its configured options."""
        blank = {"base_url": "", "api_key": "", "model": "", "home": "", "workdir": ""}
        try:
            plan_launch(
                spec, Installation(), prompt=instruction, limits=ModelLimits(), options=self.options(spec), **blank
            )
        except AgentError as error:
            param = "instruction" if wrong is BadRequest else "agents"
            raise wrong(f"{param}: {error.message}", param=param) from None

    async def install(self, spec: AgentSpec) -> Installation:
        """Install an agent unless it is already installed. Rollouts share one installation, so cancelling a rollout does not stop it."""
        task = self._installing.get(spec.name)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._installing[spec.name] = asyncio.create_task(self._install(spec))
            task.add_done_callback(_ignore_error)
        return await asyncio.shield(task)

    async def _install(self, spec: AgentSpec) -> Installation:
        async with self._install_lock:
            return await asyncio.to_thread(ensure_installed, spec, lambda line: log.info("%s", line))

    async def close(self) -> None:
        """Wait until running installations are done, because they cannot be interrupted."""
        pending = [task for task in self._installing.values() if not task.done()]
        if pending:
            await asyncio.wait(pending)


def _ignore_error(task: asyncio.Task[Installation]) -> None:
    """Keep asyncio from logging the error of a failed installation. `install` raises it in the rollouts that are waiting for the agent."""
    if not task.cancelled():
        task.exception()
