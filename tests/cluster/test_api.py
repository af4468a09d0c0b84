"""The Python API on a Ray cluster: `cluster=` and `data=postgresql://…`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import turngate as tg
from tests.api.kit import AGENT, program, write_script
from tests.cluster.batch_kit import check_leftovers, sweep_sandboxes
from tests.cluster.ray_kit import ROOT, ray_python, start_ray
from tests.kit import gateway
from tests.postgres import PostgresServer
from tests.speed import scaled
from turngate.errors import BadRequest

GRADER = {"type": "script", "files": {"test.sh": 'test "$(cat reply.txt)" = "Hello."'}, "decides": "exit code"}
URL = "postgresql://turngate@db/turngate"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cluster": "auto"}, "'data' must be the URL of a PostgreSQL database"),
        ({"cluster": "auto", "data": "folder"}, "'data' must be the URL of a PostgreSQL database"),
        ({"data": URL}, "pass cluster="),
        ({"cluster": "auto", "data": URL, "gateway": "http://g"}, "gateway= cannot be set"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        tg.Client(write_script(tmp_path, ["Hi."]), **AGENT, **given)


@pytest.mark.parametrize(
    ("mode", "message"), [("gate", "mode must be"), ("direct", "mode 'direct' is not available for endpoint")]
)
async def test_modes_without_a_recording_in_the_cell_are_refused(tmp_path: Path, mode: str, message: str) -> None:
    async with tg.Client(write_script(tmp_path, ["Hi."]), **AGENT, cluster="auto", data=URL) as client:
        with pytest.raises(BadRequest, match=message):
            await client.run("print()", mode=mode)


async def test_running_gateway_as_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway() as g:
        monkeypatch.setenv("TURNGATE_ADMIN_KEY", g.app.admin_key)
        model = tg.Endpoint(key="gateway://other", url=g.root)
        async with tg.Client(model, **AGENT, cluster="auto", data=URL) as client:
            with pytest.raises(BadRequest, match="model must not be a gateway:// endpoint") as raised:
                await client.run("print()")
    assert raised.value.param == "model"


def write_rows(path: Path, replies: dict[str, str]) -> Path:
    """Write tasks for the `shell` agent, whose instructions are programs."""
    rows = []
    for name, reply in replies.items():
        text = program(f"ask('Hi')\nopen('reply.txt', 'w').write({reply!r})\nprint('the log of {name}')")
        rows.append({"id": name, "instruction": text, "grader": GRADER})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.repeat  # test_ray_batch.py runs batches on a cluster, and tests/api/test_run.py those of the Python API
@pytest.mark.needs("ray", "postgres")
def test_batch_on_a_cluster(tmp_path: Path, postgres_server: PostgresServer, postgres_url: str) -> None:
    with start_ray("a", slots=1) as cluster:
        command = [str(ray_python()), "-m", "tests.cluster.api_batch", cluster.address, postgres_url]
        tasks = write_rows(tmp_path / "rows.jsonl", {"right": "Hello.", "wrong": "Bye."})
        done = subprocess.run(
            [*command, write_script(tmp_path, ["Hello."]), str(tasks)],
            env=cluster.environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=scaled(180),
        )
        assert done.returncode == 0, done.stderr
        check_leftovers(cluster)
    found = json.loads(done.stdout.splitlines()[-1])
    results = found["results"]
    assert [one["task"] for one in results] == ["right", "right", "wrong", "wrong"], "in the order of the tasks"
    assert [one["reward"] for one in results] == [1.0, 1.0, 0.0, 0.0]
    assert {one["kind"] for one in results} == {"graded"} and len({one["session"] for one in results}) == 4
    assert all(one["text"] == ["Hello."] and one["tokens"] and one["rows"] == 1 for one in results), results
    assert all(f"the log of {one['task']}" in one["stdout"] for one in results)
    assert len({one["group"] for one in results}) == 2 and found["advantages"] == [0.0] * 4
    settled = "SELECT session FROM attempts WHERE state='settled' ORDER BY session"
    recorded = postgres_server.query(settled, postgres_url.rpartition("/")[2]).split()
    assert recorded == sorted(one["session"] for one in results)
    sweep_sandboxes()
