"""Test authorization: an agent's key opens the model calls of one session, and replies leak nothing else."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit import Gated, Json, OpenSession, Running, calls, gateway, read_reply, say, tool, until, user
from turngate.client.keys import locate_admin_key, read_admin_key, read_stored_admin_key
from turngate.config import ServeConfig
from turngate.engines.scripted import Scripted, derive_logprobs
from turngate.errors import ConfigError
from turngate.server.app import Gateway
from turngate.server.auth import admin_key

HI = [user("Hi")]
CALL = {"model": "m", "messages": HI}
ADMIN = [
    ("GET", "/admin/sessions"),
    ("POST", "/admin/sessions"),
    ("GET", "/admin/sessions/{id}"),
    ("DELETE", "/admin/sessions/{id}"),
    ("GET", "/admin/sessions/{id}/trace"),
    ("GET", "/admin/sessions/{id}/samples"),
    ("GET", "/admin/sessions/{id}/events"),
    ("POST", "/admin/sessions/{id}/seal"),
    ("POST", "/admin/sessions/{id}/cancel"),
    ("GET", "/admin/events"),
    ("GET", "/admin/fence"),
    ("POST", "/admin/fence/pause"),
    ("POST", "/admin/fence/resume"),
    ("GET", "/admin/weights"),
    ("POST", "/admin/weights"),
    ("POST", "/v1/rollouts/{id}/register"),
    ("GET", "/v1/rollouts/{id}/trajectory"),
    ("POST", "/v1/rollouts/{id}/cancel"),
    ("POST", "/v1/rollouts/{id}/unregister"),
]
MODEL = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/chat/completions"),
    ("POST", "/s/{id}/v1/chat/completions"),
    ("POST", "/s/{id}/chat/completions"),
    ("POST", "/v1/rollouts/{id}/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/m"),
    ("GET", "/s/{id}/v1/models"),
    ("GET", "/v1/rollouts/{id}/models"),
]


async def test_wrong_keys_are_unauthorized_everywhere() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        wrong = ["", "wrong", session.id, session.key[:-1], session.key + "x", g.app.admin_key[:-1], "tg-", "Bearer"]
        for key in wrong:
            for method, path in [*ADMIN, *MODEL]:
                response = await g.http(key).request(method, path.format(id=session.id), json=CALL)
                assert response.status_code == 401, (key, method, path)
                assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await g.show(session.id))["status"] == "open" and not g.engine.received


async def test_only_bearer_tokens_are_accepted() -> None:
    async with gateway([say("Hello.")] * 2) as g:
        session = await g.open()
        bare = g.http()
        for headers in (
            {"authorization": session.key},
            {"authorization": f"Basic {session.key}"},
            {"x-api-key": session.key},
            {"api-key": session.key},
            {"cookie": f"key={session.key}"},
        ):
            assert (await bare.post("/v1/chat/completions", json=CALL, headers=headers)).status_code == 401
        assert (await bare.post(f"/v1/chat/completions?api_key={session.key}", json=CALL)).status_code == 401
        for malformed in (b"Bearer \xff\xfe", b"Bearer \xe2\x82\xac", b"Bearer"):
            response = await bare.post("/v1/chat/completions", json=CALL, headers={b"authorization": malformed})
            assert response.status_code == 401
            assert (await bare.get("/admin/sessions", headers={b"authorization": malformed})).status_code == 401
        for scheme in ("Bearer", "bearer"):
            headers = {"authorization": f"{scheme} {session.key}"}
            assert (await bare.post("/v1/chat/completions", json=CALL, headers=headers)).status_code == 200


async def test_session_key_opens_no_admin_endpoint() -> None:
    async with gateway() as g:
        session = await g.open()
        for method, path in ADMIN:
            response = await g.http(session.key).request(method, path.format(id=session.id), json={})
            assert response.status_code == 401, (method, path)
        assert (await g.show(session.id))["status"] == "open"


async def test_session_key_opens_no_other_session() -> None:
    async with gateway([say("Hello.")]) as g:
        own, other = await g.open(), await g.open()
        for path in ("/s/{id}/v1/chat/completions", "/s/{id}/chat/completions", "/v1/rollouts/{id}/chat/completions"):
            response = await g.http(own.key).post(path.format(id=other.id), json=CALL)
            assert response.status_code == 401
            # The reply for an unknown session is identical, so it does not reveal which sessions exist.
            unknown = await g.http(own.key).post(path.format(id="nobody"), json=CALL)
            assert (unknown.status_code, unknown.content) == (response.status_code, response.content)
        assert await g.turns(other.id) == []
        assert (await g.http(own.key).get(f"/s/{other.id}/v1/models")).status_code == 401


async def test_admin_key_opens_sessions_only_by_path() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        assert (await g.admin.post(f"/s/{session.id}/v1/chat/completions", json=CALL)).status_code == 200
        assert (await g.admin.post("/v1/chat/completions", json=CALL)).status_code == 401


async def test_malformed_paths_are_refused() -> None:
    async with gateway() as g:
        session = await g.open()
        for path in ("/s//v1/chat/completions", "/s/..%2fadmin/v1/chat/completions", f"/s/{session.id}/admin/sessions"):
            assert (await g.http(session.key).post(path, json=CALL)).status_code in (401, 404)


# ── the admin key ───────────────────────────────────────────────────────────────────────────────────────────────────


def start_gateway(data: Path) -> str:
    """Start and stop a gateway and return its admin key."""
    app = Gateway(ServeConfig(data=str(data)), engine=Scripted([]))
    app.store.close()
    return app.admin_key


def test_admin_key_file_is_created_once_and_private(tmp_path: Path) -> None:
    key = start_gateway(tmp_path / "data")
    file = tmp_path / "data" / "admin-key"
    assert file.read_text().strip() == key and len(key) > 40
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert start_gateway(tmp_path / "data") == key
    assert start_gateway(tmp_path / "other") != key


def test_key_file_never_exists_without_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients wait for the file of a starting gateway, and read it as soon as it exists. The gateway may also be killed while it writes."""
    link = os.link

    def fail(source: str, target: Path) -> None:
        assert not target.exists() and read_stored_admin_key(tmp_path) is None
        assert len(Path(source).read_text().strip()) > 40
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(KeyboardInterrupt):
        admin_key(tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "link", link)
    assert admin_key(tmp_path) == read_stored_admin_key(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["admin-key"]


def test_file_left_by_a_killed_process_is_removed(tmp_path: Path) -> None:
    key = admin_key(tmp_path)
    os.link(tmp_path / "admin-key", tmp_path / ".admin-key.killed")
    assert admin_key(tmp_path) == key
    assert [file.name for file in tmp_path.iterdir()] == ["admin-key"]


def test_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", fail)
    assert admin_key(tmp_path) == admin_key(tmp_path) == read_stored_admin_key(tmp_path)
    [file] = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_broken_link_as_key_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "admin-key").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="admin-key is a broken link; delete it"):
        admin_key(tmp_path)


def test_processes_that_start_at_once_share_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, others = os.link, []

    def create_first(source: str, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        others.append(admin_key(tmp_path))
        link(source, target)

    monkeypatch.setattr(os, "link", create_first)
    assert [admin_key(tmp_path)] == others


def test_data_folder_is_private(tmp_path: Path) -> None:
    start_gateway(tmp_path / "data")
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "data" / "turngate.db").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_readable_key_file_is_refused(mode: int, tmp_path: Path) -> None:
    start_gateway(tmp_path)
    (tmp_path / "admin-key").chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        start_gateway(tmp_path)
    (tmp_path / "admin-key").chmod(0o600)
    start_gateway(tmp_path)  # the failed attempt left no lock behind


@pytest.mark.parametrize("text", ["", "short", "\n\n"])
def test_invalid_admin_key_file_is_refused(text: str, tmp_path: Path) -> None:
    start_gateway(tmp_path)
    (tmp_path / "admin-key").write_text(text)
    with pytest.raises(ConfigError, match="does not contain a valid key"):
        start_gateway(tmp_path)


def test_environment_key_wins_and_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_ADMIN_KEY", "from-the-environment-1234")
    assert start_gateway(tmp_path) == "from-the-environment-1234"
    assert not (tmp_path / "admin-key").exists()
    monkeypatch.delenv("TURNGATE_ADMIN_KEY")
    own = start_gateway(tmp_path)
    monkeypatch.setenv("TURNGATE_ADMIN_KEY", "from-the-environment-1234")
    assert start_gateway(tmp_path) == "from-the-environment-1234"
    assert (tmp_path / "admin-key").read_text().strip() == own


def test_location_of_admin_key_does_not_contain_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate_admin_key(tmp_path) == f"in {tmp_path}/admin-key"
    monkeypatch.setenv("TURNGATE_ADMIN_KEY_FILE", "/run/secrets/key")
    assert locate_admin_key(tmp_path) == "in /run/secrets/key"
    monkeypatch.setenv("TURNGATE_ADMIN_KEY", "from-the-environment-1234")
    assert locate_admin_key(tmp_path) == "the value of TURNGATE_ADMIN_KEY"


def test_short_environment_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_ADMIN_KEY", "secret")
    with pytest.raises(ConfigError, match="16 characters"):
        start_gateway(tmp_path)


def test_environment_can_name_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker, Kubernetes and systemd pass secrets as files; clients can read the key the same way."""
    file = tmp_path / "secret"
    file.write_text("from-a-file-of-its-own\n")
    file.chmod(0o444)  # as Docker mounts it
    monkeypatch.setenv("TURNGATE_ADMIN_KEY_FILE", str(file))
    assert start_gateway(tmp_path / "data") == read_admin_key() == "from-a-file-of-its-own"
    assert not (tmp_path / "data" / "admin-key").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "TURNGATE_ADMIN_KEY_FILE: .* cannot be read"),
        (b"", "TURNGATE_ADMIN_KEY_FILE: .* does not contain a valid key"),
        (b"\xff" * 40, "TURNGATE_ADMIN_KEY_FILE: .* does not contain a valid key"),
        (b"one-key-and-then\nanother-key", "TURNGATE_ADMIN_KEY_FILE: .* does not contain a valid key"),
        (b"short", "16 characters"),
    ],
)
def test_invalid_environment_key_file_is_refused(
    content: bytes | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("TURNGATE_ADMIN_KEY_FILE", str(file))
    with pytest.raises(ConfigError, match=message) as refused:
        start_gateway(tmp_path / "data")
    assert "another-key" not in str(refused.value)


def test_key_and_key_file_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_ADMIN_KEY", "from-the-environment-1234")
    monkeypatch.setenv("TURNGATE_ADMIN_KEY_FILE", "/run/secrets/admin_key")
    with pytest.raises(ConfigError, match="TURNGATE_ADMIN_KEY and TURNGATE_ADMIN_KEY_FILE are both set"):
        start_gateway(tmp_path)


# ── leaks to agents ─────────────────────────────────────────────────────────────────────────────────────────────────


class Wire:
    """Record every response sent to an agent, byte for byte."""

    def __init__(self) -> None:
        self.responses: list[tuple[str, bytes]] = []

    def add(self, name: str, response: httpx.Response, body: bytes) -> None:
        head = b"\n".join(k + b": " + v for k, v in response.headers.raw)
        self.responses.append((name, head + b"\n\n" + body))

    def find(self, *needles: str) -> list[str]:
        """List the responses that contain any of the needles."""
        return [f"{name}: {needle}" for name, data in self.responses for needle in needles if needle.encode() in data]


async def run_every_case(g: Running) -> tuple[Wire, OpenSession, OpenSession]:
    """Run a session through every kind of response, next to another session that it must not see."""
    wire = Wire()
    other = await g.open(id="other-session-0001", metadata={"task": "others-metadata"})
    session = await g.open(id="own-session-0002", metadata={"grade": "hidden-metadata"}, model="m")
    await g.ask(other.key, "Others say xylophone")
    http = g.http(session.key)

    async def call(name: str, key: str = "", path: str = "/v1/chat/completions", **request: Any) -> Json:
        client = g.http(key) if key else http
        async with client.stream("POST", path, json={**CALL, **request}) as response:
            body = await response.aread()
        wire.add(name, response, body)
        return json.loads(body) if response.headers["content-type"] == "application/json" else None

    first = await call("a call", tools=[tool()])
    message = first["choices"][0]["message"]
    history = [*HI, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "A"}]
    await call("a stream", messages=history, tools=[tool()], stream=True, stream_options={"include_usage": True})
    await call("by path", path=f"/s/{session.id}/v1/chat/completions", messages=[user("By path")])
    await call("by rollout path", path=f"/v1/rollouts/{session.id}/chat/completions", messages=[user("By path")])
    for name in ("busy", "gone", "overflow", "cut short", "cut stream", "short log-probabilities"):
        await call(name, messages=[user(name)], stream=name == "cut stream")
    await call("a bad request", n=5)
    await call("a bad message", messages=[{"role": "wizard"}])
    await call("an unknown model", model="gpt-4o")
    await call("a wrong key", key="wrong")
    await call("another's path", path=f"/s/{other.id}/v1/chat/completions")
    for path in ("/v1/models", "/v1/models/m", "/v1/models/x", "/health", "/nowhere", "/admin/sessions"):
        response = await http.get(path)
        wire.add(path, response, response.content)
    limited = await g.open(id="limited-session-0003", limits={"turns": 0})
    conflict = await g.open(id="conflict-session-0004", limits={"turns": 0}, at_limit="conflict")
    await call("past a limit", key=limited.key)
    await call("past a limit with a conflict", key=conflict.key)
    await g.cancel(session.id)
    await call("after the end", stream=True)
    return wire, session, other


def every_case_script(request: Any, index: int) -> Any:
    text = say("<think>\nHm.\n</think>\n\nLook." + calls(("read_file", {"path": "a"}))) if index == 0 else say("Fine.")
    faults: dict[str, Any] = {
        "busy": {"busy": True},
        "gone": {"fail_before": True},
        "overflow": {"overflow": True},
        "cut short": {"cut_after": 2},
        "cut stream": {"cut_after": 2},
        "short log-probabilities": {"short_logprobs": True},
    }
    order = list(faults)
    return say("Fine.", **faults[order[index - 4]]) if 4 <= index < 4 + len(order) else text


async def test_replies_contain_no_token_ids_logprobs_or_secrets() -> None:
    async with gateway(every_case_script) as g:
        wire, session, other = await run_every_case(g)
        assert len(wire.responses) > 20
        assert wire.find(session.key, other.key, g.app.admin_key) == []
        assert wire.find("hidden-metadata", "others-metadata", "xylophone", other.id) == []
        numbers, ids = [], []
        for turn in await g.turns(session.id):
            numbers += [repr(p) for p in turn["logprobs"] or []] + [f"{p:.4f}" for p in turn["logprobs"] or []]
            ids += [
                json.dumps(turn["ids"]),
                json.dumps(turn["ids"], separators=(",", ":")),
                " ".join(map(str, turn["ids"])),
            ]
        prompt = g.engine.received[0].prompt
        numbers += [repr(p) for p in derive_logprobs(prompt, list(say("Fine.").ids))]
        assert numbers and ids and wire.find(*numbers, *ids, json.dumps(prompt.tolist())[1:60]) == []
        assert wire.find("token_ids", "prompt_ids", "version_start", "turngate.db", str(g.app.config.data)) == []


async def test_replies_do_not_contain_session_id() -> None:
    """The id is for the admin; programs in the sandbox need only the key."""
    async with gateway(every_case_script) as g:
        wire, session, _ = await run_every_case(g)
        mentioned = wire.find(session.id, "limited-session-0003", "conflict-session-0004")
        assert mentioned == []


async def test_keys_are_not_on_disk_or_in_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with gateway(every_case_script, data=tmp_path, log_turns=True) as g:
        _, session, other = await run_every_case(g)
        secrets = [session.key, other.key]
        live = b"".join(f.read_bytes() for f in tmp_path.iterdir() if f.name.startswith("turngate.db"))
        logged = "\n".join(
            r.getMessage() for r in caplog.records if not r.name.startswith(("httpx", "httpcore", "openai"))
        )
        admin = g.app.admin_key
    files = b"".join(f.read_bytes() for f in tmp_path.iterdir() if f.name != "admin-key")
    for secret in secrets:
        assert secret.encode() not in live + files and secret not in logged
        assert secret.removeprefix("tg-").encode() not in live + files
    assert admin.encode() not in live + files and admin not in logged
    assert session.id in logged and b"own-session-0002" in live + files  # the search covers the right files


async def test_turn_logging_is_optional_and_logs_no_text(caplog: pytest.LogCaptureFixture) -> None:
    for switch in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, "turngate"):
            async with gateway([say("A very private answer.")], log_turns=switch) as g:
                session = await g.open()
                await g.ask(session.key, "A very private question")
        text = "\n".join(r.getMessage() for r in caplog.records if r.name == "turngate")
        assert (session.id in text) is switch and "private" not in text


async def test_key_of_ended_session_gets_conflict() -> None:
    async with gateway(engine=Gated([say("Hello.")])) as g:
        session = await g.open()
        task = g.start(g.client(session.key).chat.completions.create(model="m", messages=HI))
        await until(lambda: g.gated.waiting)
        g.gated.gate.set()
        reply = read_reply(await task)
        await g.seal(session.id)
        response = await g.http(session.key).post("/v1/chat/completions", json=CALL)
        assert response.status_code == 409 and reply.content not in response.text
        assert response.json()["error"]["code"] == "conflict"


def test_unreadable_key_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "admin-key").mkdir()  # not even root can read it as a file
    with pytest.raises(ConfigError, match="admin-key cannot be read") as raised:
        read_stored_admin_key(tmp_path)
    assert raised.value.param == "data"
