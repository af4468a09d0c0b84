"""The OpenEnv environment with marked secrets: its server as a process of its own, in the environment that has the real `openenv`."""

from __future__ import annotations

import httpx
import pytest

from tests.secrets.kit import PROCESSES, PROVIDER_KEY, Processes, Provider, house, looking
from tests.secrets.test_service import CONFIG, HOSTED
from tests.speed import scaled
from tools import parts

pytestmark = [pytest.mark.needs("trl"), pytest.mark.full]

PART = "trl"  # its environment has openenv


@pytest.fixture(scope="module")
def python() -> str:
    return str(parts.ensure(PART) / "bin" / "python")


def test_no_secret_is_in_what_the_environment_tells(python: str) -> None:
    with house() as home, Provider().running() as provider, Processes().watching() as processes:
        hidden = home.planted.new("the hidden answer")
        key = home.env["TURNGATE_OPENENV_KEY"] = home.planted.new("the OpenEnv key")
        file = home.folder / "service.toml"
        given = {"folder": home.folder, "name": "data", "sandbox": "local", "variable": PROVIDER_KEY}
        file.write_text(CONFIG.format(**given, url=provider.url))
        words = ("--port", "0", "--service", file)
        with (
            home.serving(*words, program=(python, "-m", "turngate.openenv")) as url,
            httpx.Client(base_url=url, timeout=scaled(100), trust_env=False) as client,
        ):
            for authorization in ("", f"Bearer {key}x"):
                reply = client.post("/reset", json={}, headers={"authorization": authorization})
                assert reply.status_code == 401
                home.evidence.add_answer(reply)
            client.headers["authorization"] = f"Bearer {key}"
            for path in ("/health", "/schema", "/metadata", "/state"):
                home.evidence.add_answer(client.get(path))
            home.evidence.add_answer(client.post("/reset", json={}))
            ends = []
            for then in ("", 'print(ask("FAIL-500"))'):
                arguments = {
                    "model_key": HOSTED,
                    "instruction": looking(walls=False, then=then),
                    "test_script": f"! grep -q '{hidden}' seen.txt",
                }
                step = client.post("/step", json={"action": {"tool_name": "run_rollout", "arguments": arguments}})
                home.evidence.add_answer(step)
                ends.append(step.json()["observation"]["result"]["status"])
            arguments = {"model_key": "openai://other", "instruction": "x"}
            home.evidence.add_answer(
                client.post("/step", json={"action": {"tool_name": "run_rollout", "arguments": arguments}})
            )
        assert ends == ["finished", "error"] and provider.keys == {f"Bearer {home.env[PROVIDER_KEY]}"}
        assert home.learn_keys(home.folder) == 2
        home.evidence.add(PROCESSES, b"\n".join(processes.lines()))
        made = [path.relative_to(home.folder).as_posix() for path in home.folder.rglob("admin-key")]
        home.planted.known("the admin key that was made", (home.folder / made[0]).read_text().strip())
        home.evidence.add_folder(home.folder, but=tuple(made))
        found = home.planted.found(home.evidence)
        assert [one for one in found if not one.where.endswith("/work/own-key.txt")] == []
        assert {one.secret for one in found} <= set(home.session_secrets())
