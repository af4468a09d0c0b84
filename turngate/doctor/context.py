"""What is examined: the settings that `turngate serve` would have, and what several checks look at but only one has to fetch."""

from __future__ import annotations

import asyncio

import msgspec

from turngate.config import OBSERVED_ENGINES, ServeConfig
from turngate.engines.base import Engine, Health, Relay
from turngate.render import BUILTIN_TOKENIZER, Certificate, Renderer, find_tokenizer, load_renderer
from turngate.server.engine_factory import build_engine

EXACT = ("vllm", "sglang", "scripted")  # engines that a small call can be made to, at no cost


class Subject:
    """`agents` and `sandboxes`: those that were named; none: all that are known, and what is missing is no failure."""

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
        self._seen: list[tuple[str, Health]] | None = None

    async def renderer(self) -> tuple[Renderer, Certificate]:
        """Of the settings' tokenizer. Raises what `load` raises."""
        async with self._loading:
            if self._loaded is None:
                self._loaded = await asyncio.to_thread(self._load)
            return self._loaded

    def _load(self) -> tuple[Renderer, Certificate]:
        config = self.config
        wanted = config.tokenizer or (config.model_folder if config.engine == "local" else "")
        return load_renderer(
            find_tokenizer(wanted) if wanted else BUILTIN_TOKENIZER, model=config.model, family=config.family
        )

    def urls(self) -> list[str]:
        return list(self.config.engine_url) or [""]

    async def engine(self, url: str) -> Engine:
        """The one at a URL, as the gateway would make it; the caller starts and closes it."""
        engine, _ = await self._made(url)
        assert engine is not None, "it is not only observed"
        return engine

    async def _made(self, url: str) -> tuple[Engine | None, Relay | None]:
        one = msgspec.structs.replace(self.config, engine_url=[url] if url else [])
        renderer = None if self.config.engine in OBSERVED_ENGINES else (await self.renderer())[0]
        return build_engine(one, renderer)

    async def health(self) -> list[tuple[str, Health]]:
        """Every engine, asked once: its URL and what it said."""
        async with self._asking:
            if self._seen is None:
                self._seen = [(url, health) for url in self.urls() for health in await self._ask(url)]
            return self._seen

    async def _ask(self, url: str) -> list[Health]:
        engine, relay = await self._made(url)
        asked = engine or relay
        assert asked is not None, "settings that were checked have one of them"
        await asked.start()
        try:
            return await asked.health()
        finally:
            await asked.close()
