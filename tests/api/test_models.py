"""Model strings, the service settings that follow from them, and progress display."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import turngate as tg
from tests.api.kit import make_result
from turngate.api.models import ModelOptions, resolve_model
from turngate.api.progress import ProgressBoard, ProgressScreen
from turngate.service.result import RolloutState


def entry(model: Any, config: Any = None, **options: Any) -> tg.Endpoint:
    settings, key = resolve_model(model, ModelOptions(**options), config, {})
    return settings.endpoints[key]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            "vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000",
            ("vllm://Qwen/Qwen3-8B", ["http://127.0.0.1:8000"], "Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "", "exact"),
        ),
        ("openai://gpt-5", ("openai://gpt-5", ["https://api.openai.com/v1"], "gpt-5", "", "OPENAI_API_KEY", "observe")),
        ("openai://m@http://h:1/v1", ("openai://m", ["http://h:1/v1"], "m", "", "", "observe")),
        (
            "anthropic://claude",
            ("anthropic://claude", ["https://api.anthropic.com"], "claude", "", "ANTHROPIC_API_KEY", "observe"),
        ),
        ("scripted://any", ("scripted://any", [], "scripted", "", "", "exact")),
        ("local:///models/tiny", ("local://models/tiny", [], "tiny", "", "", "exact")),
    ],
)
def test_model_string_is_parsed(model: str, expected: Any) -> None:
    found = entry(model)
    assert (found.key, found.urls, found.served, found.tokenizer, found.key_env, found.default) == expected


def test_separate_options_override() -> None:
    found = entry("sglang://m@https://h", tokenizer="/models/m", key_env="MINE")
    assert (found.tokenizer, found.key_env, found.thinking) == ("/models/m", "MINE", True)
    gateway = entry("", gateway="http://127.0.0.1:8700")
    assert (gateway.key, gateway.urls, gateway.served) == ("gateway://127.0.0.1:8700", ["http://127.0.0.1:8700"], "")


def test_model_from_catalog(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text('sandbox = "local"\n[endpoints."scripted://one"]\n[endpoints."scripted://two"]\nmodel = "second"\n')
    assert entry("scripted://two", file).served == "second"
    with pytest.raises(tg.TurngateError, match="model is missing") as raised:
        entry("", file)
    assert "or a catalog key; available: scripted://one, scripted://two" in raised.value.message
    config = tg.ServiceConfig(endpoints={"scripted://only": tg.Endpoint()})
    assert entry(config).key == entry("", config).key == "scripted://only"
    with pytest.raises(tg.TurngateError, match="config must not be set if model is a ServiceConfig"):
        entry(config, file)
    endpoint = tg.Endpoint(key="vllm://two", url=["http://a:1", "http://b:1"], model="m", tokenizer="/t")
    assert entry(endpoint).urls == ["http://a:1", "http://b:1"]


@pytest.mark.parametrize(
    "model",
    [
        "vllm://m@user:planted@127.0.0.1:1",
        "vllm://Qwen/Qwen3-8B@user:planted@127.0.0.1:1",
        "vllm://m@http://user:planted@127.0.0.1:1",
        "vlm://Qwen/Qwen3-8B@http://user:pla@nted/planted@127.0.0.1:1",
        "user:planted@127.0.0.1:1",
    ],
)
def test_errors_do_not_repeat_a_password(model: str) -> None:
    with pytest.raises(tg.TurngateError) as raised:
        entry(model)
    assert "nted" not in raised.value.message


def test_invalid_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(tg.TurngateError, match=r"network must be one of .*, not 'shut'"):
        tg.Client("scripted://any", network="shut")  # type: ignore[arg-type]
    with pytest.raises(tg.TurngateError, match=r"config file .* cannot be read"):
        tg.Client("scripted://any", config=tmp_path / "none.toml")
    with pytest.raises(tg.TurngateError, match=r'model "vllm://m".*needs a tokenizer'):
        tg.Client(tg.Endpoint(key="vllm://m", modes=["exact"], url="http://h:1"))


def state(rollout: str, **fields: Any) -> RolloutState:
    given = {
        "task_id": "t",
        "agent": "a",
        "model_key": "k",
        "model": "m",
        "mode": "exact",
        "status": "running",
        "stage": "agent",
    }
    return RolloutState(rollout_id=rollout, **{**given, **fields})


def test_progress_board_lines() -> None:
    board = ProgressBoard()
    board.follow("one")
    board.put(state("one", turns=3, sampled_tokens=1234, wall_s=65.0))
    assert board.lines() == ["1:05  agent  3 turns · 1,234 tokens"]
    board.put(state("one", done=True, status="finished", reward=1.0, wall_s=70.0))
    assert board.lines() == ["1:10  finished  reward 1"] and board.active == []
    board.total = 30
    for n in range(20):
        board.put(state(f"r{n}", stage="\x1b[2Jgrade", wall_s=1.0))
    board.put(state("lost", done=True, status="error"))
    first, *running, more = board.lines()
    assert first.endswith("2 of 30 done · 20 running · mean reward 1 · 1 without a reward")
    assert len(running) == 12 and more == "and 8 more" and "\x1b" not in "".join(running)


def test_no_progress_without_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with ProgressScreen(ProgressBoard(), None) as screen:
        screen.refresh()
    assert capfd.readouterr() == ("", "")


def test_ipython_in_a_terminal_shows_text() -> None:
    pretty: Any = pytest.importorskip("IPython.lib.pretty")
    assert pretty.pretty(make_result()).startswith("fix-add  finished  reward 1  2.0 s\n")
    assert "Results(2, mean reward 1)" in pretty.pretty(tg.Results([make_result(), make_result()]))
