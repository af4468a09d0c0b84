"""Decide how many rollouts fit on a node, and which cell runs the next one. No I/O, and no import of Ray.

A rollout takes one slot of a cell. The free CPUs and memory of a node limit its number of slots. A node can also set a limit with the Ray
resource `turngate_slots`:

    ray start --address=HEAD:6379 --resources='{"turngate_slots": 64}' --labels=pool=docker

If neither the batch nor any of its tasks sets a CPU limit, rollouts reserve no CPUs on a node with this resource, and one CPU each on other
nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from turngate.errors import ConfigError
from turngate.sandboxes.base import Resources
from turngate.tasks.task import Task

SLOTS = "turngate_slots"  # the Ray resource with which a node limits its slots
_BROKEN_AFTER = 3  # a cell with this many infrastructure faults in a row is used only if the others are full


class RayNodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A live node of the cluster, with the free resources that Ray reports."""

    id: str
    name: str  # host name or address, shown to people
    cpus: float = 0.0  # free
    memory_bytes: float = 0.0  # free
    slots: int | None = None  # free; None if the node does not declare the resource
    labels: Mapping[str, str] = {}
    is_draining: bool = False


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What a node must have to run a rollout of the batch: free CPUs, free memory, and labels."""

    cpus: float | None = None  # None: no limit is set; a rollout then takes one CPU on a node that declares no slots
    memory_mb: int | None = None
    labels: Mapping[str, str] = {}  # labels that the node must have

    def cpus_on(self, node: RayNodeView) -> float:
        """Return how many CPUs each rollout takes on this node."""
        if self.cpus is not None:
            return self.cpus
        return 1.0 if node.slots is None else 0.0

    @property
    def memory_bytes(self) -> float:
        return (self.memory_mb or 0) * 1e6


def measure_demand(tasks: Iterable[Task], resources: Resources, labels: Mapping[str, str]) -> Demand:
    """Return the resources that suffice for every task. Settings of the batch override those of its tasks, as they do in sandboxes."""
    cpus = [resources.cpus] if resources.cpus else [task.cpus for task in tasks]
    memory = [resources.memory_mb] if resources.memory_mb else [task.memory_mb for task in tasks]
    return Demand(
        cpus=max((one for one in cpus if one is not None), default=None),
        memory_mb=max((one for one in memory if one is not None), default=None),
        labels=labels,
    )


def parse_labels(given: Iterable[str]) -> dict[str, str]:
    """Parse labels of the form NAME=VALUE. Raise `ConfigError` if a label has a different form."""
    labels = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(f"ray_label must be NAME=VALUE, not {text!r}", param="ray_label")
        labels[name] = value
    return labels


def count_slots(node: RayNodeView, demand: Demand) -> int:
    """Return how many rollouts fit into the free resources of a node."""
    if explain_mismatch(node, demand):
        return 0
    bounds = [math.inf if node.slots is None else node.slots]
    if cpus := demand.cpus_on(node):
        bounds.append(math.floor(node.cpus / cpus + 1e-6))
    if demand.memory_mb:
        bounds.append(math.floor(node.memory_bytes / demand.memory_bytes + 1e-6))
    return int(min(bounds))


def explain_mismatch(node: RayNodeView, demand: Demand) -> str:
    """Return why a node cannot run the rollouts of a batch, whatever its resources. Return an empty string if there is no such reason."""
    if node.is_draining:
        return f"{node.name} is draining"
    for name, value in demand.labels.items():
        if node.labels.get(name) != value:
            return f"{node.name} has no label {name}={value}"
    return ""


def explain_no_room(nodes: Iterable[RayNodeView], demand: Demand) -> str:
    """Return why no node has room for a rollout, and what to change."""
    reasons = [explain_mismatch(node, demand) or _explain_full(node, demand) for node in nodes]
    shown = "; ".join(reasons[:5]) + (f"; and {len(reasons) - 5} more" if len(reasons) > 5 else "")
    return (
        f"no node of the Ray cluster has room for a rollout: {shown or 'the cluster has no live node'}; start more nodes, or "
        "lower the requirements (on the command line: --cpus, --memory-mb, --ray-label)"
    )


def _explain_full(node: RayNodeView, demand: Demand) -> str:
    free = [f"CPUs: {node.cpus:g}", f"memory: {node.memory_bytes / 1e6:,.0f} MB"]
    needs = [f"CPUs: {cpus:g}"] if (cpus := demand.cpus_on(node)) else []
    needs += [f"memory: {demand.memory_mb:,} MB"] if demand.memory_mb else []
    if node.slots is not None:
        free.append(f"{SLOTS}: {node.slots}")
        needs.append(f"{SLOTS}: 1")
    return f"{node.name} has too few free resources ({', '.join(free)}) for a rollout ({', '.join(needs)})"


class CellLoad(msgspec.Struct, kw_only=True):
    """The load of one cell, as its driver sees it: how many slots are in use, and whether the cell accepts orders."""

    slots: int
    running: int = 0
    faults: int = 0  # infrastructure faults in a row
    is_closed: bool = False  # the cell gets no more orders, because it is lost or its node is draining
    is_resting: bool = False  # the cell gets no orders for a while, because it refused one

    @property
    def has_room(self) -> bool:
        return self.running < self.slots and not self.is_closed and not self.is_resting

    def count_result(self, *, is_fault: bool) -> None:
        self.faults = self.faults + 1 if is_fault else 0


def choose_cell(loads: Mapping[str, CellLoad]) -> str | None:
    """Return the least loaded cell with room, or None if there is none. Cells with repeated infrastructure faults are chosen last."""
    free = [
        (load.faults >= _BROKEN_AFTER, load.running / load.slots, name) for name, load in loads.items() if load.has_room
    ]
    return min(free)[2] if free else None
