"""Projects for tests: create them and their keys, and record something in them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from tests.kit import Running
from tests.store.kit import add_session, finish_rollout
from turngate.store.projects import SCOPE_NAMES
from turngate.store.store import Store

Json = Any
# The service's tools that name a rollout, with their other arguments.
TOOL_ATTACKS: dict[str, dict[str, Json]] = {
    "get_messages": {},
    "subscribe_events": {},
    "abort_rollout": {"reason": "x"},
    "finalize_rollout": {"wait_s": 0},
    "get_state": {},
}


async def create_project(g: Running, name: str, **settings: Json) -> None:
    response = await g.admin.post("/admin/projects", json={"name": name, **settings})
    assert response.status_code == 201, response.text


async def create_key(g: Running, project: str, *scopes: str, **settings: Json) -> Json:
    body = {"project": project, "scopes": scopes or SCOPE_NAMES, **settings}
    response = await g.admin.post("/admin/keys", json=body)
    assert response.status_code == 201, response.text
    return response.json()


async def project_client(g: Running, project: str, *scopes: str) -> httpx.AsyncClient:
    """A client with a new key of a project, which may do everything unless scopes are given."""
    return g.http((await create_key(g, project, *scopes))["key"])


async def record(store: Store, name: str, group: str) -> None:
    """Record an open session `NAME-open`, and a finished rollout `NAME` with a turn and an outcome."""
    await asyncio.to_thread(add_session, store, f"{name}-open", metadata={"group": group, "note": f"{name}-note"})
    await asyncio.to_thread(finish_rollout, store, name, group)
