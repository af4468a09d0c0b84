"""The gateways that the service's rollouts go through: one for each endpoint and mode, in this process, started when it is first needed.

Each has a folder of its own, `DATA/gateways/NAME`, so that its traces are there after a restart, for `turngate show --data` and for
feeds. A `gateway://` entry is one that runs already. That of a caller's own endpoint is stopped when its last rollout is over, and its
folder removed when none of them is remembered any more.
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
from turngate.service.catalog import OWN, Choice
from turngate.service.config import ServiceConfig

log = logging.getLogger("turngate")
MOST = 32  # gateways at once; callers can bring endpoints of their own
Opened = Callable[[str, GatewayClient], Awaitable[None]]


class Reached(msgspec.Struct, frozen=True):
    """A gateway, ready to be used."""

    client: GatewayClient
    connector: GatewayConnector
    model: str  # the name that agents ask for


class _Kept:
    """One gateway, held open by a task of its own: whoever asked for it first need not be who needs it last."""

    def __init__(self, choice: Choice, holding: Callable[[_Kept], Coroutine[None, None, None]]) -> None:
        self.choice = choice
        self.ready: asyncio.Future[Reached] = asyncio.get_running_loop().create_future()
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(holding(self))
        self.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """What kept it from starting is for those who wait for it, if anybody does."""
        error = None if task.cancelled() else task.exception()
        if self.ready.done():
            if error is not None:
                log.error("a gateway of the service broke down", exc_info=error)
        elif error is None:
            self.ready.cancel()
        else:
            self.ready.set_exception(error)
            self.ready.exception()


class Gateways:
    """`engines`: for endpoints whose engine the caller of `Rollouts` made itself, by key. `opened` is called with a gateway's place
    and client before anybody else has it. `close` at the end."""

    def __init__(self, config: ServiceConfig, engines: Mapping[str, Engine], opened: Opened) -> None:
        self._config = config
        self._engines = engines
        self._opened = opened
        self._kept: dict[str, _Kept] = {}
        self._users: Counter[str] = Counter()
        self._stopping: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def reached(self, choice: Choice) -> AsyncIterator[Reached]:
        """The gateway for a choice, at least for as long as the block runs."""
        place = choice.place
        if (kept := self._kept.get(place)) is not None and kept.choice != choice:
            raise BadRequest("endpoint_url: the name of its gateway is another's", param="endpoint_url")
        self._users[place] += 1
        try:
            yield await self._reach(choice)
        finally:
            self._users[place] -= 1
            if not self._users[place]:
                del self._users[place]
                if choice.own and (kept := self._kept.pop(place, None)) is not None:
                    await self._done_at(place, _stopped(kept))

    async def _reach(self, choice: Choice) -> Reached:
        kept = self._kept.get(choice.place)
        if kept is None or kept.task.done():  # the last try failed, or it broke down
            if sum(not one.task.done() for one in self._kept.values()) >= MOST:
                raise BadRequest(f"endpoint_url: {MOST} gateways run already; try again later", param="endpoint_url")
            kept = self._kept[choice.place] = _Kept(choice, lambda own: self._hold(choice, own))
        return await asyncio.shield(kept.ready)

    async def forget(self, remembered: Collection[str]) -> None:
        """Remove the folders of callers' own endpoints, but for those places."""
        folder = Path(self._config.data) / "gateways"
        for path in await asyncio.to_thread(lambda: list(folder.glob(f"{OWN}*"))):
            used = path.name in remembered or path.name in self._users or path.name in self._stopping
            if not used and path.name not in self._kept:
                await self._done_at(path.name, asyncio.to_thread(shutil.rmtree, path, ignore_errors=True))

    async def _done_at(self, place: str, doing: Coroutine[None, None, None]) -> None:
        """Whoever comes next waits for this: two gateways cannot have one folder."""
        stopping = self._stopping[place] = asyncio.create_task(doing)
        await asyncio.wait([stopping])
        if self._stopping.get(place) is stopping:
            del self._stopping[place]

    async def _hold(self, choice: Choice, kept: _Kept) -> None:
        if (stopping := self._stopping.get(choice.place)) is not None:
            await asyncio.wait([stopping])
        async with AsyncExitStack() as stack:
            kept.ready.set_result(await self._open(choice, stack))
            await kept.stop.wait()

    async def _open(self, choice: Choice, stack: AsyncExitStack) -> Reached:
        endpoint = choice.endpoint
        folder = Path(self._config.data) / "gateways" / choice.place
        config = endpoint.serves(choice.mode, str(folder))
        if config is None:
            client = GatewayClient(endpoint.urls[0], _key(endpoint.key_env))
            await stack.enter_async_context(client)
            await client.check()
        else:
            client = await self._start(choice, config, stack)
        await self._opened(choice.place, client)
        connector = GatewayConnector(client.url, self._config.public_url, self._config.tunnel)
        await stack.enter_async_context(connector)
        model = endpoint.served or next(iter(await client.models()), "")
        return Reached(client, connector, model)

    async def _start(self, choice: Choice, config: ServeConfig, stack: AsyncExitStack) -> GatewayClient:
        await asyncio.to_thread(Path(config.data).mkdir, parents=True, exist_ok=True, mode=0o700)
        engine = self._engines.get(choice.endpoint.key)
        if engine is not None and choice.mode != ("gate" if isinstance(engine, Gate) else "exact"):
            engine = None
        if engine is None and config.engine == "local":
            engine = await asyncio.to_thread(_local, config)
        renderer = None if config.engine in OBSERVED_ENGINES else await asyncio.to_thread(_renderer, config)
        address = await stack.enter_async_context(run_embedded(config, engine=engine, renderer=renderer))
        return await stack.enter_async_context(GatewayClient(address.url, address.admin_key))

    async def close(self) -> None:
        await asyncio.gather(*(_stopped(kept) for kept in self._kept.values()), *self._stopping.values())
        self._kept.clear()


async def _stopped(kept: _Kept) -> None:
    kept.stop.set()
    if not kept.ready.done():  # it was still being started
        kept.task.cancel()
    await asyncio.wait([kept.task])


def _renderer(config: ServeConfig) -> tuple[Renderer, Certificate]:
    """Read and certified in a thread: a new tokenizer takes seconds."""
    wanted = config.tokenizer or config.model_folder
    return load_renderer(
        find_tokenizer(wanted) if wanted else BUILTIN_TOKENIZER, model=config.model, family=config.family
    )


def _local(config: ServeConfig) -> Engine:
    """The same of a model, which takes longer."""
    try:
        from turngate.engines.local import LocalEngine
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"endpoints: local:// needs {error.name}: pip install 'turngate[local]'", param="endpoints"
        ) from None
    return LocalEngine(
        find_tokenizer(config.model_folder or config.tokenizer), max_context=config.max_context, served=config.model
    )


def _key(name: str) -> str:
    """The admin key of a gateway that runs already."""
    if not name:
        return read_admin_key()
    key = read_key(name)
    if not key or not key.isprintable():
        raise ConfigError(f"key_env: {name} is not set, or holds no key", param="key_env")
    return key
