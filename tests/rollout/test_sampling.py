"""Test the sampling settings of rollouts: who decides, and what an agent that asks for temperature 0 gets."""

from __future__ import annotations

from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tests.kit import gateway, say, user
from tests.rollout.kit import open_harness
from turngate.agents.spec import find_agent, parse_spec
from turngate.cli.options import BatchOptions, RunOptions
from turngate.cli.prepare import build_session_settings
from turngate.cli.run import print_outcome
from turngate.errors import AgentError, BadRequest, ConfigError
from turngate.rollout.recording import build_record
from turngate.rollout.sampling import parse_sampling, resolve_settings
from turngate.service.report import build_minimal_result
from turngate.service.result import RolloutState

GREEDY_AGENT = """\
status, text = http("POST", "/v1/chat/completions", {"model": "m", "temperature": 0, "top_p": 0.5, "messages": [
    {"role": "user", "content": "Hi"}]})
sys.exit(status != 200)
"""
TRAIN = {"purpose": "train"}


@pytest.mark.parametrize(
    ("session", "agent", "endpoint", "settings"),
    [
        ({}, {}, {}, TRAIN),
        ({}, {}, {"temperature": 0.1}, {**TRAIN, "sampling": {"temperature": 0.1}}),
        ({}, {"temperature": 0.2}, {"temperature": 0.1}, {**TRAIN, "sampling": {"temperature": 0.2}}),
        (
            {"sampling": {"temperature": 0.3}},
            {"temperature": 0.2, "top_k": 5},
            {"min_p": 0.1},
            {**TRAIN, "sampling": {"temperature": 0.3, "top_k": 5, "min_p": 0.1}},
        ),
        ({"bias": "record"}, {"temperature": 0.2}, {"temperature": 0.1}, {}),
        (
            {"bias": "record", "sampling": {"temperature": 0.3}},
            {"top_k": 5},
            {},
            {"sampling": {"temperature": 0.3}},
        ),
    ],
)
def test_who_decides(session: Any, agent: Any, endpoint: Any, settings: Any) -> None:
    assert resolve_settings(session, agent, endpoint) == settings


def test_choices() -> None:
    assert parse_sampling("neutral") == parse_sampling({}) == {}
    assert parse_sampling("agent") == {"bias": "record"}
    assert parse_sampling({"top_k": 5}) == {"sampling": {"top_k": 5}}
    for choice, field in (
        ("greedy", "sampling"),
        ({"temperature": 3}, "sampling.temperature"),
        ({"t": 1}, "sampling.t"),
    ):
        with pytest.raises(BadRequest, match=r"^sampling") as caught:
            parse_sampling(choice)  # type: ignore[arg-type]
        assert caught.value.param == field


def test_flags() -> None:
    assert build_session_settings(RunOptions()) == {}
    options = RunOptions(temperature=0.5, top_k=3, seed=7, on_refused="train")
    sampling = {"temperature": 0.5, "top_k": 3, "seed": 7}
    assert build_session_settings(options) == {"sampling": sampling, "policy": {"refused": True}}
    assert build_session_settings(RunOptions(sampling="agent")) == {"bias": "record"}
    batch = BatchOptions(agent="pi", tasks="t", seed=7, temperature=0.0)
    assert build_session_settings(batch) == {"sampling": {"temperature": 0.0}}  # the plan derives a seed per rollout
    for wrong, flag in (
        ({"temperature": 3.0}, "temperature"),
        ({"sampling": "x"}, "sampling"),
        ({"on_refused": "x"}, "on_refused"),
    ):
        with pytest.raises(ConfigError, match=f"^{flag}") as caught:
            build_session_settings(RunOptions(**wrong))
        assert caught.value.param == flag


def test_agent_file() -> None:
    text = 'name = "mine"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["x"]\n[sampling]\n'
    assert parse_spec(text + "temperature = 0.6\ntop_k = 20\n", "f").sampling == {"temperature": 0.6, "top_k": 20}
    for line, field in (("temperature = 5", "sampling.temperature"), ("temprature = 1", "sampling.temprature")):
        with pytest.raises(AgentError, match=field) as caught:
            parse_spec(text + line, "f")
        assert caught.value.param == field


@pytest.mark.parametrize(
    ("config", "sampling", "biases"),
    [
        ({}, {}, ["greedy"]),  # a session without a purpose uses the agent's temperature
        ({"purpose": "train"}, {"temperature": 1.0}, []),
        (
            {"purpose": "train", "sampling": {"temperature": 0.4, "top_k": 5}},
            {"temperature": 0.4, "top_k": 5},
            ["top_k"],
        ),
        ({"purpose": "train", "bias": "record"}, {}, ["greedy"]),
    ],
)
async def test_gateway_pins_a_temperature_for_training(
    config: dict[str, Any], sampling: dict[str, Any], biases: list[str]
) -> None:
    async with gateway([say("Hi")]) as g:
        session = await g.open(**config)
        assert (await g.show(session.id))["config"].get("sampling", {}) == sampling
        await g.http(session.key).post(
            "/v1/chat/completions", json={"model": "m", "temperature": 0, "messages": [user("Hi")]}
        )
        [turn] = await g.turns(session.id)
        assert turn["biases"] == biases


@pytest.mark.process
async def test_greedy_agent_is_trained_by_default() -> None:
    async with open_harness([say("Hello.")]) as harness:
        outcome = await harness.run(GREEDY_AGENT)
        assert outcome.rows == 1 and outcome.warnings == []
        assert outcome.training is not None and outcome.training.trained_tokens == outcome.sampled_tokens > 0


@pytest.mark.process
async def test_greedy_agent_in_an_evaluation_keeps_its_sampling_and_says_so() -> None:
    async with open_harness([say("Hello.")]) as harness:
        outcome = await harness.run(GREEDY_AGENT, session=parse_sampling("agent"))
        [turn] = await harness.gateway.turns(outcome.session)
        assert turn["sampling"] == {"temperature": 0.0, "top_p": 0.5} and outcome.rows == 0
        [warning] = outcome.warnings
        reason = "no tokens are trained: all main turns were sampled greedily (temperature 0)"
        assert warning.startswith(f"{reason}; pin a temperature: pass --temperature 1")
        printed = StringIO()
        print_outcome(outcome, "", harness.folder, Console(file=printed, width=400))
        assert f"  warning {warning}\n" in printed.getvalue()
        names = {"rollout_id": "r", "task_id": "t", "agent": "a", "model_key": "k", "model": "m", "mode": "exact"}
        result = build_minimal_result(RolloutState(**names, status="finished", stage="done"), outcome, ())
        assert warning in result.notes and result.training == outcome.training
        outcome.kind = "graded"
        assert build_record(outcome).data["warnings"] == [warning]


@pytest.mark.process
async def test_agent_that_is_refused_a_call_is_flagged() -> None:
    program = 'ask("Hi")\nhttp("POST", "/v1/chat/completions", {"model": "editor", "messages": [{"role": "user", "content": "x"}]})\n'
    async with open_harness([say("Hello.")]) as harness:
        outcome = await harness.run(program)
        assert outcome.status == "finished" and outcome.exit_code == 0 and outcome.rows == 0
        assert outcome.refused is not None and (outcome.refused.count, outcome.refused.status) == (1, 404)
        assert "model 'editor' does not exist" in outcome.exclusion
        trained = await harness.run(program, session={"policy": {"refused": True}})
        assert trained.rows == 1 and trained.exclusion == "" and "was refused (404" in trained.warnings[0]


@pytest.mark.process
async def test_sampling_of_the_agents_file_applies() -> None:
    shell = find_agent("shell").spec
    async with open_harness([say("Hello.")]) as harness:
        agent = msgspec.structs.replace(shell, sampling={"temperature": 0.6})
        outcome = await harness.run(GREEDY_AGENT, agent=agent, options={"command": "exec python3 -"})
        [turn] = await harness.gateway.turns(outcome.session)
        assert turn["sampling"] == {"temperature": 0.6} and outcome.rows == 1
