"""The doctor's checks of an engine, and the fixes it suggests."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.doctor.kit import MODEL, engine, findings_text, run_check, run_checks
from turngate.config import ServeConfig


async def test_healthy_engine_passes() -> None:
    async with engine() as config:
        findings = await run_checks(
            config, "engine", "engine call", "log-probabilities", "engine clock", "template", "tokenizer"
        )
    assert {finding.state for finding in findings} == {"ok"}, findings_text(findings)
    by_check = {finding.check: finding.message for finding in findings}
    assert f"serves {MODEL}, 4,096 tokens of context" in by_check["engine"]
    assert "received the prompt unchanged" in by_check["engine call"]
    assert "processed" in by_check["log-probabilities"]
    assert "same ids for 5 test conversations" in by_check["tokenizer"]


async def test_unreachable_engine_is_one_failure() -> None:
    config = ServeConfig(
        engine="vllm", engine_url=["http://127.0.0.1:9"], model="m", tokenizer="turngate/render/builtin"
    )
    findings = await run_checks(config, "engine", "engine call", "log-probabilities", "tokenizer", "engine clock")
    states = {finding.check: finding.state for finding in findings}
    assert states.pop("engine") == "failure"
    assert set(states.values()) == {"not checked"}
    [first, *_] = findings
    assert "connection refused" in first.message and "start the engine (vllm serve MODEL)" in first.fix


async def test_unusable_tokenizer_is_one_failure() -> None:
    async with engine() as config:
        checks = ("engine", "engine call", "log-probabilities", "template", "tokenizer")
        findings = await run_checks(msgspec.structs.replace(config, tokenizer="/nowhere/at/all"), *checks)
    states = {finding.check: finding.state for finding in findings}
    assert states.pop("engine") == "ok" and states.pop("template") == "failure"
    assert set(states.values()) == {"not checked"}
    assert findings_text(findings).count("/nowhere/at/all") == 1


async def test_wrong_model_is_failure() -> None:
    async with engine() as config:
        finding = await run_check(msgspec.structs.replace(config, model="another"), "engine")
    assert finding.state == "failure" and f"serves {MODEL}, not another" in finding.message
    assert "--model" in finding.fix


async def test_missing_logprobs_are_failure() -> None:
    async with engine(logprobs=False) as config:
        finding = await run_check(config, "engine call")
        mode = await run_check(config, "log-probabilities")
    assert finding.state == "failure" and "did not return log-probabilities for all ids" in finding.message
    assert mode.state == "not checked"


async def test_engine_that_samples_no_tokens_does_not_end_the_run() -> None:
    async with engine(answer="") as config:
        call, mode = await run_checks(config, "engine call", "log-probabilities")
    assert (call.state, call.message.partition(": ")[2]) == ("failure", "the engine sampled no tokens")
    assert mode.state == "not checked" and "do not show which log-probabilities" in mode.message


@pytest.mark.parametrize(("mode", "words"), [("raw", "raw"), ("heated", "before truncation")])
async def test_unprocessed_logprobs_are_warning(mode: str, words: str) -> None:
    async with engine(mode=mode) as config:
        finding = await run_check(config, "log-probabilities")
    assert finding.state == "warning" and words in finding.message
    if mode == "raw":
        assert "--logprobs-mode processed_logprobs" in finding.fix


async def test_vocabulary_mismatch_fails_and_template_mismatch_warns() -> None:
    async with engine(shift=1) as config:
        shifted = await run_check(config, "tokenizer")
    async with engine(prefix="Hello ") as config:
        vocabulary, template = await run_checks(config, "tokenizer")
    assert shifted.state == "failure" and "the engine tokenizes a text differently" in shifted.message
    assert vocabulary.state == "ok"
    assert (
        template.state == "warning"
        and "renders the test conversation 'system prompt' differently" in template.message
        and "Hello" in template.message
    )


async def test_engine_without_tokenizer_endpoint_is_not_checked() -> None:
    async with engine(tokenises=False) as config:
        finding = await run_check(config, "tokenizer")
    assert finding.state == "not checked" and "the tokenizers could not be compared" in finding.message


async def test_engine_key_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_ENGINE_KEY", "planted-engine-key")
    async with engine(status=500) as config:
        keyed = msgspec.structs.replace(config, engine_key_env="MY_ENGINE_KEY")
        findings = await run_checks(keyed, "engine", "engine call", "log-probabilities", "tokenizer")
    assert "failure" in {finding.state for finding in findings}
    assert "planted-engine-key" not in findings_text(findings)


@pytest.mark.parametrize(
    ("config", "check", "state", "words"),
    [
        (ServeConfig(), "engine call", "ok", "log-probabilities for all ids (4)"),
        (ServeConfig(), "log-probabilities", "not checked", "only vLLM and SGLang have several log-probability modes"),
        (ServeConfig(), "engine clock", "not checked", "--engine-url is not set"),
        (ServeConfig(engine="gate", tokenizer="turngate/render/builtin"), "engine", "not checked", "the trainer"),
        (ServeConfig(engine="local", model_folder="/nowhere"), "engine", "failure", "config.json"),
        (ServeConfig(engine="openai", engine_url=["http://127.0.0.1:9"]), "engine call", "not checked", "cost money"),
        (
            ServeConfig(engine="openai", engine_url=["http://127.0.0.1:9"]),
            "template",
            "not checked",
            "renders prompts itself",
        ),
        (ServeConfig(engine="openai", engine_url=["http://127.0.0.1:9"]), "engine", "failure", "refused"),
        (ServeConfig(tokenizer="/nowhere/at/all"), "template", "failure", "/nowhere/at/all"),
    ],
)
async def test_other_engines(config: ServeConfig, check: str, state: str, words: str) -> None:
    finding = await run_check(config, check)
    assert (finding.state, words in finding.message) == (state, True), finding


async def test_local_model_needs_the_weights_that_the_engine_reads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "weights.safetensors").touch()
    config = ServeConfig(engine="local", model_folder=str(tmp_path))
    finding = await run_check(config, "engine")
    assert finding.state == "failure" and "must contain config.json, and model.safetensors" in finding.message
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).touch()
        assert (await run_check(config, "engine")).state == "ok"
        (tmp_path / name).unlink()
