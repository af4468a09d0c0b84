"""The input to the checks: the settings of `turngate serve`, and objects that several checks use, such as the renderer."""

from __future__ import annotations

import asyncio

import msgspec

from turngate.config import ServeConfig
from turngate.engines.base import Engine, Health, Relay
from turngate.errors import TurngateError
from turngate.render import BUILTIN_TOKENIZER, Certificate, Renderer, find_tokenizer, load_renderer
from turngate.server.engine_factory import build_engine

TEST_CALL_ENGINES = ("vllm", "sglang", "scripted")  # a small call to these engines costs nothing


class NotChecked(Exception):
    """Raised by a check that cannot run because of a problem that another check reports."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix


class DoctorContext:
    """The settings to check, and objects that are loaded once for several checks.

    `agents` and `sandboxes` contain the names that the user passed. Without names, all agents and all local kinds of sandbox are checked,
    and missing ones are not reported as failures.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        gateway: str = "",
        admin_key: str = "",
        agents: tuple[str, ...] = (),
        sandboxes: tuple[str, ...] = (),
        image: str = "",
    ) -> None:
        self.config = config
        self.gateway = gateway
        self.admin_key = admin_key
        self.agents = agents
        self.sandboxes = sandboxes
        self.image = image
        self._loading = asyncio.Lock()
        self._loaded: tuple[Renderer, Certificate] | None = None
        self._asking = asyncio.Lock()
        self._health: list[tuple[str, Health]] | None = None

    async def renderer(self) -> tuple[Renderer, Certificate]:
        """Return the renderer of the configured tokenizer, and its certificate. Raise `TurngateError` or `OSError` if loading fails."""
        async with self._loading:
            if self._loaded is None:
                self._loaded = await asyncio.to_thread(self._load)
            return self._loaded

    async def require_renderer(self) -> Renderer:
        """Return the renderer. If it cannot be loaded, raise `NotChecked`, because the check `template` reports the failure."""
        try:
            renderer, _ = await self.renderer()
        except (TurngateError, OSError):
            raise NotChecked(
                "the tokenizer cannot be loaded", "fix the failure that the check `template` reports"
            ) from None
        return renderer

    def _load(self) -> tuple[Renderer, Certificate]:
        config = self.config
        name = config.tokenizer or (config.model_folder if config.engine == "local" else "")
        return load_renderer(
            find_tokenizer(name) if name else BUILTIN_TOKENIZER, model=config.model, family=config.family
        )

    def urls(self) -> list[str]:
        """Return the URLs of the engines. If none is set, return a list with one empty string."""
        return list(self.config.engine_url) or [""]

    async def engine(self, url: str) -> Engine:
        """Build the engine object for a URL, as the gateway does. The caller must start and close it."""
        engine, _ = await self._build_engine(url)
        assert engine is not None, "observed engines have no engine object"
        return engine

    async def _build_engine(self, url: str) -> tuple[Engine | None, Relay | None]:
        config = msgspec.structs.replace(self.config, engine_url=[url] if url else [])
        renderer = await self.require_renderer() if self.config.engine == "scripted" else None
        return build_engine(config, renderer)

    async def health(self) -> list[tuple[str, Health]]:
        """Return the URL and the health of every engine.

        The answers are cached, so each engine is asked only once, unless an error is raised.
        """
        async with self._asking:
            if self._health is None:
                self._health = [(url, health) for url in self.urls() for health in await self._ask(url)]
            return self._health

    async def _ask(self, url: str) -> list[Health]:
        engine, relay = await self._build_engine(url)
        target = engine or relay
        assert target is not None, "valid settings always define an engine or a relay"
        await target.start()
        try:
            return await target.health()
        finally:
            await target.close()
