"""Data written before the code was reorganized in November 2026 gives the same answers today.

`recorded-2026-11/` was written by commit b45c528 over HTTP and the command line: a store with one finished session in each dialect (with
forks, a side call, host tools, outcomes and a feed), an open session and an infrastructure fault; what the admin API answered about them;
the exports; the ledger and summary of a batch with a real agent; and settings files with what they meant.
"""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.kit import Json, gateway, say
from turngate import config
from turngate.rollout import ledger
from turngate.service import config as service_config
from turngate.trainers.export import export
from turngate.trainers.export.base import ExportChoices
from turngate.verify import Renderers, SessionReader, VerifyOptions, verify
from turngate.views.session import open_row_source

RECORDED = Path(__file__).parent / "recorded-2026-11"
ANSWERS: dict[str, Any] = json.loads((RECORDED / "answers.json").read_text())
DELIVERIES = "/admin/feeds/train/deliveries"
SESSIONS = ["chat", "responses", "messages", "gemini", "left-open", "no-reward"]
EXPORTS = sorted(file.stem for file in (RECORDED / "exports").iterdir())  # the formats of that time


def without_clocks(answer: dict[str, Any]) -> dict[str, Any]:
    """Remove what a gateway keeps in memory only (how long ago an open session was used), and fields that were added since."""
    return {name: value for name, value in answer.items() if name not in ("last_used", "unheard_s", "training")}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    shutil.copy(RECORDED / "turngate.db", tmp_path / "turngate.db")
    return tmp_path


@pytest.mark.parametrize("path", [path for path in ANSWERS if path != DELIVERIES])
async def test_answers_are_the_same(path: str, data: Path) -> None:
    async with gateway(data=data) as g:
        answer = await g.admin.get(path)
        assert answer.is_success
        if isinstance(ANSWERS[path], str):  # a stream of events
            assert answer.text.startswith(ANSWERS[path])
        else:
            assert without_evidence(without_clocks(answer.json())) == without_clocks(ANSWERS[path])


def without_evidence(answer: dict[str, Any]) -> dict[str, Any]:
    """Remove a field that traces did not have then: what decided the role of each turn. The roles are the same."""
    if "nodes" not in answer:
        return answer
    assert all(node["evidence"] for node in answer["nodes"] if node["kind"] == "sampled")
    nodes = [{name: value for name, value in node.items() if name != "evidence"} for node in answer["nodes"]]
    return {**answer, "nodes": nodes}


async def test_deliveries_are_the_same(data: Path) -> None:
    async with gateway(data=data) as g:
        reader = (await g.admin.post("/admin/feeds/train/reader", json={})).json()["reader"]
        answer = await g.admin.get(f"{DELIVERIES}?wait=0&after=0&reader={reader}")
        assert msgspec.msgpack.decode(answer.content) == msgspec.msgpack.decode(base64.b64decode(ANSWERS[DELIVERIES]))


async def test_open_session_continues_its_branch(data: Path) -> None:
    async with gateway([say("Go on.")], data=data) as g:
        message = ANSWERS["/admin/sessions/left-open/trace"]["nodes"][1]["message"]
        reply = {"role": "assistant", "content": message["content"], "reasoning_content": message["reasoning"]}
        history = [{"role": "user", "content": "Wait."}, reply, {"role": "user", "content": "Continue."}]
        body = {"model": "scripted", "messages": history}
        answer = await g.admin.post("/s/left-open/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "Go on."
        [row] = await g.samples("left-open")
        assert len(row["spans"]) == 2


@pytest.mark.parametrize("name", EXPORTS)
def test_exports_are_the_same(name: str, data: Path) -> None:
    file = data / f"{name}.jsonl"
    export(data, file, ExportChoices(format=name))
    rows = [json.loads(line, object_hook=_remove_added) for line in file.read_text().splitlines()]
    assert rows == [json.loads(line) for line in (RECORDED / "exports" / f"{name}.jsonl").read_text().splitlines()]


def _remove_added(value: Json) -> Json:
    """Remove the fields that exports have had since then."""
    value.pop("token_versions", None)
    return value


@pytest.mark.parametrize("session", SESSIONS)
def test_sessions_pass_verification(session: str, data: Path) -> None:
    with SessionReader(data) as folder, open_row_source(data) as rows:
        verdict = verify(folder, session, VerifyOptions(rows=rows, renderers=Renderers()))
    assert verdict.ok, verdict


def test_batch_ledger_is_readable(tmp_path: Path) -> None:
    shutil.copy(RECORDED / "ledger.jsonl", tmp_path / "ledger.jsonl")
    known = ledger.read_ledger(tmp_path)
    assert {one.kind for one in known.finished.values()} == {"graded"} and len(known.finished) == 2


def test_settings_mean_the_same() -> None:
    expected = json.loads((RECORDED / "settings.json").read_text())
    for settings, name in (
        (config.load_config(RECORDED / "serve.toml", {}), "serve"),
        (service_config.load_config(RECORDED / "service.toml"), "service"),
    ):
        found = json.loads(msgspec.json.encode(settings))  # settings that were added since then have their defaults
        assert {key: found.get(key) for key in expected[name]} == expected[name]
