"""Services of two projects at one gateway: over MCP, neither reaches a rollout of the other.

`tests/openenv/inside/test_projects.py` does the same on every route of OpenEnv's server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from mcp import Client

from tests.kit import Running, gateway, say
from tests.projects.kit import TOOL_ATTACKS, create_key, create_project
from tests.service.kit import Service, run_service
from turngate.mcp.server import build_server
from turngate.service.catalog import Endpoint
from turngate.service.mcp_tools import TOOLS

pytestmark = pytest.mark.process

MODEL = "gateway://train"
GHOST = "0" * 24


@asynccontextmanager
async def open_service(g: Running, project: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    """Run the service of a project, which has a key of this project only."""
    key_env = f"{project.upper()}_KEY"
    monkeypatch.setenv(key_env, (await create_key(g, project))["key"])
    entries = {MODEL: Endpoint(url=g.root, key_env=key_env, model="m")}
    async with run_service(endpoints=entries) as service:
        yield service


async def call(client: Client, tool: str, arguments: dict[str, Any], rollout: str) -> str:
    """Call a tool for a rollout, and return its answer without the rollout's id."""
    result = await client.call_tool(tool, {**arguments, "rollout_id": rollout})
    return f"{result.is_error} {result.content}".replace(rollout, "ROLLOUT")


async def attack(alpha: Service, beta: Service, target: str, own: str) -> None:
    """Try to reach a rollout of alpha with every tool of beta's service."""
    async with Client(build_server(alpha.rollouts)) as member, Client(build_server(beta.rollouts)) as attacker:
        for tool, arguments in TOOL_ATTACKS.items():
            answer = await call(attacker, tool, arguments, target)
            assert answer.startswith("True") and answer == await call(attacker, tool, arguments, GHOST), tool
            assert (await call(member, tool, arguments, target)).startswith("False"), tool  # the control
        listed = str((await attacker.call_tool("list_rollouts", {})).content)
        assert own in listed and target not in listed


def test_every_tool_that_names_a_rollout_is_tried() -> None:
    assert TOOL_ATTACKS.keys() == {
        name for name, tool in TOOLS.items() if "rollout_id" in tool.input_schema()["properties"]
    }


async def test_tools_of_one_project_do_not_reach_rollouts_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(lambda request, n: say("Hello.")) as g:
        for project in ("alpha", "beta"):
            await create_project(g, project)
            g.app.hosted.open(project)
        async with open_service(g, "alpha", monkeypatch) as alpha:
            done = await alpha.rollouts.run(alpha.request('print(ask("Hi"))', model_key=MODEL))
            async with open_service(g, "beta", monkeypatch) as beta:
                own = await beta.rollouts.run(beta.request('print(ask("Hi"))', model_key=MODEL))
                assert done.turn_count == own.turn_count == 1, (done.error, own.error)
                await attack(alpha, beta, done.rollout_id, own.rollout_id)
        for project, sessions in (("alpha", [done.session]), ("beta", [own.session])):
            headers = {"x-turngate-project": project}
            listing = (await g.admin.get("/admin/sessions", headers=headers)).json()["sessions"]
            assert [session["id"] for session in listing] == sessions
        assert (await g.admin.get("/admin/sessions")).json()["sessions"] == []  # nothing is in the project `default`
