"""Projects with several worker processes: any worker serves a project's key, and finds the worker of its sessions."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from tests.speed import scaled
from tests.workers.test_processes import ServeProcess, start_serve


def ask(running: ServeProcess, key: str, method: str, path: str, **request: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    url = running.url + path
    return httpx.request(method, url, headers=headers, trust_env=False, timeout=scaled(30), **request)  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.process
def test_projects_are_kept_apart_in_all_workers(tmp_path: Path) -> None:
    with start_serve(tmp_path / "data", "--engine", "scripted") as running:
        keys = {}
        for project in ("alpha", "beta"):
            running.ask("POST", "/admin/projects", json={"name": project})
            body = {"project": project, "scopes": ["admin"]}
            keys[project] = running.ask("POST", "/admin/keys", json=body)["key"]
        # Each request may reach either worker, since every one has its own connection.
        for key in [*keys.values()] * 8:  # until both workers have read the keys
            while ask(running, key, "GET", "/admin/fence").status_code == 401:
                time.sleep(0.02)
        for n in range(4):
            opened = ask(running, keys["alpha"], "POST", "/admin/sessions", json={"id": f"s{n}"})
            assert opened.status_code == 201, opened.text
            assert running.say(opened.json()["api_key"])
        for n in range(4):
            assert ask(running, keys["alpha"], "GET", f"/admin/sessions/s{n}").json()["turns"] == 1
            assert ask(running, keys["beta"], "GET", f"/admin/sessions/s{n}/trace").status_code == 404
        assert len(ask(running, keys["alpha"], "GET", "/admin/sessions").json()["sessions"]) == 4
        opened_in = {
            project: ask(running, key, "GET", "/metrics").text.partition("\nturngate_sessions_open ")[2].split("\n")[0]
            for project, key in keys.items()
        }
        assert opened_in == {"alpha": "4", "beta": "0"}
        assert ask(running, keys["beta"], "GET", "/admin/fence").json()["in_flight"] == 0
        assert ask(running, keys["beta"], "POST", "/admin/fence/pause", json={}).status_code == 403
        assert running.ask("GET", "/admin/fence")["paused"] is False
        deleted = running.ask("DELETE", "/admin/projects/alpha?force=true")
        assert deleted == {"deleted": "alpha"}
        end = time.monotonic() + scaled(20)
        folder = tmp_path / "data" / "projects" / "alpha"
        while folder.exists() or any(ask(running, keys["alpha"], "GET", "/admin/fence").is_success for _ in range(8)):
            assert time.monotonic() < end
            time.sleep(0.1)
        for _ in range(8):  # both workers serve the other projects
            assert ask(running, keys["beta"], "GET", "/admin/sessions").json()["sessions"] == []
