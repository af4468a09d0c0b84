"""The doctor's checks of a running gateway, and the command itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.cli.kit import run_cli, run_rejected
from tests.doctor.kit import findings_text, run_check, run_checks
from tests.kit import gateway, say
from turngate.config import ServeConfig

ALL = ("gateway", "gateway engines", "gateway call", "gateway clock", "gateway load")


async def test_healthy_gateway_passes_and_keeps_no_session(tmp_path: Path) -> None:
    async with gateway([say("Hello.")], data=tmp_path) as g:
        g.app.metrics.lag.observe(0.0)
        findings = await run_checks(ServeConfig(), *ALL, gateway=g.root, admin_key=g.app.admin_key)
        states = {finding.check: finding.state for finding in findings}
        # The test's uvicorn sends no date.
        assert states == {**dict.fromkeys(ALL, "ok"), "gateway clock": "not checked"}, findings_text(findings)
        assert (await g.admin.get("/admin/sessions")).json()["sessions"] == []
        assert g.app.admin_key not in findings_text(findings)


async def test_wrong_key_fails_and_pause_and_lag_warn(tmp_path: Path) -> None:
    async with gateway([say("Hello.")], data=tmp_path) as g:
        wrong = await run_checks(ServeConfig(), *ALL, gateway=g.root, admin_key="wrong-wrong-wrong-wrong")
        assert {f.check: f.state for f in wrong if f.state != "not checked"} == {
            "gateway": "failure",
            "gateway engines": "ok",
        }
        await g.pause()
        first, held = await run_checks(ServeConfig(), "gateway", gateway=g.root, admin_key=g.app.admin_key)
        assert (first.state, held.state) == ("ok", "warning") and "resume" in held.fix
        assert (
            await run_check(ServeConfig(), "gateway call", gateway=g.root, admin_key=g.app.admin_key)
        ).state == "not checked"
        await g.resume()
        for _ in range(20):
            g.app.metrics.lag.observe(0.7)
        late = await run_check(ServeConfig(), "gateway load", gateway=g.root, admin_key=g.app.admin_key)
        assert late.state == "warning" and "--workers" in late.fix


async def test_gateway_call_without_engine_is_failure(tmp_path: Path) -> None:
    async with gateway([say("x", fail_before=True)], data=tmp_path) as g:
        finding = await run_check(ServeConfig(), "gateway call", gateway=g.root, admin_key=g.app.admin_key)
        assert finding.state == "failure" and "503" in finding.message
        assert (await g.admin.get("/admin/sessions")).json()["sessions"] == []


async def test_gateway_option_ignores_local_settings(tmp_path: Path) -> None:
    async with gateway([say("Hello.")], data=tmp_path) as g:
        env = {"TURNGATE_ADMIN_KEY": g.app.admin_key}
        only = [word for name in ("gateway", "gateway call") for word in ("--only", name)]
        outcome = await asyncio.to_thread(run_cli, "doctor", "--gateway", g.root, "--json", *only, env=env)
    report = json.loads(outcome.stdout)
    assert outcome.exit_code == 0 and report["passed"] and report["counts"]["ok"] == 2
    assert {finding["check"] for finding in report["findings"]} == {"gateway", "gateway call"}


def test_command_prints_failure_and_fix(tmp_path: Path) -> None:
    fine = run_cli("doctor", "--data", tmp_path, "--only", "engine call", "--only", "template", "--only", "disk")
    assert fine.exit_code == 0 and "3 ok" in fine.stdout
    (tmp_path / "admin-key").write_text("planted-admin-key-0123456789")
    (tmp_path / "admin-key").chmod(0o666)
    failed = run_cli("doctor", "--data", tmp_path, "--only", "admin key")
    assert failed.exit_code == 1 and "failure" in failed.stdout and "run chmod 600 on the file" in failed.stdout
    assert "planted" not in failed.output
    machine_readable = run_cli("doctor", "--data", tmp_path, "--only", "admin key", "--json")
    assert machine_readable.exit_code == 1
    [finding] = json.loads(machine_readable.stdout)["findings"]
    assert (finding["check"], finding["state"]) == ("admin key", "failure") and finding["mend"]


def test_flags_override_config_file(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('engine = "gate"\ntokenizer = "turngate/render/builtin"\n')
    outcome = run_cli("doctor", "--config", file, "--only", "engine", "--data", tmp_path)
    assert outcome.exit_code == 0 and "the engine is the trainer" in outcome.stdout
    outcome = run_cli("doctor", "--config", file, "--engine", "scripted", "--only", "engine", "--data", tmp_path)
    assert "scripted: serves scripted" in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--only", "enginee"), "did you mean engine?"),
        (("--engine", "vllm"), "--engine-url"),
        (("--gateway", "http://127.0.0.1:1"), "TURNGATE_ADMIN_KEY"),
        (("--engine", "vllm", "--engine-url", "http://x", "--model", "m", "--tokenizer", ".", "--engine-key-env", "NOT_SET_AT_ALL"),
         "NOT_SET_AT_ALL"),
    ],
)  # fmt: skip
def test_invalid_options_are_one_line_errors(arguments: tuple[str, ...], words: str) -> None:
    assert words in run_rejected("doctor", *arguments)


def test_options_that_conflict_with_gateway_are_refused() -> None:
    env = {"TURNGATE_ADMIN_KEY": "planted-admin-key-0123456789"}
    assert "remove --engine" in run_rejected("doctor", "--gateway", "http://127.0.0.1:1", "--engine", "vllm", env=env)
    assert "remove --config" in run_rejected("doctor", "--gateway", "http://127.0.0.1:1", "--config", "x.toml", env=env)
    assert "remove --no-log-turns" in run_rejected(
        "doctor", "--gateway", "http://127.0.0.1:1", "--no-log-turns", env=env
    )
    assert "not an http(s) URL" in run_rejected("doctor", "--gateway", "nonsense", env=env)
    assert "run it there without --gateway" in run_rejected(
        "doctor", "--gateway", "http://127.0.0.1:1", "--only", "disk", env=env
    )
    assert "also pass --gateway URL" in run_rejected("doctor", "--only", "gateway")
