"""Training on a Ray cluster: agents run in cells on its nodes, while the engine and the trainer run in this process.

    cells (agents → gateway) ──HTTP──► engine server ─► engine ◄─ trainer
       └────────► shared store ─► gateway of this process ─► feed ──┘

During a weight update, new calls wait at the fence of the shared store. The update uses the mode `drain`: it first waits until the calls in
flight have ended in every cell that may still be serving. Each call is therefore sampled with the weights of a single version, whichever
machine it comes from.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path

import msgspec

from turngate.client.gateway import GatewayClient
from turngate.config import ServeConfig
from turngate.errors import ConfigError
from turngate.rollout.cluster.open_cluster import ClusterChoice, open_executor, open_shared_gateway
from turngate.rollout.cluster.ray_executor import RayExecutor
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.plan import BatchPlan
from turngate.trainers.local.engine_server import EngineServer
from turngate.trainers.local.training import TimedEngine, TrainingEnvironment

KEY_VARIABLE = "TURNGATE_TRAINING_ENGINE_KEY"  # in the environment of the cells
NAME_FILE = "cluster-name"  # in the run folder
_SILENCE_S = 3600.0  # a call may wait a long time for a free slot in a small engine


class TrainingCluster(msgspec.Struct, frozen=True, kw_only=True):
    """The Ray cluster on which the agents of a training run are started."""

    address: str = "auto"  # address of the Ray cluster
    labels: Mapping[str, str] = {}  # labels that a node must have to run agents
    engine_host: str = ""  # address at which nodes reach this machine; empty for its address on the default route
    note: Callable[[str], None] = lambda text: None


@asynccontextmanager
async def open_cluster_environment(
    config: ServeConfig, engine: TimedEngine, cluster: TrainingCluster
) -> AsyncIterator[TrainingEnvironment]:
    """Serve the engine, start a gateway on the shared store, and yield an environment that runs agents on the cluster.

    `config.data` is the URL of the store.
    """
    key = secrets.token_urlsafe(32)
    await engine.start()
    try:
        async with EngineServer(engine, key, host=cluster.engine_host or find_own_address()) as server:
            cells = msgspec.structs.replace(
                config,
                engine="sglang",
                engine_url=[server.url],
                engine_key_env=KEY_VARIABLE,
                engine_silence_s=_SILENCE_S,
                model_folder="",
                max_context=engine.max_context,
            )
            choice = ClusterChoice(
                address=cluster.address, labels=cluster.labels, config=cells, environment={KEY_VARIABLE: key}
            )
            choice.check()
            # This process's gateway samples nothing. Its pool contains only the engines that the shared store lists.
            own = msgspec.structs.replace(config, engine="sglang", model_folder="")
            async with (
                open_shared_gateway(own) as gateway,
                GatewayConnector(gateway.url) as connector,
            ):
                await _refuse_other_engines(gateway)

                def open_batch(plan: BatchPlan) -> AbstractAsyncContextManager[RayExecutor]:
                    return open_executor(choice, plan, gateway, cluster.note)

                yield TrainingEnvironment(engine, gateway, connector, open_batch, "drain")
    finally:
        await engine.close()


async def _refuse_other_engines(gateway: GatewayClient) -> None:
    """Raise `ConfigError` if the shared store lists engines. Cells would use them, but the trainer does not update their weights."""
    if others := [engine.url for engine in (await gateway.engines()).engines]:
        raise ConfigError(
            f"data: this database lists engine {others[0]}, which would sample with weights that this run does not train; "
            "remove it with `turngate engines remove`, or use a separate database for this run",
            param="data",
        )


def find_own_address() -> str:
    """Return the address that this machine uses on its default route, or 127.0.0.1 if it has no default route."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation; nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def name_run(folder: Path) -> str:
    """Return the name that a run uses for its groups and its feed in the shared store.

    The name contains a random part, because other runs may use the same store. The name is stored in the run's folder.
    """
    file = folder / NAME_FILE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(f"train-{secrets.token_hex(4)}")
    return file.read_text().strip()
