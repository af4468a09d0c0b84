"""A full run of the gateway and its commands with marked secrets everywhere, and a search for them in all that can be seen of it.

Two gateways: one observes a provider that wants a key and repeats it in its errors, with two workers and lines of JSON; the other has
a scripted engine and lines of text, and made its own admin key. Agents that print all that they can read run on both, without walls and
behind them.
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
from tests.secrets.kit import PROCESSES, PROVIDER_KEY, House, Processes, Provider, Receiver, given_out, house, looking
from tests.speed import scaled
from turngate.server.web.files import FOLDER

pytestmark = [pytest.mark.process, pytest.mark.full, pytest.mark.needs("bubblewrap")]

Json = Any
OWN = {"x-turngate-page": "1"}
SHELL = ("--agent", "shell", "--set", "command=exec python3 -", "--timeout", "3600", "--log-format", "json", "--json")
# What each dialect sends, and where.
CALLS: dict[str, Json] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "{}"}]},
    "/v1/responses": {"input": "{}"},
    "/v1/messages": {"messages": [{"role": "user", "content": "{}"}], "max_tokens": 50},
    "/v1beta/models/gpt-x:generateContent": {"contents": [{"role": "user", "parts": [{"text": "{}"}]}]},
}
FAILURES = ("FAIL-400", "FAIL-401", "FAIL-403", "FAIL-429", "FAIL-500", "FAIL-503")


class Run:
    """What there is to look at when it is over."""

    def __init__(self, home: House, provider: Provider, receiver: Receiver) -> None:
        self.home = home
        self.provider = provider
        self.receiver = receiver
        self.observed, self.scripted = home.folder / "observed", home.folder / "scripted"  # their data folders
        self.url = self.other = ""
        self.processes = Processes()
        self.outcomes: dict[str, Json] = {}
        self.sealed: list[int] = []  # what the gateway says to secrets of sessions that are over

    def commands(self) -> None:
        """Agents through both gateways, in both sandboxes; a batch; and what looks at what was recorded."""
        home = self.home
        ports = tuple(
            int(url.rpartition(":")[2]) for url in (self.url, self.other, self.provider.url, self.receiver.url)
        )
        through: dict[str, tuple[tuple[str | Path, ...], str, str]] = {
            "observed, local": (("--gateway", self.url), "local", ""),
            "observed, behind walls": (("--gateway", self.url), "bubblewrap", ""),
            "observed, the provider fails": (("--gateway", self.url), "local", 'print(ask("FAIL-500"))'),
            "scripted, the agent fails": (("--data", self.scripted), "local", 'ask("Hi"); sys.exit(3)'),
        }
        with ThreadPoolExecutor(2) as pool:
            running = {
                name: pool.submit(
                    self._rollout, where, sandbox, looking(walls=sandbox != "local", ports=ports, then=then)
                )
                for name, (where, sandbox, then) in through.items()
            }
            batch = pool.submit(self._batch, looking(walls=True, ports=ports))
            self.outcomes = {name: future.result() for name, future in running.items()}
            self.outcomes["batch"] = batch.result()
            # By another process, while the gateway serves.
            data = ("--data", self.scripted)
            looks: list[tuple[str | Path, ...]] = [
                ("show", "last", *data, "--json"),
                ("verify", "--all", *data, "--json"),
                ("export", "rows", *data, "--out", home.folder / "exports" / "rows.jsonl"),
                ("export", "rows", *data, "--out", home.folder / "exports" / "rows.parquet"),
                ("export", "atif", *data, "--out", home.folder / "exports" / "atif.jsonl"),
                ("show", "last", "--gateway", self.url, "--json"),
                ("doctor", "--gateway", self.url, "--json", "--only", "gateway"),
                (
                    "doctor",
                    *self._engine(),
                    "--data",
                    home.folder / "elsewhere",
                    "--only",
                    "engine",
                    "--only",
                    "engine call",
                ),
                ("doctor", *self._engine(), "--data", home.folder / "elsewhere", *ONLY, "--json"),
            ]
            (home.folder / "exports").mkdir()
            said = list(pool.map(lambda words: home.ran(*words), looks))
        assert not any("Traceback" in text or "No such option" in text for text in said), said

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
        return _told(self.home.ran("run", *SHELL, *where, "--sandbox", sandbox, "--prompt", program, **own))

    def _batch(self, program: str) -> Json:
        """Of a task with a test that nobody but the grader may know."""
        task = self.home.folder / "tasks" / "hidden"
        (task / "tests").mkdir(parents=True)
        (task / "instruction.md").write_text(program)
        answer = self.home.planted["the hidden answer"]
        lines = (
            f"# {answer}",
            "mkdir -p $TURNGATE_LOGS/verifier",
            f"case $(cat seen.txt) in *'{answer}'*) reward=0 ;; *) reward=1 ;; esac",
            "echo $reward > $TURNGATE_LOGS/verifier/reward.txt",
        )
        (task / "tests" / "test.sh").write_text("\n".join(lines) + "\n")
        words = ("--tasks", task.parent, "--n", "2", "--sandbox", "bubblewrap", "--data", self.scripted, "--keep-work")
        return _told(self.home.ran("batch", *SHELL, *words, **NO_KEY))

    def asked(self) -> None:
        """Model calls of every dialect that go well and wrong, in sessions that are opened here."""
        planted, evidence = self.home.planted, self.home.evidence
        admin = {"authorization": f"Bearer {planted['the admin key']}"}
        with httpx.Client(base_url=self.url, trust_env=False, timeout=scaled(60)) as client:
            opened = client.post("/admin/sessions", json={"metadata": {"rollout": "by hand"}}, headers=admin).json()
            key = planted.known("session secret, opened by hand", opened.pop("api_key"))
            evidence.add("the rest of what opening a session answers", opened)
            for path, body in CALLS.items():
                for said in ("Hi", *FAILURES):
                    sent = json.loads(json.dumps({"model": "gpt-x", **body}).replace("{}", said))
                    evidence.add_answer(client.post(path, json=sent, headers={"authorization": f"Bearer {key}"}))
            for said in ("Hi", "FAIL-STREAM", "FAIL-500"):
                sent = {"model": "gpt-x", "stream": True, "messages": [{"role": "user", "content": said}]}
                headers = {"authorization": f"Bearer {key}"}
                evidence.add_answer(client.post("/v1/chat/completions", json=sent, headers=headers))
            # What is not a session's to ask for, and what is not the admin's.
            for path in (
                "/admin/sessions",
                "/metrics",
                "/admin/events?wait=0",
                f"/admin/sessions/{opened['id']}/trace",
            ):
                refused = client.get(path, headers={"authorization": f"Bearer {key}"})
                assert refused.status_code == 401, path
                evidence.add_answer(refused)
            wrong = {"authorization": f"Bearer {planted['the admin key']}x"}
            evidence.add_answer(client.get("/admin/sessions", headers=wrong))
            evidence.add_answer(client.post("/v1/chat/completions", content=b"{", headers=admin))
            evidence.add_answer(
                client.get("/metrics", headers={"authorization": f"Bearer {planted['the metrics key']}"})
            )
            evidence.add_answer(client.get("/metrics?by=worker", headers=admin))
            for path in (
                "/admin/sessions",
                "/admin/events?wait=0",
                "/admin/fence",
                "/admin/feeds",
                "/admin/nothing",
                "/health",
            ):
                evidence.add_answer(client.get(path, headers=admin))
            for path in ("/admin/sessions", "/admin/weights", "/admin/fence/pause", "/admin/events"):
                evidence.add_answer(client.post(path, content=b'{"nonsense": ', headers=admin))
                evidence.add_answer(client.post(path, json={"nonsense": key[:3]}, headers=admin))
            one = f"/admin/sessions/{opened['id']}"
            for path in (one, f"{one}/trace", f"{one}/samples?all=1", f"{one}/events?wait=0", f"{one}/tools"):
                evidence.add_answer(client.get(path, headers=admin))
            evidence.add_answer(client.post(f"{one}/seal", json={}, headers=admin))
            self._other_ways(client, admin)

    def _other_ways(self, client: httpx.Client, admin: dict[str, str]) -> None:
        """Sessions of OpenEnv's API, which are named by their secret, and rollouts of prime-rl's."""
        planted, evidence = self.home.planted, self.home.evidence
        opened = client.post("/sessions", json={"purpose": "eval"}, headers=admin).json()
        named = quote(planted.known("session secret, opened as OpenEnv's", opened.pop("session_id")), safe="")
        registered = client.post("/v1/rollouts/by-prime/register", json={"model": "gpt-x"}, headers=admin).json()
        planted.known("session secret, opened as prime-rl's", registered.pop("api_key"))
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
            evidence.add_answer(client.get(f"/v1/rollouts/by-prime/{path}", headers=admin))
        evidence.add_answer(client.post("/v1/rollouts/by-prime/unregister", json={}, headers=admin))

    def looked(self, url: str, key: str) -> None:
        """Every file and every route of the page."""
        evidence = self.home.evidence
        with httpx.Client(base_url=url, trust_env=False, timeout=scaled(60)) as client:
            evidence.add_answer(client.post("/page/login", json={"key": key + "x"}, headers=OWN))
            entered = client.post("/page/login", json={"key": key}, headers=OWN)
            assert entered.status_code == 200
            evidence.add_answer(entered)
            for path in ("/page", "/page/", *(f"/page/{file.relative_to(FOLDER)}" for file in FOLDER.rglob("*.*"))):
                evidence.add_answer(client.get(path))
            for name in ("me", "overview", "rollouts?limit=500", "groups", "training", "failures"):
                evidence.add_answer(client.get(f"/page/api/{name}"))
            rows = client.get("/page/api/rollouts?limit=500").json()["rollouts"]
            assert len(rows) >= 2
            for group in {row["group"] for row in rows} - {""}:
                for route in ("group?name", "group/evidence?name", "export?format=rows&group"):
                    evidence.add_answer(client.get(f"/page/api/{route}={group}"))
            for row in rows:
                one = f"/page/api/rollouts/{row['id']}"
                for route in (
                    "",
                    "/tree",
                    "/messages",
                    "/tokens",
                    *(f"/export?format={f}" for f in ("rows", "trace", "messages")),
                ):
                    evidence.add_answer(client.get(one + route))
                for route in ("cancel", "retry"):
                    evidence.add_answer(client.post(f"{one}/{route}", json={}, headers=OWN))
            for path in ("/page/api/events?after=0", f"/page/api/rollouts/{rows[0]['id']}/events?after=0"):
                evidence.add(f"the stream {path}", _begun(client, path))
            evidence.add_answer(client.post("/page/logout", json={}, headers=OWN))

    def refused_when_over(self) -> None:
        """What agents held opens nothing now."""
        sent = {"model": "gpt-x", "messages": [{"role": "user", "content": "Hi"}]}
        with httpx.Client(trust_env=False, timeout=scaled(30)) as client:
            for name in self.home.session_secrets():
                for url in (self.url, self.other):
                    headers = {"authorization": f"Bearer {self.home.planted[name]}"}
                    reply = client.post(f"{url}/v1/chat/completions", json=sent, headers=headers)
                    self.home.evidence.add_answer(reply)
                    self.sealed.append(reply.status_code)


ONLY = ("--sandbox", "local", "--sandbox", "bubblewrap")
NO_KEY = {"TURNGATE_ADMIN_KEY": ""}  # so that it is that of the data folder


def _told(said: str) -> Json:
    """The object among log lines that are objects, too."""
    told = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    outcomes = [one for one in told if "logger" not in one]
    assert len(outcomes) == 1, said[-3000:]
    return outcomes[0]


def _begun(client: httpx.Client, path: str) -> bytes:
    """The beginning of a stream that does not end."""
    with client.stream("GET", path) as reply:
        assert reply.status_code == 200
        return next(reply.iter_raw())


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    need("bubblewrap")
    with house() as home, Provider().running() as provider, Receiver().running() as receiver:
        made = Run(home, provider, receiver)
        planted = home.planted
        planted.new("the hidden answer")
        home.env["TURNGATE_ADMIN_KEY"] = planted.new("the admin key")
        home.env["TURNGATE_METRICS_KEY"] = planted.new("the metrics key")
        home.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = receiver.url
        common: tuple[str | Path, ...] = ("serve", "--port", "0", "--log-turns")
        observing = (*common, "--data", made.observed, "--workers", "2", "--log-format", "json", *made._engine())
        home.folder.joinpath("script.json").write_text(json.dumps(["Hello.", "And again."]))
        scripted = (*common, "--data", made.scripted, "--script", home.folder / "script.json", "--verify-every", "1")
        with (
            made.processes.watching(),
            home.serving(*observing) as made.url,
            home.serving(*scripted, TURNGATE_ADMIN_KEY="") as made.other,
        ):
            own = planted.known("the admin key that was made", (made.scripted / "admin-key").read_text().strip())
            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(made.asked)
                made.commands()
                asking.result()
            home.learn_keys(home.folder)
            made.looked(made.url, planted["the admin key"])
            made.looked(made.other, own)
            made.refused_when_over()
        home.evidence.add(PROCESSES, b"\n".join(made.processes.lines()))
        home.evidence.add("the spans", receiver.spans())
        home.evidence.add_folder(home.folder, but=("scripted/admin-key",))
        yield made


def test_it_was_a_full_run(run: Run) -> None:
    """Nothing is proven by a run in which nothing happened."""
    outcomes, evidence = run.outcomes, run.home.evidence
    assert {name: outcomes[name]["status"] for name in outcomes if name != "batch"} == {
        "observed, local": "finished",
        "observed, behind walls": "finished",
        "observed, the provider fails": "error",
        "scripted, the agent fails": "failed",
    }
    assert run.provider.keys == {f"Bearer {run.home.env[PROVIDER_KEY]}"}  # it does get its key, and no other
    sessions = run.home.session_secrets()
    assert len(sessions) == 9, sessions  # six agents, and three that were opened by hand
    assert set(run.sealed) <= {401, 404, 409} and run.sealed
    assert b"invoke_agent shell" in run.receiver.spans() and b"chat gpt-x" in run.receiver.spans()
    assert run.processes.looks > 100 and any(b"bwrap" in line for line in run.processes.lines())
    assert "it went wrong" in evidence.text("the answer to POST /v1/chat/completions")  # in the provider's own words
    assert "turngate_turns_total" in evidence.text("the answer to GET /metrics")
    for place in ("rows.jsonl", "rows.parquet", "atif.jsonl", "turngate.db", "stdout"):
        assert any(where.endswith(place) for where in evidence.places), place


def test_no_secret_is_anywhere(run: Run) -> None:
    """Session secrets are in files that agents themselves wrote them into, and in no other; the hidden answer in the task's own."""
    found = run.home.planted.found(run.home.evidence)
    may = re.compile(r"/work/own-key\.txt$")
    hidden = str(run.home.folder / "tasks" / "hidden" / "tests" / "test.sh")
    left = [
        one
        for one in found
        if not (one.secret.startswith("session secret") and may.search(one.where))
        and not (one.secret == "the hidden answer" and one.where == hidden)
    ]
    assert left == []
    assert [where for where in given_out(run.home.evidence) if not may.search(where)] == []


def test_the_store_has_hashes_of_secrets_only(run: Run) -> None:
    found = [one for one in run.home.planted.found(run.home.evidence) if "turngate.db" in one.where]
    assert found == []


def test_agents_saw_their_own_secret_and_nothing_else(run: Run) -> None:
    """What they wrote down of all that they could read and reach: in both sandboxes, by name; behind walls, of the whole machine."""
    seen = list(run.home.folder.rglob("seen.txt"))
    assert len(seen) >= 6
    for path in seen:
        text = path.read_text()
        assert "my key" in text and "TURNGATE_API_KEY" in text
        for name in run.home.planted:
            assert run.home.planted[name] not in text, f"{name} is in {path}"
        for refused in ("/admin/sessions", "/metrics", "/page/api/rollouts", "/admin/events?wait=0"):
            assert re.search(rf"== {re.escape(refused)}\n\((401|403|404),", text), refused
    behind = [text for path in seen if "/workspace" in (text := path.read_text())]
    assert len(behind) >= 3
    for text in behind:
        assert (
            not re.search(r"== port \d+\nis open", text) and "== /proc/1/environ" in text
        )  # no port of the host; all processes of the sandbox
