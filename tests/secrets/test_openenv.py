"""The OpenEnv server with planted secrets, as a process in a virtual environment that has the real `openenv`."""

from __future__ import annotations

import httpx
import pytest

from tests.secrets.kit import PROCESSES, PROVIDER_KEY, Processes, Provider, open_workspace, search_program
from tests.secrets.test_service import CONFIG, HOSTED
from tests.speed import scaled
from tools import parts

pytestmark = [pytest.mark.needs("trl"), pytest.mark.full]

PART = "trl"  # its virtual environment has openenv


@pytest.fixture(scope="module")
def python() -> str:
    return str(parts.ensure(PART) / "bin" / "python")


def test_openenv_server_leaks_no_secret(python: str) -> None:
    with open_workspace() as workspace, Provider().serve() as provider, Processes().watch() as processes:
        hidden = workspace.planted.new("the hidden answer")
        key = workspace.env["TURNGATE_OPENENV_KEY"] = workspace.planted.new("the OpenEnv key")
        file = workspace.folder / "service.toml"
        fields = {"folder": workspace.folder, "name": "data", "sandbox": "local", "variable": PROVIDER_KEY}
        file.write_text(CONFIG.format(**fields, url=provider.url))
        words = ("--port", "0", "--service", file)
        with (
            workspace.serve(*words, program=(python, "-m", "turngate.openenv")) as url,
            httpx.Client(base_url=url, timeout=scaled(100), trust_env=False) as client,
        ):
            for authorization in ("", f"Bearer {key}x"):
                reply = client.post("/reset", json={}, headers={"authorization": authorization})
                assert reply.status_code == 401
                workspace.evidence.add_response(reply)
            client.headers["authorization"] = f"Bearer {key}"
            for path in ("/health", "/schema", "/metadata", "/state"):
                workspace.evidence.add_response(client.get(path))
            workspace.evidence.add_response(client.post("/reset", json={}))
            statuses = []
            for then in ("", 'print(ask("FAIL-500"))'):
                arguments = {
                    "model_key": HOSTED,
                    "instruction": search_program(isolated=False, then=then),
                    # built into the shell, so that the answer is in no process's arguments
                    "test_script": f"case $(cat seen.txt) in *'{hidden}'*) exit 1 ;; esac",
                }
                step = client.post("/step", json={"action": {"tool_name": "run_rollout", "arguments": arguments}})
                workspace.evidence.add_response(step)
                statuses.append(step.json()["observation"]["result"]["status"])
            arguments = {"model_key": "openai://other", "instruction": "x"}
            workspace.evidence.add_response(
                client.post("/step", json={"action": {"tool_name": "run_rollout", "arguments": arguments}})
            )
        assert statuses == ["finished", "error"] and provider.keys == {f"Bearer {workspace.env[PROVIDER_KEY]}"}
        assert workspace.learn_keys(workspace.folder) == 2
        workspace.evidence.add(PROCESSES, b"\n".join(processes.lines()))
        admin_keys = [path.relative_to(workspace.folder).as_posix() for path in workspace.folder.rglob("admin-key")]
        workspace.planted.add("the admin key that was made", (workspace.folder / admin_keys[0]).read_text().strip())
        workspace.evidence.add_folder(workspace.folder, allow=tuple(admin_keys))
        found = workspace.planted.find(workspace.evidence)
        assert [leak for leak in found if not leak.where.endswith("/work/own-key.txt")] == []
        assert {leak.secret for leak in found} <= set(workspace.session_secrets())
