"""The agents that callers may use: a list of names that the server's settings allow. A caller never names a file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from turngate.agents import spec as specs
from turngate.agents.install import Installation, ensure_installed
from turngate.agents.launch import ModelLimits, plan_launch
from turngate.agents.spec import AgentSpec
from turngate.common.validation import suggestion
from turngate.errors import AgentError, BadRequest, ConfigError
from turngate.service.config import ServiceConfig

log = logging.getLogger("turngate")
_DEFAULT = "mini-swe-agent"
_SHELL = "shell"  # runs what it is told; only where the settings name it


class Agents:
    """Read when the service starts. An agent is installed when the first rollout needs it."""

    def __init__(self, config: ServiceConfig) -> None:
        found = [specs.find_agent(name) for name in config.agents] or [
            one for name, one in specs.load_catalog().items() if name != _SHELL
        ]
        self._specs = {one.spec.name: one.spec for one in found}
        self._options = config.agent_options
        self._default = config.agent or (next(iter(self._specs)) if config.agents else _DEFAULT)
        self._making: dict[str, asyncio.Task[Installation]] = {}
        self._one_at_a_time = asyncio.Lock()  # several may need the same Node
        if self._default not in self._specs:
            raise ConfigError(
                f"agent: {config.agent!r} is none of {', '.join(self._specs)}{suggestion(config.agent, list(self._specs))}",
                param="agent",
            )
        for name in config.agent_options:
            if name not in self._specs:
                raise ConfigError(
                    f"agent_options.{name}: there is no such agent among {', '.join(self._specs)}",
                    param="agent_options",
                )
        for spec in self._specs.values():
            self.check(spec, "x", ConfigError)

    @property
    def names(self) -> list[str]:
        """The default first."""
        return [self._default, *(name for name in self._specs if name != self._default)]

    def named(self, name: str) -> AgentSpec:
        """The one of that name, or the default. `BadRequest` lists those that there are."""
        found = self._specs.get(name or self._default)
        if found is None:
            raise BadRequest(
                f"agent: {name[:80]!r} is not allowed here; there are {', '.join(self._specs)}", param="agent"
            )
        return found

    def options(self, spec: AgentSpec) -> Mapping[str, str]:
        return self._options.get(spec.name, {})

    def check(
        self, spec: AgentSpec, instruction: str, wrong: type[BadRequest] | type[ConfigError] = BadRequest
    ) -> None:
        """That an instruction can be passed on to it at all."""
        dry = {"base_url": "", "api_key": "", "model": "", "home": "", "workdir": ""}
        try:
            plan_launch(
                spec, Installation(), prompt=instruction, limits=ModelLimits(), options=self.options(spec), **dry
            )
        except AgentError as error:
            param = "instruction" if wrong is BadRequest else "agents"
            raise wrong(f"{param}: {error.message}", param=param) from None

    async def installed(self, spec: AgentSpec) -> Installation:
        """Its installation. One is made for all who wait for it; whoever is cancelled leaves it to the others."""
        making = self._making.get(spec.name)
        if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
            making = self._making[spec.name] = asyncio.create_task(self._ensured(spec))
            making.add_done_callback(_seen)
        return await asyncio.shield(making)

    async def _ensured(self, spec: AgentSpec) -> Installation:
        async with self._one_at_a_time:
            return await asyncio.to_thread(ensure_installed, spec, lambda line: log.info("%s", line))

    async def close(self) -> None:
        """An installation that is being made cannot be broken off; it is waited for."""
        pending = [making for making in self._making.values() if not making.done()]
        if pending:
            await asyncio.wait(pending)


def _seen(task: asyncio.Task[Installation]) -> None:
    """A failure is told to those who wait; nobody else need hear of it."""
    if not task.cancelled():
        task.exception()
