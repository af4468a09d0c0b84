"""Log lines: valid JSON with the session and rollout, and never a secret."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.cli.kit import ROOT, run_rejected
from tests.kit import gateway, say
from tests.speed import scaled
from turngate.telemetry import logs

log = logging.getLogger("turngate.test")


@contextmanager
def captured_lines(format: logs.Format = "json", worker: int | None = None) -> Iterator[list[Any]]:
    """Collect the lines logged inside the block, parsed if they are JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter(worker) if format == "json" else logs.TextFormatter(worker))
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    found: list[Any] = []
    try:
        yield found
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        output = stream.getvalue()
        found += map(json.loads, output.splitlines()) if format == "json" else output.splitlines()


def test_json_line_has_context_fields() -> None:
    with captured_lines(worker=3) as found:
        log.info("hello %s", "two\nlines")
        with logs.log_context("s1", {"rollout": "r1", "group": "g1", "other": "x"}):
            log.warning("inside")
        log.warning("outside")
    first, inside, outside = found
    assert (first["level"], first["logger"], first["message"]) == ("info", "turngate.test", "hello two\nlines")
    assert first["time"].endswith("Z") and first["worker"] == 3 and "session" not in first
    assert (inside["session"], inside["rollout"], inside["group"]) == ("s1", "r1", "g1")
    assert "session" not in outside
    wrong = log.makeRecord(log.name, logging.INFO, "", 0, "%d of them", ("no number",), None)
    assert "no number" in json.loads(logs.JsonFormatter().format(wrong))["message"]  # still logged


def test_exception_has_traceback_field() -> None:
    with captured_lines() as found:
        try:
            raise ValueError("it is broken")
        except ValueError:
            log.exception("failed")
    [line] = found
    assert (line["message"], line["error"]) == ("failed", "ValueError: it is broken")
    assert "test_exception_has_traceback" in line["traceback"]


@pytest.mark.parametrize("format", ["json", "text"])
def test_secrets_are_redacted(format: logs.Format) -> None:
    session, admin = "tg-0a1b" + "x" * 43, "tga-" + "y" * 43
    engine, quoted = "engine-key-0123456789", 'with"quotes\\and-more'
    logs.register_secrets(engine, quoted, "short")
    with captured_lines(format) as found:
        log.error("keys %s %s %s %s", session, admin, engine, quoted)
        log.error("Authorization: Bearer %s and http://me:%s@host/v1", "abcdefgh12345678", "password")
        try:
            raise RuntimeError(f"calling with {engine}")
        except RuntimeError:
            log.exception("wrong")
        log.error("a short word stays, and so does tg-cafe")
    text = json.dumps(found)
    for secret in (session, admin, engine, quoted, json.dumps(quoted)[1:-1], "abcdefgh12345678", "password"):
        assert secret not in text
    assert text.count("[secret]") >= 7
    assert "a short word stays, and so does tg-cafe" in text


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("unspeakable-key-0123456789")


@pytest.mark.parametrize("format", ["json", "text"])
def test_secrets_are_redacted_in_unencodable_lines(
    format: logs.Format, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's handler rejects such lines
    secret = "unspeakable-key-0123456789"
    odd = 'odd"key\\of-the-engine'
    logs.register_secrets(secret, odd)
    with logs.log_to_stderr(format), logs.log_context("s\ud800", {"rollout": f"a\ud800b {secret}", "group": "g\udc80"}):
        logger = logging.getLogger("turngate")
        try:
            raise ValueError(f"a name \udc80 and {secret}")
        except ValueError:
            logger.exception("failed with %s", f"\udc80 {secret}")
        logger.warning("%d and %d", secret, odd)
        logger.warning("%(what)d", {"what": odd})
        logger.warning("this one cannot be told: %s, %s", secret, Unprintable())
    output = capsys.readouterr().err
    for word in (secret, odd, repr(odd)[1:-1], json.dumps(odd)[1:-1], "Logging error"):
        assert word not in output
    captured_lines = output.splitlines()
    assert (
        "could not write a log line from test_logs.py" in captured_lines[-1] and ": RuntimeError" in captured_lines[-1]
    )
    if format == "json":
        first, *_ = parsed = [json.loads(line) for line in captured_lines]
        assert len(parsed) == 4 and first["rollout"] == f"a\\ud800b {logs.REDACTED}"
        assert first["error"] == f"ValueError: a name \\udc80 and {logs.REDACTED}"


async def test_call_lines_name_session_and_rollout(tmp_path: Path) -> None:
    async with gateway([say("x", fail_before=True)], data=tmp_path) as g:
        one = await g.open(metadata={"rollout": "task-7/2", "group": "task-7"})
        with captured_lines() as found:
            with pytest.raises(openai.APIStatusError):
                await g.ask(one.key, "Hi")
            logging.getLogger("turngate").warning("of nobody; %s", g.app.admin_key)
    [parsed] = [line for line in found if "engine error" in line["message"]]
    assert (parsed["session"], parsed["rollout"], parsed["group"]) == (one.id, "task-7/2", "task-7")
    [other] = [line for line in found if "of nobody" in line["message"]]
    assert "session" not in other and g.app.admin_key not in other["message"]
    assert one.key not in json.dumps(found)


@pytest.mark.process
def test_gateway_logs_only_json(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "turngate",
        "serve",
        "--port",
        "0",
        "--data",
        str(tmp_path),
        "--log-format",
        "json",
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TURNGATE", "OTEL"))}
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT, env=env) as process:
        assert process.stderr is not None
        first = json.loads(process.stderr.readline())
        url = first["message"].split()[3]
        assert httpx.get(f"{url}/health", trust_env=False, timeout=scaled(20)).is_success
        process.send_signal(signal.SIGTERM)
        rest = [json.loads(line) for line in process.stderr]
    assert process.returncode == 0
    assert first["message"].startswith("turngate listens on http://127.0.0.1:")
    assert any("renderer" in line["message"] for line in rest)


class TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "is_followed"), [(TerminalStream(), True), (io.StringIO(), False)])
def test_live_display_gets_lines_for_terminal(
    stream: io.StringIO, is_followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live display replaces standard error. Lines that bypass it on a terminal would be overwritten."""
    monkeypatch.setattr(sys, "stderr", stream)
    with logs.log_to_stderr():
        display = io.StringIO()
        monkeypatch.setattr(sys, "stderr", display)
        log.warning("a line")
    assert ("a line" in display.getvalue()) is is_followed
    assert ("a line" in stream.getvalue()) is not is_followed


def test_unknown_log_format_is_rejected(tmp_path: Path) -> None:
    assert "--log-format" in run_rejected("serve", "--log-format", "xml", "--data", tmp_path)
    assert "--log-format must be text or json, not 'xml'" in run_rejected(
        "run", "--agent", "shell", "--prompt", "x", "--log-format", "xml", "--data", tmp_path
    )
