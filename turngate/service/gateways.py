"""The service's gateways: one for each endpoint and mode. They run in this process and are started when first needed.

Each gateway has its own folder, `DATA/gateways/NAME`. Traces survive a restart, and `turngate show --data` can read them. A
`gateway://` entry in the catalog stands for a gateway that is already running; the service does not start one. The gateway of a caller's
own endpoint stops when its last rollout ends. Its folder is deleted when the service forgets the last rollout that used the gateway.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from turngate.client.gateway import GatewayClient
from turngate.client.keys import read_admin_key, read_key
from turngate.config import OBSERVED_ENGINES, ServeConfig
from turngate.engines.base import Engine
from turngate.engines.gate import Gate
from turngate.errors import BadRequest, ConfigError
from turngate.render import BUILTIN_TOKENIZER, Certificate, Renderer, find_tokenizer, load_renderer
from turngate.rollout.connection import GatewayConnector
from turngate.server.run import run_embedded
from turngate.service.catalog import CUSTOM_PREFIX, EndpointChoice
from turngate.service.config import ServiceConfig

log = logging.getLogger("turngate")
MAX_GATEWAYS = 32  # maximum number of running gateways; needed because callers can use their own endpoints
OnOpen = Callable[[str, GatewayClient], Awaitable[None]]


class GatewayConnection(msgspec.Struct, frozen=True):
    """An open connection to a running gateway."""

    client: GatewayClient
    connector: GatewayConnector
    model: str  # the model name that agents request


class _RunningGateway:
    """A gateway that is starting or running.

    A separate task keeps the gateway open, because the rollout that started it may end before other rollouts that use it.
    """

    def __init__(
        self, choice: EndpointChoice, keep_open: Callable[[_RunningGateway], Coroutine[None, None, None]]
    ) -> None:
        self.choice = choice
        self.ready: asyncio.Future[GatewayConnection] = asyncio.get_running_loop().create_future()
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(keep_open(self))
        self.task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """If the gateway failed to start, pass the error to the rollouts that are waiting for it. If it failed later, log the error."""
        error = None if task.cancelled() else task.exception()
        if self.ready.done():
            if error is not None:
                log.error("the service's gateway %s failed", self.choice.gateway_name, exc_info=error)
        elif error is None:
            self.ready.cancel()
        else:
            self.ready.set_exception(error)
            self.ready.exception()


class Gateways:
    """Starts gateways when they are needed, and keeps track of those that are running. Call `close` when done.

    `engines` maps catalog keys to engines that run in this process. `on_open` is called with the name and the client of every gateway
    before rollouts use it.
    """

    def __init__(self, config: ServiceConfig, engines: Mapping[str, Engine], on_open: OnOpen) -> None:
        self._config = config
        self._engines = engines
        self._on_open = on_open
        self._running: dict[str, _RunningGateway] = {}
        self._users: Counter[str] = Counter()
        self._stopping: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def connect(self, choice: EndpointChoice) -> AsyncIterator[GatewayConnection]:
        """Connect to the gateway of an endpoint and mode, and start it if necessary. It keeps running at least until the block ends."""
        name = choice.gateway_name
        if (gateway := self._running.get(name)) is not None and gateway.choice != choice:
            raise BadRequest(
                "endpoint_url conflicts with a different endpoint whose gateway has the same name; choose a different endpoint_url",
                param="endpoint_url",
            )
        self._users[name] += 1
        try:
            yield await self._get_or_start(choice)
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                if choice.is_custom and (gateway := self._running.pop(name, None)) is not None:
                    await self._block_start(name, _stop(gateway))

    async def _get_or_start(self, choice: EndpointChoice) -> GatewayConnection:
        gateway = self._running.get(choice.gateway_name)
        if gateway is None or gateway.task.done():  # not started yet, or it has failed
            self._require_room(choice)
            gateway = _RunningGateway(choice, lambda own: self._keep_open(choice, own))
            self._running[choice.gateway_name] = gateway
        return await asyncio.shield(gateway.ready)

    def _require_room(self, choice: EndpointChoice) -> None:
        """Raise `BadRequest` if no more gateways may be started. The gateways of catalog endpoints run until the service stops."""
        running = [gateway for gateway in self._running.values() if not gateway.task.done()]
        if len(running) < MAX_GATEWAYS:
            return
        later = "try again when a rollout with its own endpoint_url has ended"
        if not any(gateway.choice.is_custom for gateway in running):
            later = "ask the operator to restart the service, which stops the gateways of unused endpoints"
        raise BadRequest(
            f"this endpoint needs a new gateway, but {MAX_GATEWAYS} gateways, the maximum, are already running; use an endpoint and mode "
            f"that have a gateway, or {later}",
            param="endpoint_url" if choice.is_custom else "model_key",
        )

    async def delete_unused(self, needed: Collection[str]) -> None:
        """Delete the folders of gateways for callers' own endpoints. Keep those of gateways that are in use or named in `needed`."""
        folder = Path(self._config.data) / "gateways"
        for path in await asyncio.to_thread(lambda: list(folder.glob(f"{CUSTOM_PREFIX}*"))):
            is_used = path.name in needed or path.name in self._users or path.name in self._stopping
            if not is_used and path.name not in self._running:
                await self._block_start(path.name, asyncio.to_thread(shutil.rmtree, path, ignore_errors=True))

    async def _block_start(self, name: str, work: Coroutine[None, None, None]) -> None:
        """Await `work`, which uses a gateway's folder. A gateway with this name does not start before `work` is done."""
        stopping = self._stopping[name] = asyncio.create_task(work)
        await asyncio.wait([stopping])
        if self._stopping.get(name) is stopping:
            del self._stopping[name]

    async def _keep_open(self, choice: EndpointChoice, gateway: _RunningGateway) -> None:
        if (stopping := self._stopping.get(choice.gateway_name)) is not None:
            await asyncio.wait([stopping])
        async with AsyncExitStack() as stack:
            gateway.ready.set_result(await self._open(choice, stack))
            await gateway.stop.wait()

    async def _open(self, choice: EndpointChoice, stack: AsyncExitStack) -> GatewayConnection:
        endpoint = choice.endpoint
        folder = Path(self._config.data) / "gateways" / choice.gateway_name
        config = endpoint.gateway_config(choice.mode, str(folder))
        if config is None:
            client = GatewayClient(endpoint.urls[0], _admin_key(endpoint.key_env))
            await stack.enter_async_context(client)
            await client.check()
        else:
            client = await self._start(choice, config, stack)
        await self._on_open(choice.gateway_name, client)
        connector = GatewayConnector(client.url, self._config.public_url, self._config.tunnel)
        await stack.enter_async_context(connector)
        model = endpoint.served or next(iter(await client.models()), "")
        return GatewayConnection(client, connector, model)

    async def _start(self, choice: EndpointChoice, config: ServeConfig, stack: AsyncExitStack) -> GatewayClient:
        await asyncio.to_thread(Path(config.data).mkdir, parents=True, exist_ok=True, mode=0o700)
        engine = self._engines.get(choice.endpoint.key)
        if engine is not None and choice.mode != ("gate" if isinstance(engine, Gate) else "exact"):
            engine = None
        if engine is None and config.engine == "local":
            engine = await asyncio.to_thread(_load_local_engine, config)
        renderer = None if config.engine in OBSERVED_ENGINES else await asyncio.to_thread(_load_renderer, config)
        address = await stack.enter_async_context(run_embedded(config, engine=engine, renderer=renderer))
        return await stack.enter_async_context(GatewayClient(address.url, address.admin_key))

    async def close(self) -> None:
        await asyncio.gather(*(_stop(gateway) for gateway in self._running.values()), *self._stopping.values())
        self._running.clear()


async def _stop(gateway: _RunningGateway) -> None:
    gateway.stop.set()
    if not gateway.ready.done():  # the gateway is still starting
        gateway.task.cancel()
    await asyncio.wait([gateway.task])


def _load_renderer(config: ServeConfig) -> tuple[Renderer, Certificate]:
    """Load a renderer and certify its chat template. This blocks, and takes several seconds if the tokenizer is new."""
    name = config.tokenizer or config.model_folder
    return load_renderer(find_tokenizer(name) if name else BUILTIN_TOKENIZER, model=config.model, family=config.family)


def _load_local_engine(config: ServeConfig) -> Engine:
    """Load a local model into an engine. This may block for a long time."""
    try:
        from turngate.engines.local import LocalEngine
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"local:// endpoints need {error.name}; run `pip install 'turngate[local]'`", param="endpoints"
        ) from None
    return LocalEngine(
        find_tokenizer(config.model_folder or config.tokenizer), max_context=config.max_context, served=config.model
    )


def _admin_key(name: str) -> str:
    """Read the admin key of a running gateway from the environment variable `name`, or from `TURNGATE_ADMIN_KEY` if `name` is empty."""
    if not name:
        return read_admin_key()
    key = read_key(name)
    if not key or not key.isprintable():
        problem = "contains unprintable characters" if key else "is not set"
        raise ConfigError(
            f"key_env names the environment variable {name}, which {problem}; set {name} to the gateway's admin key",
            param="key_env",
        )
    return key
