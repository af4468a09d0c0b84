"""A full run of the gateway and its commands with planted secrets, and a search for them in everything the run produced.

There are two gateways. One is in front of a provider that needs a key and repeats it in its errors, with two workers and JSON logs. The
other has a scripted engine, text logs and a generated admin key. Agents that print everything they can read run on both, with and without
isolation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.sandboxes.kit import need
from tests.secrets.kit import (
    PROCESSES,
    PROVIDER_KEY,
    Processes,
    Provider,
    Receiver,
    Workspace,
    find_issued_secrets,
    open_workspace,
    search_program,
)
from tests.speed import scaled
from turngate.server.web.files import FOLDER

pytestmark = [pytest.mark.process, pytest.mark.full, pytest.mark.needs("bubblewrap")]

Json = Any
PAGE_HEADERS = {"x-turngate-page": "1"}
SHELL = ("--agent", "shell", "--set", "command=exec python3 -", "--timeout", "3600", "--log-format", "json", "--json")
# Path and body of a model call in each dialect.
CALLS: dict[str, Json] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "{}"}]},
    "/v1/responses": {"input": "{}"},
    "/v1/messages": {"messages": [{"role": "user", "content": "{}"}], "max_tokens": 50},
    "/v1beta/models/gpt-x:generateContent": {"contents": [{"role": "user", "parts": [{"text": "{}"}]}]},
}
FAILURES = ("FAIL-400", "FAIL-401", "FAIL-403", "FAIL-429", "FAIL-500", "FAIL-503")


class Run:
    """Drive a run, and hold what the tests inspect afterwards."""

    def __init__(self, workspace: Workspace, provider: Provider, receiver: Receiver) -> None:
        self.workspace = workspace
        self.provider = provider
        self.receiver = receiver
        # The gateways' data folders.
        self.observed, self.scripted = workspace.folder / "observed", workspace.folder / "scripted"
        self.url = self.other = ""
        self.processes = Processes()
        self.outcomes: dict[str, Json] = {}
        self.sealed_statuses: list[int] = []  # statuses of calls with secrets of sealed sessions

    def run_commands(self) -> None:
        """Run agents through both gateways in both sandboxes, a batch, and the commands that read recordings."""
        workspace = self.workspace
        ports = tuple(
            int(url.rpartition(":")[2]) for url in (self.url, self.other, self.provider.url, self.receiver.url)
        )
        rollouts: dict[str, tuple[tuple[str | Path, ...], str, str]] = {
            "observed, local": (("--gateway", self.url), "local", ""),
            "observed, behind walls": (("--gateway", self.url), "bubblewrap", ""),
            "observed, the provider fails": (("--gateway", self.url), "local", 'print(ask("FAIL-500"))'),
            "scripted, the agent fails": (("--data", self.scripted), "local", 'ask("Hi"); sys.exit(3)'),
        }
        with ThreadPoolExecutor(2) as pool:
            running = {
                name: pool.submit(
                    self._rollout, where, sandbox, search_program(isolated=sandbox != "local", ports=ports, then=then)
                )
                for name, (where, sandbox, then) in rollouts.items()
            }
            batch = pool.submit(self._batch, search_program(isolated=True, ports=ports))
            self.outcomes = {name: future.result() for name, future in running.items()}
            self.outcomes["batch"] = batch.result()
            # Run by another process while the gateway serves.
            data = ("--data", self.scripted)
            reads: list[tuple[str | Path, ...]] = [
                ("show", "last", *data, "--json"),
                ("verify", "--all", *data, "--json"),
                ("export", "rows", *data, "--out", workspace.folder / "exports" / "rows.jsonl"),
                ("export", "rows", *data, "--out", workspace.folder / "exports" / "rows.parquet"),
                ("export", "atif", *data, "--out", workspace.folder / "exports" / "atif.jsonl"),
                ("show", "last", "--gateway", self.url, "--json"),
                ("doctor", "--gateway", self.url, "--json", "--only", "gateway"),
                (
                    "doctor",
                    *self._engine(),
                    "--data",
                    workspace.folder / "elsewhere",
                    "--only",
                    "engine",
                    "--only",
                    "engine call",
                ),
                ("doctor", *self._engine(), "--data", workspace.folder / "elsewhere", *ONLY, "--json"),
            ]
            (workspace.folder / "exports").mkdir()
            outputs = list(pool.map(lambda words: workspace.run(*words), reads))
        assert not any("Traceback" in text or "No such option" in text for text in outputs), outputs

    def _engine(self) -> tuple[str, ...]:
        return (
            "--engine",
            "openai",
            "--engine-url",
            self.provider.url,
            "--engine-key-env",
            PROVIDER_KEY,
            "--model",
            "gpt-x",
        )

    def _rollout(self, where: tuple[str | Path, ...], sandbox: str, program: str) -> Json:
        own = {} if "--gateway" in where else NO_KEY
        return _parse_output(
            self.workspace.run("run", *SHELL, *where, "--sandbox", sandbox, "--prompt", program, **own)
        )

    def _batch(self, program: str) -> Json:
        """Run a batch of a task whose test must be hidden from the agent."""
        task = self.workspace.folder / "tasks" / "hidden"
        (task / "tests").mkdir(parents=True)
        (task / "instruction.md").write_text(program)
        answer = self.workspace.planted["the hidden answer"]
        lines = (
            f"# {answer}",
            "mkdir -p $TURNGATE_LOGS/verifier",
            f"case $(cat seen.txt) in *'{answer}'*) reward=0 ;; *) reward=1 ;; esac",
            "echo $reward > $TURNGATE_LOGS/verifier/reward.txt",
        )
        (task / "tests" / "test.sh").write_text("\n".join(lines) + "\n")
        words = ("--tasks", task.parent, "--n", "2", "--sandbox", "bubblewrap", "--data", self.scripted, "--keep-work")
        return _parse_output(self.workspace.run("batch", *SHELL, *words, **NO_KEY))

    def make_calls(self) -> None:
        """Make successful and failing model calls in every dialect."""
        planted, evidence = self.workspace.planted, self.workspace.evidence
        admin = {"authorization": f"Bearer {planted['the admin key']}"}
        with httpx.Client(base_url=self.url, trust_env=False, timeout=scaled(60)) as client:
            opened = client.post("/admin/sessions", json={"metadata": {"rollout": "by hand"}}, headers=admin).json()
            key = planted.add("session secret, opened by hand", opened.pop("api_key"))
            evidence.add("the rest of what opening a session answers", opened)
            for path, body in CALLS.items():
                for text in ("Hi", *FAILURES):
                    sent = json.loads(json.dumps({"model": "gpt-x", **body}).replace("{}", text))
                    evidence.add_response(client.post(path, json=sent, headers={"authorization": f"Bearer {key}"}))
            for text in ("Hi", "FAIL-STREAM", "FAIL-500"):
                sent = {"model": "gpt-x", "stream": True, "messages": [{"role": "user", "content": text}]}
                headers = {"authorization": f"Bearer {key}"}
                evidence.add_response(client.post("/v1/chat/completions", json=sent, headers=headers))
            # Paths that a session key may not open, and a wrong admin key.
            for path in (
                "/admin/sessions",
                "/metrics",
                "/admin/events?wait=0",
                f"/admin/sessions/{opened['id']}/trace",
            ):
                refused = client.get(path, headers={"authorization": f"Bearer {key}"})
                assert refused.status_code == 401, path
                evidence.add_response(refused)
            wrong = {"authorization": f"Bearer {planted['the admin key']}x"}
            evidence.add_response(client.get("/admin/sessions", headers=wrong))
            evidence.add_response(client.post("/v1/chat/completions", content=b"{", headers=admin))
            evidence.add_response(
                client.get("/metrics", headers={"authorization": f"Bearer {planted['the metrics key']}"})
            )
            evidence.add_response(client.get("/metrics?by=worker", headers=admin))
            for path in (
                "/admin/sessions",
                "/admin/events?wait=0",
                "/admin/fence",
                "/admin/feeds",
                "/admin/nothing",
                "/health",
            ):
                evidence.add_response(client.get(path, headers=admin))
            for path in ("/admin/sessions", "/admin/weights", "/admin/fence/pause", "/admin/events"):
                evidence.add_response(client.post(path, content=b'{"nonsense": ', headers=admin))
                evidence.add_response(client.post(path, json={"nonsense": key[:3]}, headers=admin))
            session_path = f"/admin/sessions/{opened['id']}"
            for path in (
                session_path,
                f"{session_path}/trace",
                f"{session_path}/samples?all=1",
                f"{session_path}/events?wait=0",
                f"{session_path}/tools",
            ):
                evidence.add_response(client.get(path, headers=admin))
            evidence.add_response(client.post(f"{session_path}/seal", json={}, headers=admin))
            self._open_foreign_sessions(client, admin)

    def _open_foreign_sessions(self, client: httpx.Client, admin: dict[str, str]) -> None:
        """Open sessions by OpenEnv's API, which are named by their secret, and rollouts by prime-rl's API."""
        planted, evidence = self.workspace.planted, self.workspace.evidence
        opened = client.post("/sessions", json={"purpose": "eval"}, headers=admin).json()
        named = quote(planted.add("session secret, opened as OpenEnv's", opened.pop("session_id")), safe="")
        registered = client.post("/v1/rollouts/by-prime/register", json={"model": "gpt-x"}, headers=admin).json()
        planted.add("session secret, opened as prime-rl's", registered.pop("api_key"))
        evidence.add("the rest of what opening them answers", [opened, registered])
        for path in ("", f"/{named}", f"/{named}/rollout", f"/{named}/trace_entries", f"/{named}/nothing", "/nobody"):
            evidence.add("what OpenEnv's sessions tell", client.get(f"/sessions{path}", headers=admin).text)
        for _ in range(2):
            evidence.add("what deleting one tells", client.delete(f"/sessions/{named}", headers=admin).text)
        for path in (
            f"/sessions/{named}",
            f"/sessions/{named}/rollout",
            f"/admin/sessions/{named}",
            f"/s/{named}/v1/models",
        ):
            evidence.add("what is told of one that is gone", client.get(path, headers=admin).text)
        for path in ("trajectory", "nothing"):
            evidence.add_response(client.get(f"/v1/rollouts/by-prime/{path}", headers=admin))
        evidence.add_response(client.post("/v1/rollouts/by-prime/unregister", json={}, headers=admin))

    def browse_page(self, url: str, key: str) -> None:
        """Get every file and every route of the page."""
        evidence = self.workspace.evidence
        with httpx.Client(base_url=url, trust_env=False, timeout=scaled(60)) as client:
            evidence.add_response(client.post("/page/login", json={"key": key + "x"}, headers=PAGE_HEADERS))
            entered = client.post("/page/login", json={"key": key}, headers=PAGE_HEADERS)
            assert entered.status_code == 200
            evidence.add_response(entered)
            for path in ("/page", "/page/", *(f"/page/{file.relative_to(FOLDER)}" for file in FOLDER.rglob("*.*"))):
                evidence.add_response(client.get(path))
            for name in ("me", "overview", "rollouts?limit=500", "groups", "training", "failures"):
                evidence.add_response(client.get(f"/page/api/{name}"))
            rows = client.get("/page/api/rollouts?limit=500").json()["rollouts"]
            assert len(rows) >= 2
            for group in {row["group"] for row in rows} - {""}:
                for route in ("group?name", "group/evidence?name", "export?format=rows&group"):
                    evidence.add_response(client.get(f"/page/api/{route}={group}"))
            for row in rows:
                rollout_path = f"/page/api/rollouts/{row['id']}"
                for route in (
                    "",
                    "/tree",
                    "/messages",
                    "/tokens",
                    *(f"/export?format={f}" for f in ("rows", "trace", "messages")),
                ):
                    evidence.add_response(client.get(rollout_path + route))
                for route in ("cancel", "retry"):
                    evidence.add_response(client.post(f"{rollout_path}/{route}", json={}, headers=PAGE_HEADERS))
            for path in ("/page/api/events?after=0", f"/page/api/rollouts/{rows[0]['id']}/events?after=0"):
                evidence.add(f"the stream {path}", _read_first_chunk(client, path))
            evidence.add_response(client.post("/page/logout", json={}, headers=PAGE_HEADERS))

    def call_after_seal(self) -> None:
        """Call the gateways with the secrets of sealed sessions."""
        sent = {"model": "gpt-x", "messages": [{"role": "user", "content": "Hi"}]}
        with httpx.Client(trust_env=False, timeout=scaled(30)) as client:
            for name in self.workspace.session_secrets():
                for url in (self.url, self.other):
                    headers = {"authorization": f"Bearer {self.workspace.planted[name]}"}
                    reply = client.post(f"{url}/v1/chat/completions", json=sent, headers=headers)
                    self.workspace.evidence.add_response(reply)
                    self.sealed_statuses.append(reply.status_code)


ONLY = ("--sandbox", "local", "--sandbox", "bubblewrap")
NO_KEY = {"TURNGATE_ADMIN_KEY": ""}  # use the key in the data folder


def _parse_output(output: str) -> Json:
    """Return the command's JSON output, which is mixed with JSON log lines."""
    entries = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    outcomes = [entry for entry in entries if "logger" not in entry]
    assert len(outcomes) == 1, output[-3000:]
    return outcomes[0]


def _read_first_chunk(client: httpx.Client, path: str) -> bytes:
    """Read the first chunk of an endless stream."""
    with client.stream("GET", path) as reply:
        assert reply.status_code == 200
        return next(reply.iter_raw())


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    need("bubblewrap")
    with open_workspace() as workspace, Provider().serve() as provider, Receiver().serve() as receiver:
        full_run = Run(workspace, provider, receiver)
        planted = workspace.planted
        planted.new("the hidden answer")
        workspace.env["TURNGATE_ADMIN_KEY"] = planted.new("the admin key")
        workspace.env["TURNGATE_METRICS_KEY"] = planted.new("the metrics key")
        workspace.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = receiver.url
        common: tuple[str | Path, ...] = ("serve", "--port", "0", "--log-turns")
        observing = (
            *common,
            "--data",
            full_run.observed,
            "--workers",
            "2",
            "--log-format",
            "json",
            *full_run._engine(),
        )
        workspace.folder.joinpath("script.json").write_text(json.dumps(["Hello.", "And again."]))
        scripted = (
            *common,
            "--data",
            full_run.scripted,
            "--script",
            workspace.folder / "script.json",
            "--verify-every",
            "1",
        )
        with (
            full_run.processes.watch(),
            workspace.serve(*observing) as full_run.url,
            workspace.serve(*scripted, TURNGATE_ADMIN_KEY="") as full_run.other,
        ):
            generated_key = planted.add(
                "the admin key that was made", (full_run.scripted / "admin-key").read_text().strip()
            )
            with ThreadPoolExecutor(1) as pool:
                calls = pool.submit(full_run.make_calls)
                full_run.run_commands()
                calls.result()
            workspace.learn_keys(workspace.folder)
            full_run.browse_page(full_run.url, planted["the admin key"])
            full_run.browse_page(full_run.other, generated_key)
            full_run.call_after_seal()
        workspace.evidence.add(PROCESSES, b"\n".join(full_run.processes.lines()))
        workspace.evidence.add("the spans", receiver.spans())
        workspace.evidence.add_folder(workspace.folder, allow=("scripted/admin-key",))
        yield full_run


def test_run_is_complete(run: Run) -> None:
    """Check that the run did what the search for secrets relies on."""
    outcomes, evidence = run.outcomes, run.workspace.evidence
    assert {name: outcomes[name]["status"] for name in outcomes if name != "batch"} == {
        "observed, local": "finished",
        "observed, behind walls": "finished",
        "observed, the provider fails": "error",
        "scripted, the agent fails": "failed",
    }
    assert run.provider.keys == {f"Bearer {run.workspace.env[PROVIDER_KEY]}"}  # the provider gets its key and no other
    sessions = run.workspace.session_secrets()
    assert len(sessions) == 9, sessions  # six of agents, three of sessions opened here
    assert set(run.sealed_statuses) <= {401, 404, 409} and run.sealed_statuses
    assert b"invoke_agent shell" in run.receiver.spans() and b"chat gpt-x" in run.receiver.spans()
    assert run.processes.looks > 100 and any(b"bwrap" in line for line in run.processes.lines())
    # The provider's own error message.
    assert "it went wrong" in evidence.text("the answer to POST /v1/chat/completions")
    assert "turngate_turns_total" in evidence.text("the answer to GET /metrics")
    for place in ("rows.jsonl", "rows.parquet", "atif.jsonl", "turngate.db", "stdout"):
        assert any(where.endswith(place) for where in evidence.places), place


def test_no_secret_leaks(run: Run) -> None:
    """Session secrets are only in files that agents wrote them to, and the hidden answer is only in the task's test."""
    found = run.workspace.planted.find(run.workspace.evidence)
    allowed_place = re.compile(r"/work/own-key\.txt$")
    hidden = str(run.workspace.folder / "tasks" / "hidden" / "tests" / "test.sh")
    unexpected = [
        leak
        for leak in found
        if not (leak.secret.startswith("session secret") and allowed_place.search(leak.where))
        and not (leak.secret == "the hidden answer" and leak.where == hidden)
    ]
    assert unexpected == []
    assert [where for where in find_issued_secrets(run.workspace.evidence) if not allowed_place.search(where)] == []


def test_store_has_no_plain_secrets(run: Run) -> None:
    found = [leak for leak in run.workspace.planted.find(run.workspace.evidence) if "turngate.db" in leak.where]
    assert found == []


def test_agents_see_only_their_own_secret(run: Run) -> None:
    """Search what agents could read and reach: given paths in both sandboxes, and the whole machine if isolated."""
    seen = list(run.workspace.folder.rglob("seen.txt"))
    assert len(seen) >= 6
    for path in seen:
        text = path.read_text()
        assert "my key" in text and "TURNGATE_API_KEY" in text
        for name in run.workspace.planted:
            assert run.workspace.planted[name] not in text, f"{name} is in {path}"
        for refused in ("/admin/sessions", "/metrics", "/page/api/rollouts", "/admin/events?wait=0"):
            assert re.search(rf"== {re.escape(refused)}\n\((401|403|404),", text), refused
    isolated = [text for path in seen if "/workspace" in (text := path.read_text())]
    assert len(isolated) >= 3
    for text in isolated:
        assert (
            not re.search(r"== port \d+\nis open", text) and "== /proc/1/environ" in text
        )  # no open port of the host, but all processes of the sandbox
