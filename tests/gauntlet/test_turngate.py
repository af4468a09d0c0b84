"""Tests that Turngate passes the Gauntlet in every dialect; they need Qwen3's tokenizer."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from gauntlet.clients import CLIENTS
from gauntlet.gateways.base import Gateway, Session, free_port
from gauntlet.gateways.delivery import Feature, Verdict
from gauntlet.gateways.turngate import Turngate, TurngateDrop
from gauntlet.probes import probe_features
from gauntlet.run import Result, run_scenarios
from gauntlet.scenarios import BY_NAME, SCENARIOS
from gauntlet.score import sum_scores
from gauntlet.tokens import Json, model_folder
from gauntlet.trial import run_engine
from tests.kit import real_tokenizer
from tests.speed import scaled
from turngate.verify import Renderers, VerifyOptions, open_session_reader, verify
from turngate.views.session import open_row_source

pytestmark = [pytest.mark.needs("tokenizers"), pytest.mark.process, pytest.mark.full]

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = f"{sys.executable} {Path(__file__).with_name('external_commands.py')}"
DRIFTS = [s.name for s in SCENARIOS if s.drift and not s.dialects and s.name not in ("ids-renamed", "unicode")]


class TurngateDropInProcess(TurngateDrop):
    """Runs `turngate verify` for the first session only. Verifies the others in this process, which loads the tokenizer once."""

    def __init__(self) -> None:
        super().__init__()
        self._renderers = Renderers()
        self._is_first = True

    async def verify(self, session: Session) -> Json:
        is_first, self._is_first = self._is_first, False
        if is_first:
            return await super().verify(session)
        with open_session_reader(self.data) as reader, open_row_source(self.data) as rows:
            return msgspec.to_builtins(verify(reader, session.id, VerifyOptions(rows=rows, renderers=self._renderers)))


async def run_gateway(gateway: Gateway, names: list[str], dialects: list[str]) -> Result:
    async with aiohttp.ClientSession() as http, run_engine(http) as mock:
        return await run_scenarios(gateway, http, mock, [BY_NAME[name] for name in names], dialects)


@pytest.fixture(scope="module")
def result() -> Result:
    real_tokenizer("qwen3")  # skips if it is missing
    return asyncio.run(run_gateway(Turngate(), list(BY_NAME), list(CLIENTS)))


@pytest.fixture(scope="module")
def dropped() -> Result:
    real_tokenizer("qwen3")
    return asyncio.run(run_gateway(TurngateDropInProcess(), DRIFTS, ["chat"]))


@pytest.mark.parametrize("dialect", CLIENTS)
@pytest.mark.real
@pytest.mark.promise(1)
def test_turngate_has_full_score(result: Result, dialect: str) -> None:
    assert not result.error
    rollouts = [rollout for rollout in result.rollouts if rollout.dialect == dialect]
    assert [rollout for rollout in rollouts if rollout.error] == []
    score = sum_scores(rollout.score for rollout in rollouts)
    assert score.rollouts == score.finished >= len(SCENARIOS)
    assert score.captured == score.turns
    assert score.exact == score.trained == score.learned == score.wanted > 0
    assert (score.twice, score.side, score.lost, score.greedy, score.unseen) == (0, 0, 0, 0, 0)
    assert score.faults_told == score.faults
    assert score.refused_told == score.refused > 0
    assert result.exact(dialect, True)
    assert result.exact(dialect, False)


def test_continued_history_is_one_row(result: Result) -> None:
    more = {
        (rollout.scenario, rollout.dialect): rollout.score.rows
        for rollout in result.rollouts
        if rollout.score.rows != rollout.score.best_rows
    }
    assert more == {}


@pytest.mark.parametrize("name", BY_NAME)
def test_fork_causes_are_correct(result: Result, name: str) -> None:
    score = sum_scores(rollout.score for rollout in result.rollouts if rollout.scenario == name)
    must = any(call.causes and call.forks for call in BY_NAME[name].calls())
    assert bool(score.forks) or not must
    assert score.forks_right == score.forks


@pytest.mark.parametrize("name", DRIFTS)
def test_dropped_reasoning_forks_name_their_cause(dropped: Result, name: str) -> None:
    assert not dropped.error
    score = sum_scores(rollout.score for rollout in dropped.rollouts if rollout.scenario == name)
    assert score.exact == score.trained == score.learned == score.wanted > 0
    assert score.forks_right == score.forks > 0


async def probe(gateway: type[Gateway]) -> dict[Feature, Verdict]:
    async with aiohttp.ClientSession() as http, run_engine(http) as mock:
        return await probe_features(gateway, http, mock)


@pytest.mark.repeat  # each feature has a test of its own
@pytest.mark.needs("trainers")
def test_rows_carry_every_feature() -> None:
    real_tokenizer("qwen3")
    verdicts = asyncio.run(probe(Turngate))
    loaders = verdicts.pop("loaders")
    assert loaders == Verdict("yes", "verl, miles, areal, tinker")
    assert {feature: verdict for feature, verdict in verdicts.items() if verdict != Verdict("yes")} == {}


@contextmanager
def external_gateway(engine_port: int, data: Path) -> Iterator[str]:
    """Start a gateway independently of the Gauntlet."""
    port = free_port()
    command = [sys.executable, "-m", "turngate", "serve", "--port", str(port), "--data", str(data)]
    command += ["--engine", "vllm", "--engine-url", f"http://127.0.0.1:{engine_port}"]
    command += ["--model", "gauntlet", "--tokenizer", str(model_folder())]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TURNGATE_ADMIN_KEY": "outside-the-gauntlet"})
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + scaled(30)
        while True:
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except urllib.error.HTTPError:
                break  # it is up, and reports that the engine is down
            except urllib.error.URLError:
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def gauntlet(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gauntlet", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(120), check=False)


def test_gateway_tested_by_url(tmp_path: Path) -> None:
    real_tokenizer("qwen3")
    port = free_port()
    with external_gateway(port, tmp_path / "data") as url:
        done = gauntlet(
            *("--url", url, "--engine-port", str(port), "--json"),
            *("--open", f"{COMMANDS} open {url} {{rollout}}", "--record", f"{COMMANDS} record {url} {{rollout}}"),
            *("--dialect", "messages", "--scenario", "append-only", "--scenario", "edited-history"),
            *("--scenario", "compaction"),
        )
    assert done.returncode == 0, done.stderr
    (external,) = json.loads(done.stdout)["gateways"]
    score = external["score"]
    assert external["records"] == "exact tokens"
    assert score["exact"] == score["trained"] == score["learned"] == score["wanted"] > 0
    assert score["rows"] == score["best_rows"]
    assert score["forks_right"] == score["forks"] > 2


@pytest.mark.parametrize(
    ("option", "command", "why"),
    [
        ("--open", "echo hello", "which is not JSON"),
        ("--record", "echo []", "Expected `object`, got `array`"),
        ("--record", """echo '{"rows": [{"ids": [], "logprobs": []}]}'""", "missing required field `mask`"),
    ],
)
def test_unusable_command_is_one_line_error(option: str, command: str, why: str) -> None:
    real_tokenizer("qwen3")
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"  # the engine stands in for a gateway
    done = gauntlet(
        *("--url", url, "--engine-port", port, option, command, "--dialect", "chat", "--scenario", "append-only")
    )
    assert done.returncode == 2
    assert "did not run" in done.stdout
    assert why in done.stderr.splitlines()[-1]
    assert f"{option} {command!r}" in done.stderr
    assert "Traceback" not in done.stderr


def test_unreachable_gateway_did_not_run() -> None:
    real_tokenizer("qwen3")
    done = gauntlet("--url", f"http://127.0.0.1:{free_port()}", "--dialect", "chat", "--scenario", "append-only")
    assert done.returncode == 1
    assert "did not run" in done.stdout
    assert "nothing answers" in done.stderr
