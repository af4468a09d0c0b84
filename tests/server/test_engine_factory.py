"""Tests for engines that are built from the configuration."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from turngate.config import ServeConfig
from turngate.engines.base import Generate
from turngate.engines.scripted import Scripted
from turngate.errors import ConfigError
from turngate.render import BUILTIN_TOKENIZER, load_renderer
from turngate.server.engine_factory import build_engine
from turngate.types import Sampling


@pytest.mark.parametrize(("replies", "warnings"), [(["One.", "Two."], 1), (None, 0)])
def test_script_that_starts_over_is_reported_once(
    replies: list[str] | None, warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "replies.json"
    script.write_text(json.dumps(replies))
    renderer, _ = load_renderer(BUILTIN_TOKENIZER, model="", family="auto")
    engine, _ = build_engine(ServeConfig(script=str(script) if replies else ""), renderer)
    assert isinstance(engine, Scripted)

    def ask(session: str) -> str:
        request = Generate(prompt=np.array([1], np.int32), session=session, max_tokens=100, sampling=Sampling())
        return renderer.tokenizer.decode(list(engine._begin(request).ids[:-1]))

    said = [ask("a") for _ in range(2)]
    assert not caplog.messages
    assert [ask("a"), ask("a"), *(ask("b") for _ in range(3))] == [*said, *said, said[0]]
    assert len(caplog.messages) == warnings
    if replies:
        assert f"script {script}: session a made more calls than the script has replies (2)" in caplog.text


def test_scripted_engine_with_sampling_masks_is_refused() -> None:
    renderer, _ = load_renderer(BUILTIN_TOKENIZER, model="", family="auto")
    with pytest.raises(
        ConfigError, match="sampling_masks needs the engine 'local', 'vllm' or 'sglang', not 'scripted'"
    ):
        build_engine(ServeConfig(sampling_masks=True).check(), renderer)


@pytest.mark.parametrize("family", ["glm-5", "deepseek-v4"])
def test_family_that_does_not_fit_the_tokenizer_is_a_config_error(family: str) -> None:
    with pytest.raises(
        ConfigError, match=r"does not fit the model's tokenizer: .*; choose another family, or 'template'"
    ) as caught:
        load_renderer(BUILTIN_TOKENIZER, model="", family=family)
    assert caught.value.param == "family"
