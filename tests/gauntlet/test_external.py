"""Tests for external gateways, given by URL and commands. The mock engine stands in for one: it speaks chat."""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast, get_args

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from gauntlet import report
from gauntlet.__main__ import main
from gauntlet.engine import Api
from gauntlet.gateways.base import CannotStart, Session
from gauntlet.gateways.external import Address, CommandFailed, External
from gauntlet.run import Result, run_scenarios
from gauntlet.sampler import Engine
from gauntlet.scenario import Cause
from gauntlet.scenarios import BY_NAME
from gauntlet.tokens import Model
from gauntlet.trial import MockEngine, run_engine
from tests.gauntlet import external_commands
from tests.gauntlet.test_engine_and_agent import Letters
from turngate.trace import tree

pytestmark = pytest.mark.process

ROW = {"ids": [1, 2], "mask": [0, 1], "logprobs": [None, -1.0]}


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def mock(http: aiohttp.ClientSession) -> AsyncIterator[MockEngine]:
    server = TestServer(Api(Engine(cast(Model, Letters()))).app())
    await server.start_server()
    yield MockEngine(http, str(server.make_url("")).rstrip("/"))
    await server.close()


def print_command(output: object) -> str:
    return shlex.join(["echo", output if isinstance(output, str) else json.dumps(output)])


async def run_external(mock: MockEngine, http: aiohttp.ClientSession, **commands: str) -> Result:
    gateway = External(Address(mock.url, **commands), ("chat",))
    return await run_scenarios(gateway, http, mock, [BY_NAME["append-only"]], ["chat"])


async def record_error(http: aiohttp.ClientSession, output: object) -> str:
    """The error message for invalid output of the record command."""
    with pytest.raises(CommandFailed) as failed:
        await External(Address("", record=print_command(output)), ("chat",)).record(http, Session("aa", "", ""))
    return str(failed.value)


# ── command output ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_top_level_fields_are_optional(http: aiohttp.ClientSession) -> None:
    gateway = External(Address("http://here/", "ours", print_command({}), print_command({})), ("chat",))
    session = await gateway.open(http, "aa")
    assert session == Session("aa", "http://here", "ours")
    record = await gateway.record(http, session)
    assert (record.turns, record.rows, record.forks, gateway.names_causes) == ([], [], {}, False)
    assert (record.refused, gateway.reports_refusals) == (0, False)


async def test_unknown_record_fields_are_ignored(http: aiohttp.ClientSession) -> None:
    fork = {"ids": [2], "cause": None}
    output = {
        "turns": [[2]],
        "rows": [{**ROW, "mask": [False, True], "reward": 1}],
        "forks": [fork],
        "refused": 3,
        "more": 1,
    }
    gateway = External(Address("", record=print_command(output)), ("chat",))
    record = await gateway.record(http, Session("aa", "", ""))
    assert [turn.ids for turn in record.turns] == [(2,)]
    assert record.rows is not None
    assert list(record.rows[0].mask) == [0, 1]
    assert record.forks == {(2,): ""}
    assert record.refused == 3
    assert gateway.names_causes and gateway.reports_refusals


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ([], "Expected `object`, got `array`"),
        ("hello", "printed 'hello', which is not JSON"),
        ("", "printed nothing"),
        ({"rows": [ROW, {"ids": [1], "logprobs": [None]}]}, "missing required field `mask` - at `$.rows[1]`"),
        ({"rows": [{**ROW, "mask": [1]}]}, "differ in length: 2, 1, 2 - at `$.rows[0]`"),
        ({"rows": [{**ROW, "ids": [1, 2**40]}]}, "at `$.rows[0].ids[1]`"),
        ({"turns": [1]}, "at `$.turns[0]`"),
        ({"refused": -1}, "at `$.refused`"),
        ({"forks": [{"ids": [1]}]}, "missing required field `cause` - at `$.forks[0]`"),
    ],
)
async def test_invalid_output_error_names_option_and_path(
    http: aiohttp.ClientSession, output: object, why: str
) -> None:
    error = await record_error(http, output)
    assert error.startswith("--record ")
    assert "echo" in error
    assert why in error


async def test_last_stderr_line_is_the_reason(http: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]) -> None:
    command = "sh -c 'echo looking >&2; echo no session {rollout} >&2; exit 3'"
    with pytest.raises(CommandFailed, match=r"^--open .*: failed with exit code 3: no session aa$"):
        await External(Address("", open=command), ("chat",)).open(http, "aa")
    assert capsys.readouterr().err == "looking\nno session aa\n"


# ── a run ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_failed_record_affects_only_its_rollout(
    http: aiohttp.ClientSession, mock: MockEngine, tmp_path: Path
) -> None:
    once = shlex.join(["sh", "-c", f"mkdir {tmp_path}/taken && echo '{{}}'"])  # fails for the other rollout
    result = await run_external(mock, http, record=once)
    assert (result.error, result.misused) == ("", False)
    assert sorted(rollout.failed for rollout in result.rollouts) == [False, True]
    assert result.score.finished == 2
    assert all(rollout.score.wanted for rollout in result.rollouts)  # missing records count against the score
    (output,) = report.list_errors([result])
    assert output.startswith("external, append-only, chat, ")
    assert "--record" in output
    assert "failed with exit code 1" in output
    assert "1 failed" in report.by_scenario([result])


@pytest.mark.parametrize(
    ("commands", "why"),
    [
        ({"open": print_command("hello")}, "--open 'echo hello': printed 'hello', which is not JSON"),
        ({"record": "false"}, "--record 'false': failed with exit code 1: no output"),
        ({"record": print_command([])}, "Expected `object`"),
    ],
)
async def test_command_failing_every_time_did_not_run(
    http: aiohttp.ClientSession, mock: MockEngine, commands: dict[str, str], why: str
) -> None:
    result = await run_external(mock, http, **commands)
    assert result.misused
    (output,) = report.list_errors([result])
    assert output.startswith("external: did not run: --")
    assert why in output


def test_unusable_commands_exit_with_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def run(args: object) -> list[Result]:
        return [Result("external", "", ("chat",), True, error="--record 'echo []': no", misused=True)]

    (tmp_path / "tokenizer.json").touch()
    monkeypatch.setattr("gauntlet.__main__.tokenizer_folder", lambda: tmp_path)
    monkeypatch.setattr("gauntlet.__main__._run", run)
    monkeypatch.setattr("sys.argv", ["gauntlet", "--url", "http://127.0.0.1:1", "--record", "echo []"])
    assert main() == 2
    assert capsys.readouterr().err == "gauntlet: external: did not run: --record 'echo []': no\n"


async def test_port_in_use_is_one_line_error(http: aiohttp.ClientSession, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(CannotStart, match=f"cannot listen on port {port}: Address already in use"):
            async with run_engine(http, port):
                pass
    assert capfd.readouterr().err == ""


# ── the example and the page ────────────────────────────────────────────────────────────────────────────────────────


def test_example_maps_every_cause() -> None:
    assert set(external_commands.CAUSES) == set(get_args(tree.Cause))
    assert set(external_commands.CAUSES.values()) <= set(get_args(Cause))


def test_docs_list_every_cause() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gauntlet.md").read_text(encoding="utf-8")
    assert [cause for cause in get_args(Cause) if f"`{cause}`" not in page] == []
