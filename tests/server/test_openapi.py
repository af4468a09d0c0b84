"""The OpenAPI document is valid, and describes every route that the gateway serves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

import turngate.server
from tests.kit import Running, gateway, say
from tests.projects.kit import create_project, project_client
from tests.server.test_forwarding import crew
from turngate.dialects import DIALECTS
from turngate.engines.gate import Gate
from turngate.server.operations import ApiRoute
from turngate.server.scopes import SCOPES
from turngate.store.projects import SCOPE_NAMES

Json = dict[str, Any]
METHODS = {"get", "post", "put", "delete"}


async def read_document(g: Running) -> Json:
    reply = await g.http().get("/openapi.json")  # without a key
    assert reply.status_code == 200, reply.text
    assert g.app.admin_key not in reply.text
    document: Json = reply.json()
    return document


def list_operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert method in METHODS
            yield method.upper(), path, operation


@pytest.mark.full
async def test_document_is_valid() -> None:
    async with gateway(engine=Gate()) as g:
        document = await read_document(g)
    OpenAPIV31SpecValidator(document).validate()
    ids = [operation["operationId"] for _, _, operation in list_operations(document)]
    assert len(ids) == len(set(ids))


async def test_every_route_is_in_the_document() -> None:
    async with gateway(engine=Gate()) as g:
        document = await read_document(g)
        routes = g.app._starlette.routes
    documented = {(method, path) for method, path, _ in list_operations(document)}
    assert all(isinstance(one, ApiRoute) for one in routes), "every route describes its operation"
    served = {(one.operation.method, one.path_format) for one in routes if isinstance(one, ApiRoute)}
    scoped = {(method, path.replace(":path", "").replace(":int", "")) for method, path in SCOPES}
    calls = {
        ("POST", base + route.path)
        for dialect in DIALECTS
        for route in dialect.routes
        for base in ("", "/s/{id}", "/rollout/{id}", "/v1/rollouts/{id}")
    }
    tools = {("POST", f"{base}/v1/tools/{{name}}") for base in ("", "/s/{id}", "/rollout/{id}")}
    assert documented == served | scoped | calls | tools
    assert ("GET", "/openapi.json") in documented


async def test_every_documented_operation_is_served_and_needs_its_key() -> None:
    """A request without a key reaches the operation, and is refused exactly if the document says so."""
    async with gateway(engine=Gate()) as g:
        document = await read_document(g)
        client = g.http()
        for method, path, operation in list_operations(document):
            address = path.replace("{call}", "1").replace("{name}", "index.html")
            for parameter in operation["parameters"]:
                address = address.replace(f"{{{parameter['name']}}}", "x")
            headers = {"x-turngate-page": "1"} if path.startswith("/page") else {}
            reply = await client.request(method, address, headers=headers)
            assert "no route" not in reply.text, (method, path)
            is_refused = reply.status_code == 401 or "API key not valid" in reply.text  # the second by Google's API
            assert is_refused == bool(operation["security"]), (method, path, reply.text)


async def test_scopes_of_the_document_open_the_operation() -> None:
    async with gateway([say("Hello.")]) as g:
        await create_project(g, "blue")
        clients = {scope: await project_client(g, "blue", scope) for scope in SCOPE_NAMES}
        for method, path, operation in list_operations(await read_document(g)):
            if not any("adminKey" in one for one in operation["security"]) or "{" in path or method != "GET":
                continue
            allowed = {scope for one in operation["security"] for scope in one.get("apiKey", ())}
            if "events" in path or path.endswith("/models"):
                continue  # an endless stream; any key
            for scope, client in clients.items():
                reply = await client.get(path)
                assert (reply.status_code != 403) == (scope in allowed), (path, scope)


@pytest.mark.parametrize("place", ["project", "workers"])
async def test_document_is_the_same_everywhere(place: str) -> None:
    async with gateway([say("Hello.")]) as g:
        expected = await read_document(g)
        if place == "project":
            await create_project(g, "blue")
            client = await project_client(g, "blue", "traces")
            assert (await client.get("/openapi.json")).json() == expected
            return
    async with crew() as workers:
        for number in range(2):
            assert await read_document(workers[number]) == expected


@pytest.mark.needs("postgres")
@pytest.mark.full
async def test_document_on_a_shared_store(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the gateway keeps its key in the working folder
    async with gateway(data=postgres_url) as g:
        document = await read_document(g)
    assert "/admin/feeds/{name}" in document["paths"]


def test_only_declared_bodies_and_queries_are_read() -> None:
    """An endpoint gets its body and query as declared parameters, so that the document shows all of them."""
    allowed = {
        "query_params": {"operations.py", "public.py", "responses.py", "model_calls.py"},  # the last three read keys
        "decode_body": {"operations.py"},
        "decode_msgpack": {"operations.py"},
    }
    for path in Path(turngate.server.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert name not in allowed or path.name in allowed[name], f"{path.name} reads {name}"
