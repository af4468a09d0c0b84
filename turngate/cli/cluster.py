"""Run a batch on a Ray cluster: choose the cluster from --ray and --ray-label, and open the executor that runs rollouts there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console

from turngate.cli.options import BatchOptions
from turngate.client.gateway import GatewayClient
from turngate.common.terminal import sanitize_line, say
from turngate.config import ServeConfig
from turngate.errors import ConfigError
from turngate.rollout.cluster.open_cluster import ClusterChoice, open_executor, open_shared_gateway
from turngate.rollout.cluster.placement import parse_labels
from turngate.rollout.executor import AttemptExecutor
from turngate.rollout.plan import BatchPlan


def choose_cluster(options: BatchOptions, config: ServeConfig) -> ClusterChoice | None:
    """Return the Ray cluster that the flags choose, or None without --ray."""
    labels = parse_labels(options.ray_label or ())
    if not options.ray:
        if labels:
            raise ConfigError("ray_label needs a cluster; also pass --ray", param="ray_label")
        if config.is_shared and not options.gateway:
            raise ConfigError(
                "data must be a folder; to use a shared store, also pass --ray, or the URL of a cell as --gateway",
                param="data",
            )
        return None
    for name in ("gateway", "public_url", "tunnel"):
        if getattr(options, name):
            flag = name.replace("_", "-")
            raise ConfigError(
                f"{name} cannot be set with --ray, because each node has its own gateway; remove --{flag}",
                param=name,
            )
    choice = ClusterChoice(address=options.ray, labels=labels, config=config)
    choice.check()
    return choice


@asynccontextmanager
async def start_shared_gateway(config: ServeConfig) -> AsyncIterator[tuple[GatewayClient, bool]]:
    """Start a gateway on the shared store. Like `connect_gateway`, yield a client and whether we started the gateway (always True)."""
    async with open_shared_gateway(config) as client:
        yield client, True


@asynccontextmanager
async def open_batch_executor(
    choice: ClusterChoice | None, plan: BatchPlan, gateway: GatewayClient, console: Console
) -> AsyncIterator[AttemptExecutor | None]:
    """Open the executor that runs a batch on a cluster. Yield None if no cluster is chosen; the batch then runs in this process."""
    if choice is None:
        yield None
        return
    say(console, f"The web page for all nodes: {gateway.url}", "dim")
    async with open_executor(choice, plan, gateway, lambda text: say(console, sanitize_line(text), "dim")) as executor:
        yield executor
