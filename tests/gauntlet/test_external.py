"""A gateway that is known by its address and asked by commands. The mock engine stands in for one: it speaks chat."""

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
from gauntlet.run import Result, put_through
from gauntlet.sampler import Engine
from gauntlet.scenario import Cause
from gauntlet.scenarios import BY_NAME
from gauntlet.tokens import Model
from gauntlet.trial import Mock, engine
from tests.gauntlet import outside
from tests.gauntlet.test_engine_and_agent import Letters
from turngate.trace import tree

pytestmark = pytest.mark.process

ROW = {"ids": [1, 2], "mask": [0, 1], "logprobs": [None, -1.0]}


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def mock(http: aiohttp.ClientSession) -> AsyncIterator[Mock]:
    server = TestServer(Api(Engine(cast(Model, Letters()))).app())
    await server.start_server()
    yield Mock(http, str(server.make_url("")).rstrip("/"))
    await server.close()


def prints(told: object) -> str:
    return shlex.join(["echo", told if isinstance(told, str) else json.dumps(told)])


async def through(mock: Mock, http: aiohttp.ClientSession, **commands: str) -> Result:
    gateway = External(Address(mock.url, **commands), ("chat",))
    return await put_through(gateway, http, mock, [BY_NAME["append-only"]], ["chat"])


async def recorded(http: aiohttp.ClientSession, told: object) -> str:
    """Why this is no record."""
    with pytest.raises(CommandFailed) as failed:
        await External(Address("", record=prints(told)), ("chat",)).record(http, Session("aa", "", ""))
    return str(failed.value)


# ── what the commands print ─────────────────────────────────────────────────────────────────────────────────────────


async def test_everything_at_the_top_is_optional(http: aiohttp.ClientSession) -> None:
    gateway = External(Address("http://here/", "ours", prints({}), prints({})), ("chat",))
    session = await gateway.open(http, "aa")
    assert session == Session("aa", "http://here", "ours")
    record = await gateway.record(http, session)
    assert (record.turns, record.rows, record.forks, gateway.names_causes) == ([], [], {}, False)


async def test_a_record_may_have_more_than_is_read(http: aiohttp.ClientSession) -> None:
    fork = {"ids": [2], "cause": None}
    told = {"turns": [[2]], "rows": [{**ROW, "mask": [False, True], "reward": 1}], "forks": [fork], "more": 1}
    gateway = External(Address("", record=prints(told)), ("chat",))
    record = await gateway.record(http, Session("aa", "", ""))
    assert [turn.ids for turn in record.turns] == [(2,)]
    assert record.rows is not None
    assert list(record.rows[0].mask) == [0, 1]
    assert record.forks == {(2,): ""}
    assert gateway.names_causes


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ([], "Expected `object`, got `array`"),
        ("hello", "printed 'hello', which is not JSON"),
        ("", "printed nothing"),
        ({"rows": [ROW, {"ids": [1], "logprobs": [None]}]}, "missing required field `mask` - at `$.rows[1]`"),
        ({"rows": [{**ROW, "mask": [1]}]}, "not of one length: 2, 1, 2 - at `$.rows[0]`"),
        ({"rows": [{**ROW, "ids": [1, 2**40]}]}, "at `$.rows[0].ids[1]`"),
        ({"turns": [1]}, "at `$.turns[0]`"),
        ({"forks": [{"ids": [1]}]}, "missing required field `cause` - at `$.forks[0]`"),
    ],
)
async def test_output_that_cannot_be_read_names_the_option_and_the_place(
    http: aiohttp.ClientSession, told: object, why: str
) -> None:
    said = await recorded(http, told)
    assert said.startswith("--record ")
    assert "echo" in said
    assert why in said


async def test_the_last_words_of_a_command_are_the_reason(
    http: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "sh -c 'echo looking >&2; echo no session {rollout} >&2; exit 3'"
    with pytest.raises(CommandFailed, match=r"^--open .*: ended with 3: no session aa$"):
        await External(Address("", open=command), ("chat",)).open(http, "aa")
    assert capsys.readouterr().err == "looking\nno session aa\n"


# ── a run ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_record_that_fails_counts_against_its_rollout_alone(
    http: aiohttp.ClientSession, mock: Mock, tmp_path: Path
) -> None:
    once = shlex.join(["sh", "-c", f"mkdir {tmp_path}/taken && echo '{{}}'"])  # the other rollout finds it there
    result = await through(mock, http, record=once)
    assert (result.trouble, result.misused) == ("", False)
    assert sorted(rollout.failed for rollout in result.rollouts) == [False, True]
    assert result.score.finished == 2
    assert all(rollout.score.wanted for rollout in result.rollouts)  # what it did not keep is missed
    (told,) = report.trouble([result])
    assert told.startswith("external, append-only, chat, ")
    assert "--record" in told
    assert "ended with 1" in told
    assert "1 failed" in report.by_scenario([result])


@pytest.mark.parametrize(
    ("commands", "why"),
    [
        ({"open": prints("hello")}, "--open 'echo hello': printed 'hello', which is not JSON"),
        ({"record": "false"}, "--record 'false': ended with 1: it said nothing"),
        ({"record": prints([])}, "Expected `object`"),
    ],
)
async def test_one_that_fails_every_time_did_not_run(
    http: aiohttp.ClientSession, mock: Mock, commands: dict[str, str], why: str
) -> None:
    result = await through(mock, http, **commands)
    assert result.misused
    (told,) = report.trouble([result])
    assert told.startswith("external: did not run: --")
    assert why in told


def test_commands_that_never_worked_are_a_wrong_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def run(args: object) -> list[Result]:
        return [Result("external", "", ("chat",), True, trouble="--record 'echo []': no", misused=True)]

    (tmp_path / "tokenizer.json").touch()
    monkeypatch.setattr("gauntlet.__main__.tokenizer", lambda: tmp_path)
    monkeypatch.setattr("gauntlet.__main__._run", run)
    monkeypatch.setattr("sys.argv", ["gauntlet", "--url", "http://127.0.0.1:1", "--record", "echo []"])
    assert main() == 2
    assert capsys.readouterr().err == "gauntlet: external: did not run: --record 'echo []': no\n"


async def test_a_port_that_is_taken_is_told_in_one_line(
    http: aiohttp.ClientSession, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(CannotStart, match=f"does not start on port {port}: Address already in use"):
            async with engine(http, port):
                pass
    assert capfd.readouterr().err == ""


# ── the example and the page ────────────────────────────────────────────────────────────────────────────────────────


def test_the_example_knows_every_cause() -> None:
    assert set(outside.CAUSES) == set(get_args(tree.Cause))
    assert set(outside.CAUSES.values()) <= set(get_args(Cause))


def test_the_page_lists_the_words_for_causes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gauntlet.md").read_text(encoding="utf-8")
    assert [cause for cause in get_args(Cause) if f"`{cause}`" not in page] == []
