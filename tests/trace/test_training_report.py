"""Test the training report: how much of a rollout is trained, why not more, and what to change."""

from __future__ import annotations

import pytest

from tests.trace.kit import Call, Recorder, assistant, system, user
from turngate.trace.roles import assign_roles
from turngate.trace.sample import TrainingPolicy, build_samples
from turngate.trace.training_report import TrainingReport, list_warnings, report_training
from turngate.trace.tree import RefusedCalls
from turngate.types import CallSignals, Sampling

FIRST = [system("You code."), user("Fix it.")]
SECOND = [*FIRST, assistant("On it."), user("And?")]
TITLE = [system("Write a title."), user("Fix it.")]
GREEDY = Sampling(temperature=0).biases()
REFUSED = RefusedCalls(2, 404, "model 'editor' does not exist")


def report(
    calls: list[Call], policy: TrainingPolicy | None = None, refused: RefusedCalls | None = None
) -> TrainingReport:
    recorder = Recorder(calls)
    recorder.trace.refused = refused
    policy = policy or TrainingPolicy()
    found = report_training(recorder.trace, assign_roles(recorder.trace), policy)
    assert found.trained_tokens == sum(row.trained_tokens for row in build_samples(recorder.trace, policy))
    assert bool(found.warning) == bool(found.reason) == bool(found.fix) == (found.amount != "most")
    return found


def work(first: int = 2, second: int = 2, **fields: object) -> list[Call]:
    """Two main turns. `fields` describes the first."""
    return [
        Call(FIRST, assistant("On it."), size=first, **fields),  # type: ignore[arg-type]
        Call(SECOND, assistant("Done."), size=second),
    ]


@pytest.mark.parametrize(
    ("calls", "amount"),
    [
        (work(), "most"),
        (work(5, 5, biases=GREEDY), "most"),  # half of the tokens
        (work(6, 5, biases=GREEDY), "few"),
        ([Call(TITLE, preamble="", size=50), *work()], "most"),  # a long side call is not expected to be trained
        ([], "none"),
        (work(6, 0, biases=GREEDY), "none"),
    ],
)
def test_amount(calls: list[Call], amount: str) -> None:
    assert report(calls).amount == amount


@pytest.mark.parametrize(
    ("fields", "reason", "fix"),
    [
        ({"biases": GREEDY}, "were sampled greedily (temperature 0)", "--temperature 1"),
        ({"biases": ("top_p", "greedy")}, "were sampled greedily (temperature 0)", "--temperature 1"),
        ({"biases": ("top_p", "top_k")}, "were sampled with a bias (top_p, top_k)", "policy.biased"),
        ({"biases": ("constrained: json_schema",)}, "were constrained to a format (json_schema)", "policy.biased"),
        ({"biases": ("the endpoint's own sampling",)}, "with the endpoint's own sampling", "sampling.temperature"),
        ({"capture": "text"}, "were captured as text only", "exact mode"),
        ({"logprobs": None}, "no log-probabilities", "turngate doctor"),
        ({"signals": CallSignals(role="side")}, "have the role side, which is not trained", "policy.roles"),
        ({"finish": "abort", "fault": "aborted"}, "were cut short", "gateway's log"),
        ({"fault": "the endpoint sent invalid JSON"}, "failed (the endpoint sent invalid JSON)", "gateway's log"),
    ],
)
def test_reason_and_fix(fields: dict[str, object], reason: str, fix: str) -> None:
    found = report([Call(FIRST, assistant("On it."), **fields)])  # type: ignore[arg-type]
    assert found.amount == "none" and found.reason.startswith("all main turns") and reason in found.reason
    assert fix in found.fix and found.warning == f"no tokens are trained: {found.reason}; {found.fix}"


def test_reason_is_the_one_that_costs_most_tokens() -> None:
    calls = [*work(9, biases=GREEDY), Call([*SECOND, assistant("Done."), user("Thanks.")], logprobs=None, size=3)]
    found = report(calls)
    assert found.amount == "few" and found.reason == "some main turns were sampled greedily (temperature 0)"
    assert (found.trained_tokens, found.trained_main_tokens, found.main_tokens) == (2, 2, 14)


def test_roles_that_the_policy_trains_are_expected() -> None:
    helper = Call([system("You search."), user("Find it.")], signals=CallSignals(thread="b", parent="a"))
    assert report([*work(), helper], TrainingPolicy(roles=("subagent",))).amount == "most"


def test_refused_call_excludes_the_rollout() -> None:
    found = report(work(), refused=REFUSED)
    assert (
        found.amount == "none"
        and found.reason == "model calls by the agent were refused (404: model 'editor' does not exist)"
    )
    assert "--on-refused train" in found.fix and list_warnings(found, REFUSED) == [found.warning]


def test_refused_call_is_reported_even_if_it_is_trained() -> None:
    found = report(work(), TrainingPolicy(refused=True), REFUSED)
    assert found.amount == "most"
    assert list_warnings(found, REFUSED) == [
        "model calls by the agent were refused (404: model 'editor' does not exist)"
    ]


def test_agent_without_calls() -> None:
    assert report([]).reason == "no model call by the agent was answered"
    recorder = Recorder([])
    failed = report_training(recorder.trace, {}, TrainingPolicy(), failure="the connection to vllm failed")
    assert failed.reason == "the rollout failed before its first turn (the connection to vllm failed)"
    assert report([], refused=RefusedCalls(1, 400, "bad")).reason == "a model call by the agent was refused (400: bad)"
    assert list_warnings(None, None) == list_warnings(report(work()), None) == []
