"""Two projects with an OpenEnv server each, at one gateway: no key of one reaches anything of the other, on any route.

`PROBES` must have an entry for every route of the server: a new route without one fails `test_every_route_is_probed`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from starlette.routing import WebSocketRoute
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.kit import gateway, say
from tests.openenv.kit import CALL_MODEL, run_server, write_settings
from tests.projects.kit import TOOL_ATTACKS, create_key, create_project
from tests.speed import scaled
from turngate.openenv import TurngateEnv
from turngate.openenv.app import create
from turngate.openenv.environment import NAME

pytestmark = pytest.mark.process

MODEL = "gateway://train"
ENDPOINT = '\n[endpoints."{model}"]\nurl = "{url}"\nkey_env = "GATEWAY_KEY"\nmodel = "m"\n'
GHOST = "0" * 24
SOCKET = "WEBSOCKET"
Route = tuple[str, str]


class Probe(NamedTuple):
    """A request that needs no rollout: its body, and the status that the right key gets."""

    body: Any = None
    status: int = 200


# The environment has no tasks of its own, so the right key gets a 501 on OpenEnv's routes for tasks.
_TASKS = {"split": "train"}
PROBES: dict[Route, Probe] = {
    ("GET", "/openapi.json"): Probe(),
    ("GET", "/docs"): Probe(),
    ("GET", "/docs/oauth2-redirect"): Probe(),
    ("GET", "/redoc"): Probe(),
    ("GET", "/list_environments"): Probe(),
    ("GET", "/{env_name}/splits"): Probe(status=501),
    ("POST", "/{env_name}/tasks"): Probe(_TASKS, 501),
    ("POST", "/{env_name}/num_tasks"): Probe(_TASKS, 501),
    ("POST", "/{env_name}/task"): Probe({**_TASKS, "index": 0}, 501),
    ("POST", "/{env_name}/task_range"): Probe({**_TASKS, "start": 0, "stop": 1}, 501),
    ("POST", "/reset"): Probe({}),
    ("GET", "/state"): Probe(),
    ("GET", "/metadata"): Probe(),
    ("GET", "/schema"): Probe(),
}
OPEN_ROUTES = {("GET", "/health")}


def _act(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "call_tool", "tool_name": tool, "arguments": arguments}


def _call_rpc(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}


# Routes on which a caller can call tools, and how.
TOOL_ROUTES: dict[Route, Callable[[str, dict[str, Any]], dict[str, Any]]] = {
    ("POST", "/step"): lambda tool, arguments: {"action": _act(tool, arguments)},
    ("POST", "/mcp"): _call_rpc,
    (SOCKET, "/mcp"): _call_rpc,
    (SOCKET, "/ws"): lambda tool, arguments: {"type": "step", "data": _act(tool, arguments)},
}


def list_routes(folder: Path) -> Iterator[Route]:
    """Every route of the application's own routing table, and of its OpenAPI document."""
    app = create(write_settings(folder))
    for route in app.routes:
        if isinstance(route, WebSocketRoute):
            yield SOCKET, route.path
        else:
            for method in route.methods - {"HEAD"}:  # type: ignore[attr-defined]
                yield method, route.path  # type: ignore[attr-defined]
    for path, methods in app.openapi()["paths"].items():
        for method in methods:
            yield method.upper(), path


def test_every_route_is_probed(tmp_path: Path) -> None:
    assert {*PROBES, *TOOL_ROUTES, *OPEN_ROUTES} == set(list_routes(tmp_path))


# ── the attack ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Tenant(NamedTuple):
    """A project's OpenEnv server, with its two keys, a rollout and an open session."""

    url: str
    key: str  # of the OpenEnv server
    gateway_key: str  # of the project, with all scopes
    rollout: str
    session: str


class Field(NamedTuple):
    alpha: Tenant
    beta: Tenant


@pytest.fixture
async def field(tmp_path: Path) -> AsyncIterator[Field]:
    async with gateway(lambda request, n: say("Hello.")) as g, AsyncExitStack() as stack:
        tenants = []
        for project in ("alpha", "beta"):
            await create_project(g, project)
            gateway_key = (await create_key(g, project))["key"]
            (tmp_path / project).mkdir()
            key = f"{project}-openenv-key"
            settings = ENDPOINT.format(model=MODEL, url=g.root)
            server = run_server(
                tmp_path / project, settings=settings, GATEWAY_KEY=gateway_key, TURNGATE_OPENENV_KEY=key
            )
            url = (await asyncio.to_thread(stack.enter_context, server)).url
            async with TurngateEnv(url, headers={"Authorization": f"Bearer {key}"}) as env:
                done = await env.run_rollout(MODEL, CALL_MODEL)
            assert done.turn_count == 1, done.error
            opened = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
            status, text = await send(url, key, ("POST", "/mcp"), opened)
            assert status == 200, text
            session = json.loads(text)["result"]["session_id"]
            tenants.append(Tenant(url, key, gateway_key, done.rollout_id, session))
        yield Field(*tenants)


async def send(url: str, key: str, route: Route, body: Any = None, query: str = "") -> tuple[int, str]:
    """Send a request, and return its status and answer. On a socket, the answer is the first message."""
    method, path = route
    address = url + path.replace("{env_name}", NAME) + query
    headers = {"authorization": f"Bearer {key}"} if key else {}
    if method != SOCKET:
        async with httpx.AsyncClient(timeout=scaled(60), trust_env=False) as http:
            response = await http.request(method, address, json=body, headers=headers)
            return response.status_code, response.text
    try:
        async with connect(address.replace("http", "ws", 1), additional_headers=headers, proxy=None) as socket:
            with suppress(ConnectionClosed):  # a refusal may arrive first; it is read below
                await socket.send(json.dumps(body))
            return 101, str(await socket.recv())
    except InvalidStatus as refused:
        return refused.response.status_code, (refused.response.body or b"").decode()


async def call_tools(tenant: Tenant, key: str, rollout: str) -> AsyncIterator[tuple[str, int, str]]:
    """Call every tool that names a rollout on every route, at the server of `tenant`. Yield the answers without the rollout's id."""
    for route, make in TOOL_ROUTES.items():
        for tool, arguments in TOOL_ATTACKS.items():
            status, text = await send(tenant.url, key, route, make(tool, {**arguments, "rollout_id": rollout}))
            yield f"{' '.join(route)} {tool}", status, text.replace(rollout, "ROLLOUT")


async def attack_server(field: Field) -> None:
    """Try to use the server of alpha with keys of beta."""
    alpha, beta = field
    wrong = {"none": "", "beta's": beta.key, "beta's gateway key": beta.gateway_key, "shortened": alpha.key[:-1]}
    for name, key in wrong.items():
        for route, probe in PROBES.items():
            status, text = await send(alpha.url, key, route, probe.body)
            assert status == 401 and alpha.rollout not in text, (name, route, text)
        async for where, status, text in call_tools(alpha, key, alpha.rollout):
            assert status == (403 if where.startswith(SOCKET) else 401) and "Hello." not in text, (name, where, text)
        status, text = await send(alpha.url, key, ("GET", "/health"))
        assert (status, json.loads(text)) == (200, {"status": "healthy"})
    for route, probe in PROBES.items():  # the control
        status, text = await send(alpha.url, alpha.key, route, probe.body)
        assert status == probe.status, (route, text)


async def attack_rollouts(field: Field) -> None:
    """Name the rollout of alpha at the server of beta."""
    alpha, beta = field
    theirs = [one async for one in call_tools(beta, beta.key, alpha.rollout)]
    assert theirs == [one async for one in call_tools(beta, beta.key, GHOST)]
    own = [one async for one in call_tools(alpha, alpha.key, alpha.rollout)]  # the control
    ghosts = [one async for one in call_tools(alpha, alpha.key, GHOST)]
    for (where, status, text), ghost in zip(own, ghosts, strict=True):
        assert status in (200, 101) and text != ghost[2], (where, text)
        assert "Hello." in text or "get_messages" not in where, (where, text)
    for route, make in TOOL_ROUTES.items():
        for tenant, other in ((alpha, beta), (beta, alpha)):
            _, text = await send(tenant.url, tenant.key, route, make("list_rollouts", {}))
            assert tenant.rollout in text and other.rollout not in text, route


async def attack_sessions(field: Field) -> None:
    """Name the session of alpha at the server of beta."""
    alpha, beta = field
    call = _call_rpc("list_rollouts", {})
    call["params"]["session_id"] = alpha.session
    for tenant, is_own in ((beta, False), (alpha, True)):  # the second is the control
        _, text = await send(tenant.url, tenant.key, ("POST", "/mcp"), call)
        assert (alpha.rollout in text) is is_own and ("Unknown session_id" in text) is not is_own, text
        query = f"?session_id={alpha.session}"
        _, text = await send(tenant.url, tenant.key, (SOCKET, "/ws"), {"type": "state"}, query)
        assert ("episode_id" in text) is is_own and ("Unknown session_id" in text) is not is_own, text


async def test_one_project_reaches_nothing_of_another(field: Field) -> None:
    await attack_server(field)
    await attack_rollouts(field)
    await attack_sessions(field)
