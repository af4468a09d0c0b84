"""The load that an engine reports: running calls, waiting calls and KV cache usage.

All gateways that use an engine read the same report, so they share one view of its load.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import Protocol, runtime_checkable

import msgspec


class EngineLoad(msgspec.Struct, frozen=True):
    """The load of one engine, or of one of its data-parallel ranks."""

    running: int
    waiting: int
    kv_use: float | None = None  # from 0 to 1; None if the engine does not report it

    @property
    def calls(self) -> int:
        return self.running + self.waiting


@runtime_checkable
class ReportsLoad(Protocol):
    """An engine that reports its load."""

    async def load_report(self) -> list[EngineLoad]:
        """Return the load of each data-parallel rank, or an empty list if the engine reports no load."""


# The names of vLLM's gauges, in 0.32 and in older versions. Each data-parallel rank has its own `engine` label.
_VLLM_GAUGE = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|gpu_cache_usage_perc)(?:\{([^}]*)\})? (\S+)",
    re.MULTILINE,
)
_VLLM_RANK = re.compile(rb'(?:^|,)engine="(\d+)"')
_KV_GAUGES = (b"kv_cache_usage_perc", b"gpu_cache_usage_perc")


def parse_vllm_metrics(text: bytes) -> list[EngineLoad]:
    """Read the load of each data-parallel rank from vLLM's `/metrics`.

    Return an empty list if a rank's number of running or waiting requests is missing or not a finite number.
    """
    by_rank: defaultdict[int, dict[bytes, float]] = defaultdict(dict)
    for name, labels, value in _VLLM_GAUGE.findall(text):
        rank, number = _VLLM_RANK.search(labels), _read_number(value)
        gauges = by_rank[int(rank[1]) if rank else 0]
        if number is not None:
            gauges[name] = number
    loads = []
    for _, gauges in sorted(by_rank.items()):
        if b"num_requests_running" not in gauges or b"num_requests_waiting" not in gauges:
            return []
        loads.append(
            EngineLoad(
                running=int(gauges[b"num_requests_running"]),
                waiting=int(gauges[b"num_requests_waiting"]),
                kv_use=next((gauges[name] for name in _KV_GAUGES if name in gauges), None),
            )
        )
    return loads


def _read_number(value: bytes) -> float | None:
    """Return the value of a gauge, or None if it is NaN, infinite or invalid."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


class _SGLangRank(msgspec.Struct):
    """One data-parallel rank in SGLang's `/v1/loads`, or in the older `/get_load`, which does not report running requests separately."""

    dp_rank: int = 0
    num_running_reqs: int | None = None
    num_waiting_reqs: int = 0
    num_reqs: int | None = None
    token_usage: float | None = None

    def to_load(self) -> EngineLoad:
        running = self.num_running_reqs
        if running is None:
            running = max(0, (self.num_reqs or 0) - self.num_waiting_reqs)
        return EngineLoad(running, self.num_waiting_reqs, self.token_usage)


class SGLangLoads(msgspec.Struct):
    """The reply of SGLang's `/v1/loads`."""

    loads: list[_SGLangRank]

    def to_loads(self) -> list[EngineLoad]:
        return [rank.to_load() for rank in sorted(self.loads, key=lambda rank: rank.dp_rank)]


OldSGLangLoads = list[_SGLangRank]  # the reply of `/get_load`
