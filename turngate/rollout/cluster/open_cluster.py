"""Open the executor of a batch on a Ray cluster: connect to Ray, and run cells on its nodes until the batch ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from turngate.client.gateway import GatewayClient
from turngate.common.aio import run_to_completion, wait_for_tasks
from turngate.common.database_url import is_database_url, parse_database_url
from turngate.config import ServeConfig, explain_unreadable_script
from turngate.errors import ConfigError
from turngate.rollout.cluster.messages import RunnerSettings
from turngate.rollout.cluster.placement import measure_demand
from turngate.rollout.cluster.ray_cluster import RayCluster
from turngate.rollout.cluster.ray_executor import RayExecutor
from turngate.rollout.cluster.ray_nodes import RayConnection
from turngate.rollout.plan import BatchPlan
from turngate.server.run import run_embedded

# Settings that cells do not get, or get as separate fields of `RunnerSettings`.
_OWN_SETTINGS = ("host", "port", "data", "script", "log_format", "spans", "shared", "cell_name")


class ClusterChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The Ray cluster that a batch runs on, and the settings of the batch's gateways."""

    address: str = "auto"  # the address of the Ray cluster
    labels: Mapping[str, str] = {}  # labels that nodes must have
    config: ServeConfig  # settings of the cells and of the driver's gateway; `data` is the URL of the shared store
    environment: Mapping[str, str] = {}  # variables of the cells' gateways, such as the key of the driver's engine

    def check(self) -> None:
        """Raise `ConfigError` if `config.data` is not the URL of a shared store."""
        if not is_database_url(self.config.data):
            raise ConfigError(
                f"data must be the URL of a PostgreSQL database that all nodes can reach, such as postgresql://user@host/turngate, not "
                f"{self.config.data!r}; a batch on a Ray cluster has no data folder",
                param="data",
            )

    def runner_settings(self, plan: BatchPlan) -> RunnerSettings:
        """Return the settings of the cells. Each node reads the database's password from PGPASSWORD, PGPASSFILE or ~/.pgpass."""
        config = self.config
        return RunnerSettings(
            shared=strip_password(parse_database_url(config.data).value),
            name="",
            folder="",
            sandbox=plan.backend.name,
            sandbox_settings=dict(plan.backend.settings),
            gateway=collect_settings(config),
            script=_read_script(config.script),
            environment=dict(self.environment),
        )


def strip_password(url: str) -> str:
    """Return the URL of a database without its password, but with options such as `sslmode`."""
    parts = urlsplit(url)
    user, at, place = parts.netloc.rpartition("@")
    options = [(name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if name != "password"]
    query = f"?{urlencode(options)}" if options else ""
    return f"{parts.scheme}://{user.partition(':')[0]}{at}{place}{parts.path}{query}"


def collect_settings(config: ServeConfig) -> dict[str, object]:
    """Return the settings that are sent to all cells. A setting that has its default value is left out."""
    defaults = ServeConfig()
    return {
        name: value
        for name in ServeConfig.__struct_fields__
        if name not in _OWN_SETTINGS and (value := getattr(config, name)) != getattr(defaults, name)
    }


def _read_script(path: str) -> str:
    try:
        return Path(path).read_text() if path else ""
    except OSError as error:
        raise explain_unreadable_script(path, error) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"script {path} is not UTF-8 text: {error}", param="script") from None


@asynccontextmanager
async def open_shared_gateway(config: ServeConfig) -> AsyncIterator[GatewayClient]:
    """Run the driver's gateway for the duration of the block, and yield a client for it.

    The gateway serves groups, feeds and the web page from the shared store. If `config.data` names a project, the gateway still serves the
    whole store, but the client uses only that project.
    """
    url = parse_database_url(config.data)
    if url.project:
        config = msgspec.structs.replace(config, data=url.value)
    async with (
        run_embedded(config) as address,
        GatewayClient(address.url, address.admin_key, url.project) as client,
    ):
        await client.check()  # reports an unknown project before anything is started
        yield client


@asynccontextmanager
async def open_executor(
    choice: ClusterChoice, plan: BatchPlan, gateway: GatewayClient, note: Callable[[str], None]
) -> AsyncIterator[RayExecutor]:
    """Run cells on the cluster's nodes for the duration of the block, and yield an executor that uses them.

    `gateway` serves the shared store.
    """
    choice.check()
    connection = RayConnection(choice.address)
    settings = await asyncio.to_thread(choice.runner_settings, plan)
    await connection.open()
    try:
        demand = measure_demand(plan.tasks, plan.resources, choice.labels)
        cluster = RayCluster(connection, settings, demand, plan.bounds.running, note)
        keeping = asyncio.create_task(cluster.run())
        try:
            yield RayExecutor(cluster, gateway, plan.tasks, gateway.project)
        finally:
            keeping.cancel()
            await run_to_completion(wait_for_tasks(keeping))
    finally:
        await run_to_completion(connection.close())
