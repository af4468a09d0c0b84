"""A project's keys never reach another project, on any route and in either store.

`ATTACKS` must have an entry for every route of the application: a new route without one fails `test_every_route_is_attacked`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.kit import Json, Running, gateway, say, user
from tests.projects.kit import create_key, create_project, record
from turngate.dialects import DIALECTS
from turngate.server.scopes import SCOPES
from turngate.server.web.login import COOKIE, PAGE_HEADER
from turngate.store.projects import SCOPE_NAMES

_POSTGRES = pytest.param("postgres", marks=[pytest.mark.needs("postgres"), pytest.mark.full])
CHAT = {"model": "m", "messages": [user("Hi")]}
LAG = {"lag": 0, "tokens": 1, "counts": [1, *[0] * 20], "mean": 6.0, "largest": 6.0, "k1": 6.0, "k3": 5.0}
OUTCOME = {"kind": "graded", "reward": 1.0, "group": "{group}"}
# Names in project alpha. The second value of each is a name of the same length that does not exist.
TARGETS = {
    "id": ("alpha-session-open", "ghost-session-open"),
    "sealed": ("alpha-session", "ghost-session"),
    "name": ("alpha-feed", "ghost-feed"),
    "group": ("alpha-group", "ghost-group"),
    "rollout": ("alpha-session", "ghost-session"),
    "project": ("alpha", "ghost"),
    "model": ("m", "m"),
    "call": ("1", "1"),
    "prefix": ("{prefix}", "tgp-00000000"),
}


class Attack(NamedTuple):
    """How to attack a route: its query and body, with names in alpha. `sealed`: the path names the finished session."""

    query: str = ""
    body: Json = None
    sealed: bool = False
    creates: bool = False  # the attacker may create something of its own with this name


_SESSION_GET = Attack(sealed=True)
ATTACKS: dict[tuple[str, str], Attack] = {
    ("POST", "/admin/sessions"): Attack(body={"id": "{id}", "rollout": "{rollout}", "attempt": 2}, creates=True),
    ("GET", "/admin/sessions"): Attack("limit=1000"),
    ("GET", "/admin/sessions/{id}"): _SESSION_GET,
    ("DELETE", "/admin/sessions/{id}"): _SESSION_GET,
    ("GET", "/admin/sessions/{id}/trace"): _SESSION_GET,
    ("GET", "/admin/sessions/{id}/samples"): _SESSION_GET,
    ("GET", "/admin/sessions/{id}/events"): Attack("wait=0", sealed=True),
    ("POST", "/admin/sessions/{id}/seal"): Attack(body={}),
    ("POST", "/admin/sessions/{id}/cancel"): Attack(),
    ("PUT", "/admin/sessions/{id}/outcome"): Attack("replace=1", OUTCOME, sealed=True),
    ("GET", "/admin/sessions/{id}/tools"): Attack(),
    ("POST", "/admin/sessions/{id}/tools/{call:int}/answer"): Attack(body={"reply": "x"}),
    ("GET", "/admin/events"): Attack("wait=0"),
    ("POST", "/admin/events"): Attack(body={"session": "{id}", "kind": "note", "data": {}}, creates=True),
    ("GET", "/admin/attempts"): Attack("rollout={rollout}"),
    ("POST", "/admin/attempts/supersede"): Attack(body={"rollout": "{rollout}", "attempt": 1}, creates=True),
    ("GET", "/admin/feeds"): Attack(),
    ("PUT", "/admin/feeds/{name}"): Attack(body={"n": 1, "from_start": True}, creates=True),
    ("GET", "/admin/feeds/{name}"): Attack(),
    ("DELETE", "/admin/feeds/{name}"): Attack(),
    ("POST", "/admin/feeds/{name}/reader"): Attack(body={}),
    ("GET", "/admin/feeds/{name}/deliveries"): Attack("reader=x&after=0&limit=64"),
    ("POST", "/admin/feeds/{name}/commit"): Attack(body={"reader": "x", "number": 1}),
    ("POST", "/admin/feeds/{name}/mismatch"): Attack(body={"reader": "x", "number": 1, "version": 0, "lags": [LAG]}),
    ("POST", "/admin/groups/{group:path}/close"): Attack(),
    ("GET", "/admin/fence"): Attack(),
    ("POST", "/admin/fence/pause"): Attack(body={}),
    ("POST", "/admin/fence/resume"): Attack(body={}),
    ("GET", "/admin/weights"): Attack(),
    ("POST", "/admin/weights"): Attack(body={"version": 1, "path": "/x"}),
    ("GET", "/admin/engines"): Attack(),
    ("POST", "/admin/engines"): Attack(body={"url": "http://x"}),
    ("POST", "/admin/engines/drain"): Attack(body={"url": "http://x"}),
    ("POST", "/admin/engines/remove"): Attack(body={"url": "http://x"}),
    ("GET", "/metrics"): Attack(),
    ("GET", "/admin/projects"): Attack(),
    ("POST", "/admin/projects"): Attack(body={"name": "{project}"}),
    ("PUT", "/admin/projects/{name}"): Attack(body={"weight": 2.0}),
    ("DELETE", "/admin/projects/{name}"): Attack("force=true"),
    ("GET", "/admin/keys"): Attack("project={project}"),
    ("POST", "/admin/keys"): Attack(body={"project": "{project}", "scopes": ["traces"]}),
    ("POST", "/admin/keys/{prefix}/rotate"): Attack(body={}),
    ("POST", "/admin/keys/{prefix}/revoke"): Attack(body={}),
    ("GET", "/admin/audit"): Attack("project={project}"),
    ("POST", "/v1/rollouts/{id}/register"): Attack(body={"model": "m"}, creates=True),
    ("GET", "/v1/rollouts/{id}/trajectory"): _SESSION_GET,
    ("POST", "/v1/rollouts/{id}/cancel"): Attack(),
    ("POST", "/v1/rollouts/{id}/unregister"): Attack(),
    ("POST", "/sessions"): Attack(body={"session_id": "{id}"}, creates=True),
    ("GET", "/sessions"): Attack(),
    ("GET", "/sessions/{id}"): _SESSION_GET,
    ("DELETE", "/sessions/{id}"): _SESSION_GET,
    ("GET", "/sessions/{id}/rollout"): _SESSION_GET,
    ("GET", "/sessions/{id}/trace_entries"): _SESSION_GET,
    ("GET", "/page/api/me"): Attack(),
    ("GET", "/page/api/overview"): Attack(),
    ("GET", "/page/api/rollouts"): Attack("q={group}"),
    ("GET", "/page/api/groups"): Attack("group={group}"),
    ("GET", "/page/api/group"): Attack("name={group}"),
    ("GET", "/page/api/group/evidence"): Attack("name={group}"),
    ("GET", "/page/api/training"): Attack("group={group}"),
    ("GET", "/page/api/training/entropy"): Attack("group={group}"),
    ("GET", "/page/api/failures"): Attack("group={group}"),
    ("GET", "/page/api/events"): Attack("after=0"),
    ("GET", "/page/api/export"): Attack("group={group}"),
    ("GET", "/page/api/rollouts/{id}"): _SESSION_GET,
    ("GET", "/page/api/rollouts/{id}/tree"): _SESSION_GET,
    ("GET", "/page/api/rollouts/{id}/messages"): _SESSION_GET,
    ("GET", "/page/api/rollouts/{id}/tokens"): _SESSION_GET,
    ("GET", "/page/api/rollouts/{id}/events"): Attack("after=0", sealed=True),
    ("GET", "/page/api/rollouts/{id}/export"): _SESSION_GET,
    ("POST", "/page/api/rollouts/{id}/cancel"): Attack(),
    ("POST", "/page/api/rollouts/{id}/seal"): Attack(),
    ("POST", "/page/api/rollouts/{id}/retry"): _SESSION_GET,
}
# Routes that need a session's secret. With the key of another project, the session in the path is unknown.
_AREAS = ("/s/{id}", "/rollout/{id}", "/v1/rollouts/{id}")
SESSION_ATTACKS: dict[tuple[str, str], Attack] = {
    **{
        ("POST", area + route.path): Attack(body=CHAT)
        for area in _AREAS
        for dialect in DIALECTS
        for route in dialect.routes
    },
    **{("GET", f"{area}/v1/tools"): Attack() for area in _AREAS[:2]},
    **{("POST", f"{area}/v1/tools/name"): Attack(body={}) for area in _AREAS[:2]},
    **{
        (method, f"{area}/v1/responses/{{response}}{rest}"): Attack()
        for area in _AREAS[:2]
        for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"))
    },
}
OPEN_ROUTES = {"/health", "/openapi.json", "/", "/s/{id}", "/page", "/page/login", "/page/logout", "/page/{name:path}"}


def app_routes(g: Running) -> Iterator[tuple[str, str]]:
    """Every route of the application's own routing table."""
    for route in g.app._starlette.routes:
        for method in sorted((route.methods or {"GET"}) - {"HEAD"}):  # type: ignore[attr-defined]
            yield method, route.path  # type: ignore[attr-defined]


async def test_every_route_is_attacked() -> None:
    async with gateway([say("Hello.")]) as g:
        known = {*ATTACKS, *SESSION_ATTACKS}
        for method, path in app_routes(g):
            if path in OPEN_ROUTES or "/models" in path or "/responses" in path or path == "/v1/tools":
                continue  # no key needed, or that of a session, which names its project itself
            assert (method, path) in known, f"add {method} {path} to ATTACKS, and to turngate/server/scopes.py"
        unlisted = {route for route in SCOPES if "/admin/gate" not in route[1]} - set(ATTACKS)
        assert not unlisted, f"scopes.py has routes that ATTACKS does not cover: {unlisted}"


# ── the attack ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Field(NamedTuple):
    """A gateway with two projects. Project alpha has a session, a rollout, a feed and a key; beta attacks it."""

    g: Running
    prefix: str  # of alpha's key
    keys: dict[str, Json]  # beta's, by scope, and bad ones of alpha


@pytest.fixture(params=["sqlite", _POSTGRES])
async def field(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Field]:
    monkeypatch.chdir(tmp_path)
    shared = request.param == "postgres"
    data = request.getfixturevalue("postgres_url") if shared else tmp_path / "data"
    async with gateway(lambda request, n: say("Hello."), data=data) as g:
        for project in ("alpha", "beta"):
            await create_project(g, project)
        alpha = g.app.hosted.open("alpha")
        await record(alpha.store, "alpha-session", "alpha-group")
        await record(alpha.store, "private-session", "private-group")
        own = g.http((await create_key(g, "alpha", note="private-note"))["key"])
        assert (await own.put("/admin/feeds/private-feed", json={"n": 1, "from_start": True})).is_success
        feed = await own.put("/admin/feeds/alpha-feed", json={"n": 1, "from_start": True})
        assert feed.json()["newest"] == 2
        prefix = (await own.get("/admin/keys")).json()["keys"][0]["prefix"]
        keys = {scope: (await create_key(g, "beta", scope))["key"] for scope in SCOPE_NAMES}
        revoked, expired = await create_key(g, "alpha"), await create_key(g, "alpha", expires_s=0.001)
        assert (await own.post(f"/admin/keys/{revoked['prefix']}/revoke", json={})).is_success
        keys |= {"revoked": revoked["key"], "expired": expired["key"], "none": "", "wrong": revoked["key"][:-1] + "x"}
        yield Field(g, prefix, keys)


def aim(text: str, which: int, prefix: str, *, sealed: bool = False) -> str:
    """Fill in alpha's names (0) or names that do not exist (1)."""
    for name, target in TARGETS.items():
        value = TARGETS["sealed"][which] if name == "id" and sealed else target[which]
        text = re.sub(rf"\{{{name}(:\w+)?\}}", value.replace("{prefix}", prefix), text)
    return text.replace("{response}", "resp_1")


async def send(
    client: httpx.AsyncClient, route: tuple[str, str], attack: Attack, which: int, prefix: str
) -> tuple[int, str]:
    """Send the attack and return the status and the answer, with all targets replaced by the same text."""
    method, path = route
    target = aim(path, which, prefix, sealed=attack.sealed)
    query = aim(attack.query, which, prefix)
    content = None
    if attack.body is not None:
        content = aim(httpx.Request("POST", "http://x", json=attack.body).content.decode(), which, prefix)
    headers = {"content-type": "application/json", PAGE_HEADER: "1"}
    async with client.stream(
        method, f"{target}?{query}" if query else target, content=content, headers=headers
    ) as response:
        if "event-stream" in response.headers.get("content-type", "") and path.startswith("/page"):
            text = await anext(response.aiter_text())  # it never ends
        else:
            text = (await response.aread()).decode("utf-8", "replace")
    for name, values in TARGETS.items():
        if name not in ("model", "call"):
            for value in sorted(values, key=len, reverse=True):
                text = text.replace(value.replace("{prefix}", prefix), "TARGET")
    return response.status_code, text


def page_client(g: Running, key: str, cookie: str) -> httpx.AsyncClient:
    client = g.http(key)
    client.cookies.set(COOKIE, cookie, path="/page")
    return client


async def test_no_key_of_another_project_opens_anything(field: Field) -> None:
    g, prefix = field.g, field.prefix
    before = await observe(g)
    for scope in SCOPE_NAMES:
        login = await g.http().post("/page/login", json={"key": field.keys[scope]}, headers={PAGE_HEADER: "1"})
        cookie = login.cookies.get(COOKIE) or "tgp-00000000.none"
        client = page_client(g, field.keys[scope], cookie)
        for route, attack in {**ATTACKS, **SESSION_ATTACKS}.items():
            real = await send(client, route, attack, 0, prefix)
            ghost = await send(client, route, attack, 1, prefix)
            where = f"{scope}: {' '.join(route)}"
            assert real[0] == ghost[0], (where, real, ghost)
            if real[0] >= 400:
                assert real == ghost, where
            for _, text in (real, ghost):
                assert not re.search("alpha|private", text), (where, text)
    assert await observe(g) == before


async def test_own_key_opens_what_was_attacked(field: Field) -> None:
    """The attacks above fail because of the key, and not because their requests are wrong."""
    g, prefix = field.g, field.prefix
    key = (await create_key(g, "alpha"))["key"]
    login = await g.http().post("/page/login", json={"key": key}, headers={PAGE_HEADER: "1"})
    client = page_client(g, key, login.cookies[COOKIE])
    seen = 0
    for route, attack in ATTACKS.items():
        if route[0] == "GET" and SCOPES[route] and not route[1].endswith(("/deliveries", "/trace_entries")):
            status, text = await send(client, route, attack, 0, prefix)
            assert status == 200, (route, text)
            seen += "TARGET" in text or "private" in text
    assert seen > 20


@pytest.mark.parametrize("bad", ["none", "wrong", "revoked", "expired"])
async def test_bad_keys_open_nothing(field: Field, bad: str) -> None:
    g, prefix = field.g, field.prefix
    before = await observe(g)
    client = page_client(g, field.keys[bad], f"{prefix}.forged")
    for route, attack in {**ATTACKS, **SESSION_ATTACKS}.items():
        status, text = await send(client, route, attack, 0, prefix)
        refused = status == 401 or (status == 400 and "API_KEY_INVALID" in text)  # Gemini's status for a wrong key
        assert refused and not re.search("alpha|private", text), (route, status, text)
    assert await observe(g) == before


async def test_secrets_of_sessions_stay_in_their_project(tmp_path: Path) -> None:
    async with gateway(lambda request, n: say("Hello.")) as g:
        clients = {}
        for project in ("alpha", "beta"):
            await create_project(g, project)
            clients[project] = g.http((await create_key(g, project))["key"])
        opened = {p: (await c.post("/admin/sessions", json={"id": "same"})).json() for p, c in clients.items()}
        default = await g.open(id="same")
        for project in clients:
            key = opened[project]["api_key"]
            assert key.endswith(f".{project}") and (await g.ask(key, f"Hi {project}")).content == "Hello."
        await g.ask(default.key, "Hi default")
        for project, client in clients.items():
            trace = (await client.get("/admin/sessions/same/trace")).text
            assert f"Hi {project}" in trace and trace.count("Hi ") == 1
        # The secret opens the session of its own project, and a secret with another project's name opens nothing.
        secret = opened["alpha"]["api_key"].removesuffix(".alpha")
        for forged in (secret, f"{secret}.beta", f"{secret}.ghost", f"{secret}.default"):
            for path in ("/v1/chat/completions", "/s/same/v1/chat/completions"):
                assert (await g.http(forged).post(path, json=CHAT)).status_code == 401
        # Calls of different projects never share a cached prefix, nor a place in the pool.
        salts = {request.cache_salt for request in g.engine.received}
        assert len(salts) == 3 and len({request.session for request in g.engine.received}) == 3


async def test_socket_of_another_project_is_refused_as_unknown(tmp_path: Path) -> None:
    async with gateway([say("Hello.")]) as g:
        for project in ("alpha", "beta"):
            await create_project(g, project)
        own = g.http((await create_key(g, "alpha"))["key"])
        await own.post("/admin/sessions", json={"id": "alpha-session"})
        attacker = (await create_key(g, "beta"))["key"]
        refusals = []
        for session in ("alpha-session", "ghost-session"):
            url = f"{g.root.replace('http', 'ws')}/s/{session}/v1/responses"
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, additional_headers={"authorization": f"Bearer {attacker}"}, proxy=None)
            body = (refused.value.response.body or b"").decode()
            refusals.append((refused.value.response.status_code, body.replace(session, "TARGET")))
        assert refusals[0] == refusals[1] and refusals[0][0] in (404, 426)


async def test_open_loopback_opens_only_the_default_project(tmp_path: Path) -> None:
    async with gateway([say("Hello.")], open_loopback=True) as g:
        await create_project(g, "alpha")
        own = g.http((await create_key(g, "alpha"))["key"])
        await own.post("/admin/sessions", json={"id": "s"})
        await g.open(id="s")
        assert (await g.http().get("/v1/rollouts/s/trajectory")).status_code == 200  # of the project `default`
        for header in ("x-api-key", "x-goog-api-key", "api-key"):  # prime-rl's routes read the key from none of them
            forged = {header: f"tg-0000{'x' * 43}.alpha"}
            assert (await g.http().get("/v1/rollouts/s/trajectory", headers=forged)).status_code == 401
            chat = await g.http().post("/v1/rollouts/s/chat/completions", json=CHAT, headers=forged)
            assert chat.status_code == 401


FORGED = f"tg-0000{'x' * 43}"
CARRIERS = ("authorization", "x-api-key", "x-goog-api-key", "api-key", "cookie", "query", "path")


async def forge(g: Running, route: tuple[str, str], carrier: str, project: str, prefix: str) -> tuple[int, str]:
    """Send a request with a forged secret or login of a project. Return the status and the answer, with the project's name replaced."""
    method, path = route
    headers, query, secret = {"content-type": "application/json", PAGE_HEADER: "1"}, "", f"{FORGED}.{project}"
    match carrier:
        case "path":
            path = path.replace("{id}", secret)
        case "query":
            query = f"?key={secret}"
        case "cookie":
            headers["cookie"] = f"{COOKIE}={prefix}.forged"
        case _:
            headers[carrier] = f"Bearer {secret}" if carrier == "authorization" else secret
    content = None if method == "GET" else b"{}"
    response = await g.http().request(method, aim(path, 1, prefix) + query, headers=headers, content=content)
    return response.status_code, response.text.replace(project, "TARGET").replace(prefix, "TARGET")


@pytest.mark.sample(2)
@pytest.mark.parametrize("carrier", CARRIERS)
async def test_no_answer_tells_whether_a_project_exists(carrier: str) -> None:
    """With `open_loopback`, which answers requests without a key."""
    async with gateway([say("Hello.")], open_loopback=True) as g:
        await create_project(g, "tenant-1")
        prefix = (await create_key(g, "tenant-1"))["prefix"]
        for route in {*ATTACKS, *SESSION_ATTACKS, *(("GET", path) for path in OPEN_ROUTES)}:
            real = await forge(g, route, carrier, "tenant-1", prefix)
            assert real == await forge(g, route, carrier, "tenant-2", "tgp-00000000"), route


async def observe(g: Running) -> Json:
    """Everything of project alpha that an attack could change."""
    store = g.app.hosted.open("alpha").store
    feed = store.feeds.find("alpha-feed")
    return (
        [(row.id, row.status, row.stop) for row in store.sessions(limit=1000)],
        store.outcomes.find(store.find("alpha-session").key),  # type: ignore[union-attr]
        (feed.newest, feed.handed, feed.committed, feed.reader),  # type: ignore[union-attr]
        store.events.newest(),
        [(row.rollout, row.attempt, row.state) for row in store.attempts.list_attempts("alpha-session")],
        [key for key in g.app.store.projects.list_keys("alpha") if key.revoked is None],
    )
