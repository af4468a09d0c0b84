"""A small discrete-event simulator: processes are generators, and stations serve them.

    def customer(shop):
        yield 5.0                     # wait
        yield shop.use(0.2)           # queue for a server, and keep it for 0.2 s
        yield lock.acquire()          # queue for a server, and keep it until release()
        lock.release()
        items = yield queue.take(16)  # wait for at least one item, and take up to 16

    simulation = Simulation(seed=1)
    simulation.start(customer(shop))
    simulation.run(60.0)

Events at the same time happen in the order in which they were scheduled, and all random numbers come from one seeded generator. A run
is therefore the same every time.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

Process = Generator[Any, Any, None]


class Simulation:
    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.events = 0
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0

    def start(self, process: Process) -> None:
        """Start a process at the current time."""
        self.after(0.0, self.resume, process)

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action` after this many seconds."""
        if seconds < 0:
            raise ValueError(f"cannot schedule an event {-seconds:g} s in the past")
        self._scheduled += 1
        heapq.heappush(self._due, (self.now + seconds, self._scheduled, action, arguments))

    def run(self, until: float) -> None:
        """Run all events up to the time `until`, and set the clock to it."""
        due = self._due
        while due and due[0][0] <= until:
            self.now, _, action, arguments = heapq.heappop(due)
            self.events += 1
            action(*arguments)
        self.now = until

    def resume(self, process: Process, value: Any = None) -> None:
        """Continue a process until it waits again or ends."""
        try:
            wait = process.send(value)
        except StopIteration:
            return
        if isinstance(wait, float):
            self.after(wait, self.resume, process)
        else:
            station, arguments = wait
            station.admit(process, *arguments)


class Station:
    """One queue for a number of equal servers, first come, first served.

    A job longer than `slice_s` is cut into slices and queues again after each, as processes do on the cores of a machine: short jobs do
    not wait for long ones to end.
    """

    def __init__(self, simulation: Simulation, name: str, servers: int = 1, slice_s: float = float("inf")) -> None:
        if servers < 1:
            raise ValueError(f"station {name}: at least one server is needed, not {servers}")
        self.name = name
        self.servers = servers
        self.slice_s = slice_s
        self.arrivals = 0
        self.departures = 0
        self.time_inside = 0.0  # of all jobs that have left, from arrival to departure
        self.longest = 0  # the most jobs inside at once
        self._simulation = simulation
        self._free = servers
        self._waiting: deque[tuple[Process, float | None, float]] = deque()
        self._inside = 0
        self._began = simulation.now
        self._changed = simulation.now
        self._busy_integral = 0.0
        self._inside_integral = 0.0
        self._held: deque[float] = deque()  # when the jobs that hold a server without a known end arrived

    def use(self, seconds: float) -> tuple[Station, tuple[float]]:
        """Queue for a server, and keep it for this many seconds."""
        return self, (seconds,)

    def acquire(self) -> tuple[Station, tuple[None]]:
        """Queue for a server, and keep it until `release`."""
        return self, (None,)

    def release(self) -> None:
        self._end(self._held.popleft())

    def reset(self) -> None:
        """Forget the measurements so far, but not the jobs."""
        self._integrate()
        self.arrivals = self.departures = 0
        self.time_inside = self._busy_integral = self._inside_integral = 0.0
        self.longest = self._inside
        self._began = self._simulation.now

    @property
    def utilization(self) -> float:
        """The share of its servers' time that was used since the last reset."""
        self._integrate()
        elapsed = self._simulation.now - self._began
        return self._busy_integral / (elapsed * self.servers) if elapsed else 0.0

    @property
    def mean_inside(self) -> float:
        """The mean number of jobs that waited or were served since the last reset."""
        self._integrate()
        elapsed = self._simulation.now - self._began
        return self._inside_integral / elapsed if elapsed else 0.0

    @property
    def inside(self) -> int:
        return self._inside

    def admit(self, process: Process, seconds: float | None) -> None:
        """Accept a job. Called by the simulation."""
        self._integrate()
        self.arrivals += 1
        self._inside += 1
        self.longest = max(self.longest, self._inside)
        self._queue(process, seconds, self._simulation.now)

    def _queue(self, process: Process, seconds: float | None, arrived: float) -> None:
        if self._free:
            self._serve(process, seconds, arrived)
        else:
            self._waiting.append((process, seconds, arrived))

    def _serve(self, process: Process, seconds: float | None, arrived: float) -> None:
        self._integrate()
        self._free -= 1
        if seconds is None:
            self._held.append(arrived)
            self._simulation.after(0.0, self._simulation.resume, process)
        elif seconds > self.slice_s:
            self._simulation.after(self.slice_s, self._cut, process, seconds - self.slice_s, arrived)
        else:
            self._simulation.after(seconds, self._finish, process, arrived)

    def _cut(self, process: Process, rest: float, arrived: float) -> None:
        """End a slice, and put the job with its remaining work at the end of the queue."""
        self._integrate()
        self._free += 1
        self._waiting.append((process, rest, arrived))
        self._serve(*self._waiting.popleft())

    def _finish(self, process: Process, arrived: float) -> None:
        self._end(arrived)
        self._simulation.resume(process)

    def _end(self, arrived: float) -> None:
        self._integrate()
        self._free += 1
        self._inside -= 1
        self.departures += 1
        self.time_inside += self._simulation.now - arrived
        if self._waiting:
            self._serve(*self._waiting.popleft())

    def _integrate(self) -> None:
        elapsed = self._simulation.now - self._changed
        if elapsed:
            self._busy_integral += elapsed * (self.servers - self._free)
            self._inside_integral += elapsed * self._inside
            self._changed = self._simulation.now


class Queue:
    """A queue of items. One process puts items in, and another takes them out, oldest first."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._items: deque[Any] = deque()
        self._takers: deque[tuple[Process, int]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._hand_out()

    def take(self, most: int) -> tuple[Queue, tuple[int]]:
        """Wait until there is an item, and take up to `most`."""
        return self, (most,)

    def clear(self) -> list[Any]:
        """Remove all items and return them."""
        items = list(self._items)
        self._items.clear()
        return items

    def admit(self, process: Process, most: int) -> None:
        """Let a process wait for items. Called by the simulation."""
        self._takers.append((process, most))
        self._hand_out()

    def _hand_out(self) -> None:
        while self._takers and self._items:
            process, most = self._takers.popleft()
            taken = [self._items.popleft() for _ in range(min(most, len(self._items)))]
            self._simulation.after(0.0, self._simulation.resume, process, taken)


class Disk:
    """A disk that makes commits durable, one flush at a time. Commits that arrive during a flush share the next one."""

    def __init__(self, simulation: Simulation, flush_s: float, bytes_per_s: float = float("inf")) -> None:
        self.flush_s = flush_s
        self.bytes_per_s = bytes_per_s
        self.commits = 0
        self.flushes = 0
        self.bytes = 0.0
        self._simulation = simulation
        self._waiting: list[tuple[Process, float]] = []
        self._is_flushing = False
        self._busy = 0.0
        self._began = simulation.now

    def flush(self, size: float = 0.0) -> tuple[Disk, tuple[float]]:
        """Write `size` bytes, and wait until a flush that starts after this call has ended."""
        return self, (size,)

    def reset(self) -> None:
        self.commits = self.flushes = 0
        self.bytes = self._busy = 0.0
        self._began = self._simulation.now

    @property
    def utilization(self) -> float:
        elapsed = self._simulation.now - self._began
        return min(1.0, self._busy / elapsed) if elapsed else 0.0

    def admit(self, process: Process, size: float) -> None:
        """Let a process wait for the next flush. Called by the simulation."""
        self.commits += 1
        self.bytes += size
        self._waiting.append((process, size))
        if not self._is_flushing:
            self._flush()

    def _flush(self) -> None:
        self._is_flushing = True
        batch, self._waiting = self._waiting, []
        seconds = self.flush_s + sum(size for _, size in batch) / self.bytes_per_s
        self._simulation.after(seconds, self._finish, [process for process, _ in batch], seconds)

    def _finish(self, processes: list[Process], seconds: float) -> None:
        self._is_flushing = False
        self.flushes += 1
        self._busy += seconds
        if self._waiting:
            self._flush()
        for process in processes:
            self._simulation.resume(process)
