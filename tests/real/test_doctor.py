"""Tests for `turngate doctor` with real vLLM."""

from __future__ import annotations

import json

import pytest

from tests.cli.kit import run_cli
from tests.vllm import Model

pytestmark = pytest.mark.full
CHECKS = ("engine", "engine call", "log-probabilities", "engine clock", "template", "tokenizer")


def test_engine_checks_pass(model: Model) -> None:
    settings = ("--engine", "vllm", "--engine-url", model.url, "--model", model.name, "--tokenizer", model.folder)
    only = [word for name in CHECKS for word in ("--only", name)]
    outcome = run_cli("doctor", *settings, "--json", *only)
    findings = json.loads(outcome.stdout)["findings"]
    found = {(f["check"], f["state"]): f["seen"] for f in findings}
    assert outcome.exit_code == 0, findings
    assert f"serves {model.name}, {model.max_context:,} tokens of context" in found["engine", "ok"]
    # An untrained model samples ids that its tokenizer does not have.
    call = found.get(("engine call", "ok")) or found["engine call", "warning"]
    assert "log-probabilities" in call or "the tokenizer has only" in call
    assert "processed" in found["log-probabilities", "ok"]
    assert ("engine clock", "ok") in found
    assert "certified" in (found.get(("template", "ok")) or found["template", "warning"])
    assert "same ids for" in found["tokenizer", "ok"], findings


def test_wrong_tokenizer_or_model_name_fails(model: Model) -> None:
    settings = ("--engine", "vllm", "--engine-url", model.url, "--tokenizer", "turngate/render/builtin", "--json")
    wrong = run_cli("doctor", *settings, "--model", model.name, "--only", "tokenizer")
    [finding] = json.loads(wrong.stdout)["findings"]
    assert (wrong.exit_code, finding["state"]) == (
        1,
        "failure",
    ) and "the engine tokenizes a text differently" in finding["seen"]
    unknown = run_cli("doctor", *settings, "--model", "nobody", "--only", "engine", "--only", "engine call")
    states = {f["check"]: f["state"] for f in json.loads(unknown.stdout)["findings"]}
    assert (unknown.exit_code, states) == (1, {"engine": "failure", "engine call": "not checked"})
