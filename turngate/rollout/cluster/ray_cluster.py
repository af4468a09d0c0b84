"""Keep one cell of a batch on every Ray node that has room for rollouts of the batch.

node joins                 start a cell there
node drains                send its cell no more orders, let the running orders end, then close the cell
node or actor is lost      send its cell no more orders; each running call fails, and the executor settles the attempt
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

import turngate
from turngate.common.aio import run_to_completion, wait_for_tasks
from turngate.errors import SandboxUnavailable
from turngate.rollout.cluster.messages import OrderProgress, RunnerFailed, RunnerReady, RunnerReply, RunnerSettings
from turngate.rollout.cluster.placement import (
    CellLoad,
    Demand,
    RayNodeView,
    choose_cell,
    count_slots,
    explain_no_room,
)
from turngate.rollout.cluster.ray_nodes import CallFailed, RayConnection

log = logging.getLogger("turngate")
_POLL_S = 2.0  # pause between checks of the nodes and of the progress of their orders
_START_S = 180.0  # time for a cell to start, including its Ray worker
_RETRY_S = 30.0  # pause before a cell is started again on a node where one failed
_FIRST_CELL_S = 240.0
_CLOSE_S = 150.0
_REST_S = 10.0


class PlacedCell:
    """A cell that is running on a node, with its actor and its load."""

    def __init__(self, node: RayNodeView, actor: Any, load: CellLoad) -> None:
        self.node, self.actor, self.load = node, actor, load
        self.is_lost = False  # its node or its actor has died, or calls to it keep failing


class RayCluster:
    """Keeps one cell on each node with room for rollouts while `run` runs, and hands out the slots of the cells."""

    def __init__(
        self,
        connection: RayConnection,
        settings: RunnerSettings,
        demand: Demand,
        max_slots: int,
        note: Callable[[str], None] = lambda text: log.warning("%s", text),
    ) -> None:
        """Prepare the cluster. No cell gets more than `max_slots` slots, because the batch never runs more rollouts at once."""
        self.connection = connection
        self.note = note
        self._settings = settings
        self._demand = demand
        self._max_slots = max_slots
        self._cells: dict[str, PlacedCell] = {}  # by node id
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._retry_at: dict[str, float] = {}  # node id → when a cell may be started there again
        self._failures: dict[str, str] = {}  # node id → why its cell failed
        self._nodes: list[RayNodeView] = []
        self._changed = asyncio.Condition()
        self._watchers: dict[str, Callable[[OrderProgress], None]] = {}  # by session

    @property
    def cells(self) -> list[PlacedCell]:
        return list(self._cells.values())

    async def wait_for_cell(self) -> None:
        """Wait until at least one cell is running. Raise `SandboxUnavailable` if no cell can start, or if none starts in time."""
        deadline = time.monotonic() + _FIRST_CELL_S
        async with self._changed:
            while not any(not cell.load.is_closed for cell in self._cells.values()):
                is_hopeless = bool(self._nodes) and not self._starting
                if is_hopeless and self._failures:
                    raise SandboxUnavailable(next(iter(self._failures.values())))
                if is_hopeless and not any(count_slots(node, self._demand) for node in self._nodes):
                    raise SandboxUnavailable(explain_no_room(self._nodes, self._demand))
                if time.monotonic() > deadline:
                    raise SandboxUnavailable(
                        f"no cell started on the Ray cluster within {_FIRST_CELL_S:.0f} s; check the cluster with `ray status`"
                    )
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _POLL_S)

    @asynccontextmanager
    async def take_slot(self) -> AsyncIterator[PlacedCell]:
        """Wait for a free slot, yield its cell, and hold the slot for the duration of the block."""
        async with self._changed:
            while (name := choose_cell({key: cell.load for key, cell in self._cells.items()})) is None:
                await self._changed.wait()
            cell = self._cells[name]
            cell.load.running += 1
        try:
            yield cell
        finally:
            cell.load.running -= 1
            await run_to_completion(self._notify())

    def watch(self, session: str, callback: Callable[[OrderProgress], None] | None) -> None:
        """Set the callback that receives the progress of a session's order. None removes the callback."""
        if callback is None:
            self._watchers.pop(session, None)
        else:
            self._watchers[session] = callback

    async def run(self) -> None:
        """Until cancelled, start cells on nodes with room, and remove the cells of lost or draining nodes. Finally, close all cells."""
        try:
            while True:
                try:
                    self._nodes = await self.connection.list_nodes()
                    self._update()
                except Exception:  # the head node of the cluster may come back, so the cells stay open
                    log.exception("checking the nodes of the Ray cluster failed; retrying")
                await self._notify()
                await asyncio.gather(asyncio.sleep(_POLL_S), *(self._poll(cell) for cell in self.cells))
        finally:
            await run_to_completion(self._close_all())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _update(self) -> None:
        nodes = {node.id: node for node in self._nodes}
        for key, cell in list(self._cells.items()):
            node = nodes.get(key)
            if node is None:
                cell.is_lost = True
                self._remove(cell, f"node {cell.node.name} is lost")
            elif node.is_draining and not cell.load.is_closed:
                cell.load.is_closed = True
                self.note(f"node {node.name} is draining: it gets no more rollouts")
            if cell.load.is_closed and not cell.load.running and key in self._cells and node is not None:
                self._remove(cell, f"closing the cell on {cell.node.name}")
                self._starting[key] = asyncio.create_task(self._close(cell))
        for node in self._nodes:
            is_idle = node.id not in self._cells and node.id not in self._starting
            if is_idle and time.monotonic() >= self._retry_at.get(node.id, 0.0) and count_slots(node, self._demand):
                self._starting[node.id] = asyncio.create_task(self._start(node))

    def _remove(self, cell: PlacedCell, why: str) -> None:
        cell.load.is_closed = True
        self._cells.pop(cell.node.id, None)
        self._retry_at[cell.node.id] = time.monotonic() + _RETRY_S
        self.note(why)

    async def _start(self, node: RayNodeView) -> None:
        slots = min(count_slots(node, self._demand), self._max_slots)
        settings = msgspec.structs.replace(self._settings, name=node.name)
        actor = self.connection.start_actor(node, slots, self._demand, msgspec.json.encode(settings))
        try:
            async with asyncio.timeout(_START_S):
                reply = msgspec.json.decode(await self.connection.call(actor.start.remote()), type=RunnerReply)
            match reply:
                case RunnerReady(version=version) if version == turngate.__version__:
                    self._cells[node.id] = PlacedCell(node, actor, CellLoad(slots=slots))
                    self._failures.pop(node.id, None)
                    self.note(f"cell on {node.name} is ready (slots: {slots})")
                    return
                case RunnerReady(version=version):
                    problem = (
                        f"the node has Turngate {version}, but the driver has {turngate.__version__}; install the same version "
                        "on both"
                    )
                case RunnerFailed():
                    problem = reply.message
                case _:
                    problem = f"unexpected reply {reply!r}"
        except TimeoutError:
            problem = f"the cell did not start within {_START_S:.0f} s"
        except CallFailed as error:
            problem = error.message
        except asyncio.CancelledError:
            self.connection.kill(actor)
            raise
        finally:
            self._starting.pop(node.id, None)
            await run_to_completion(self._notify())
        self.connection.kill(actor)
        self._retry_at[node.id] = time.monotonic() + _RETRY_S
        self._failures[node.id] = f"node {node.name} cannot run a cell: {problem}"
        self.note(self._failures[node.id])

    async def _poll(self, cell: PlacedCell) -> None:
        """Read the progress of a cell's orders, and pass it to their callbacks. If the call fails, the next poll repeats it.

        If the actor has died, remove the cell, because further orders to it would fail.
        """
        try:
            async with asyncio.timeout(_POLL_S):
                reply = await self.connection.call(cell.actor.progress.remote())
        except TimeoutError:
            return
        except CallFailed as error:
            if error.actor_died:
                self.mark_dead(cell, error.message)
            return
        for progress in msgspec.json.decode(reply, type=list[OrderProgress]):
            if (callback := self._watchers.get(progress.session)) is not None:
                callback(progress)

    def rest(self, cell: PlacedCell) -> None:
        """Stop sending orders to a cell for a while, because it refused one. It probably cannot reach the shared store."""
        if not cell.load.is_resting:
            self.note(f"the cell on {cell.node.name} accepts no rollouts; trying again in {_REST_S:.0f} s")
        cell.load.is_resting = True
        asyncio.get_running_loop().call_later(_REST_S, setattr, cell.load, "is_resting", False)

    def mark_dead(self, cell: PlacedCell, why: str) -> None:
        """Send no more orders to a cell whose actor has died, or to which calls keep failing."""
        cell.is_lost = True
        if self._cells.get(cell.node.id) is cell:
            self._remove(cell, f"the cell on {cell.node.name} is lost: {why}")

    async def _close(self, cell: PlacedCell) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.connection.call(cell.actor.close.remote())
        except TimeoutError:
            log.warning(
                "the cell on %s was not closed cleanly: closing it took longer than %.0f s", cell.node.name, _CLOSE_S
            )
        except CallFailed as error:
            log.warning("the cell on %s was not closed cleanly: %s", cell.node.name, error.message)
        finally:
            self.connection.kill(cell.actor)
            self._starting.pop(cell.node.id, None)

    async def _close_all(self) -> None:
        starting = list(self._starting.values())
        for task in starting:
            task.cancel()
        if starting:
            await wait_for_tasks(*starting)
        await asyncio.gather(*(self._close(cell) for cell in self.cells), return_exceptions=True)
        self._cells.clear()
