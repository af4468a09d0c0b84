"""Open the store that `--data` names: a folder, or `postgresql://…` for a shared store."""

from __future__ import annotations

from pathlib import Path

from turngate.common.database_url import is_database_url, parse_database_url
from turngate.common.sharding import SINGLE_SHARD, Shard
from turngate.store.connection import Durability
from turngate.store.shared.store import SharedStore
from turngate.store.sqlite import Store


def open_store(data: str, durability: Durability = "process", shard: Shard = SINGLE_SHARD) -> Store:
    """Open a store for reading and writing, creating it if necessary."""
    if is_database_url(data):
        return SharedStore(parse_database_url(data))
    return Store(Path(data), durability, shard)


def open_store_for_reading(data: str | Path) -> Store:
    """Open a store read-only. Gateways may be writing to it."""
    if is_database_url(str(data)):
        return SharedStore(parse_database_url(str(data)), read_only=True)
    return Store.reading(Path(data))
