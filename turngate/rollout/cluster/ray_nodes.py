"""Access to Ray: connect to a cluster, list its nodes, start cell actors, and await calls.

No other module in this folder imports Ray. Ray has no documented function that returns the free resources of each node or the draining
nodes. This module therefore uses two private functions, which Ray's own libraries also use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from turngate.errors import ConfigError, TurngateError
from turngate.rollout.cluster.cell_actor import CellActor
from turngate.rollout.cluster.placement import SLOTS, Demand, RayNodeView

NAMESPACE = "turngate"
_MAX_CALLS = 100_000  # maximum number of concurrent calls to an actor; Ray's default is 1,000
_DRAIN_QUERY_S = 5


class CallFailed(TurngateError):
    """A call to an actor failed. The actor may have executed it nevertheless."""

    boundary = "sandbox"
    kind = "call_failed"

    def __init__(self, message: str, *, actor_died: bool = False) -> None:
        super().__init__(message)
        self.actor_died = actor_died  # whether Ray reports the actor as dead, so that further calls would fail, too


class RayConnection:
    """The connection of this process to a Ray cluster."""

    def __init__(self, address: str) -> None:
        """Import Ray. `address` is `auto` (this machine's cluster), HOST:PORT, or ray://HOST:PORT for a driver outside the cluster."""
        try:
            import ray
            import ray.exceptions
            from ray._private import state
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"ray: running on a cluster needs {error.name}; run `pip install 'turngate[ray]'`", param="ray"
            ) from None
        self._ray, self._state, self._affinity = ray, state, NodeAffinitySchedulingStrategy
        self._address = address or "auto"
        self._failures = (ray.exceptions.RayError, ConnectionError)
        self._died = ray.exceptions.ActorDiedError

    async def open(self) -> None:
        def connect() -> None:
            logging.getLogger("ray").setLevel(logging.ERROR)
            self._ray.init(
                address=self._address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )

        try:
            await asyncio.to_thread(connect)  # Ray replaces signal handlers only in the main thread
        except (*self._failures, RuntimeError, ValueError, OSError) as error:
            first = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"ray: no connection to Ray at {self._address!r} ({first}); start a cluster with `ray start --head`, or pass "
                "the address of a running cluster",
                param="ray",
            ) from None

    async def close(self) -> None:
        await asyncio.to_thread(self._ray.shutdown)

    async def list_nodes(self) -> list[RayNodeView]:
        """Return the live nodes with their free resources."""
        return await asyncio.to_thread(self._list_nodes)

    def _list_nodes(self) -> list[RayNodeView]:
        free: Mapping[str, Mapping[str, float]] = self._state.available_resources_per_node()
        draining = self._list_draining()
        return [
            parse_node(node, free.get(node["NodeID"], {}), is_draining=node["NodeID"] in draining)
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def _list_draining(self) -> set[str]:
        client = getattr(self._ray._private.worker.global_worker, "gcs_client", None)
        if client is None:  # a driver outside the cluster, connected with ray://
            return set()
        return {*client.get_draining_nodes(timeout=_DRAIN_QUERY_S)}

    def start_actor(self, node: RayNodeView, slots: int, demand: Demand, settings: bytes) -> Any:
        """Create the actor of a cell on a node. The actor reserves the resources of all its slots, so no other Ray job can use them."""
        options: dict[str, Any] = {
            "num_cpus": slots * demand.cpus_on(node),
            "memory": slots * demand.memory_bytes or None,
            "resources": {SLOTS: slots} if node.slots is not None else None,
            "max_concurrency": _MAX_CALLS,
            "max_restarts": 0,  # a new actor is created instead, with a new cell
            "scheduling_strategy": self._affinity(node_id=node.id, soft=False),
        }
        return self._ray.remote(CellActor).options(**options).remote(settings)

    def put(self, data: bytes) -> Any:
        """Store bytes in the cluster's object store, and return a reference to them."""
        return self._ray.put(data)

    def kill(self, actor: Any) -> None:
        self._ray.kill(actor, no_restart=True)

    async def call(self, reference: Any) -> Any:
        """Wait for the result of a call. Raise `CallFailed` if the call fails. Cancelling this method does not cancel the call."""
        calling = asyncio.wrap_future(reference.future())
        # Mark the exception as retrieved.
        calling.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        try:
            return await asyncio.shield(calling)
        except self._failures as error:
            lines = str(error).strip().splitlines() or [""]
            died = isinstance(error, self._died)
            raise CallFailed(f"{type(error).__name__}: {lines[-1][:300]}", actor_died=died) from None


def parse_node(node: Mapping[str, Any], free: Mapping[str, float], *, is_draining: bool) -> RayNodeView:
    """Build the view of a node from an entry of `ray.nodes()` and its free resources."""
    total = node["Resources"]
    return RayNodeView(
        id=node["NodeID"],
        name=node.get("NodeName") or node["NodeManagerAddress"],
        cpus=free.get("CPU", 0.0),
        memory_bytes=free.get("memory", 0.0),
        slots=int(free.get(SLOTS, 0)) if SLOTS in total else None,
        labels=dict(node.get("Labels") or {}),
        is_draining=is_draining,
    )
