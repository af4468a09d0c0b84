"""The check of the chat template: which transitions fork, and which parts of replies are not read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.render.template_conversation import build_tokenizer, certify_tokenizer
from tests.render.test_transitions import MOVING_TOOLS
from turngate.doctor.tokenizer import check_template
from turngate.render import BUILTIN_TOKENIZER, Certificate, Renderer, load_renderer


def context(renderer: Renderer, certificate: Certificate) -> Any:
    async def load() -> tuple[Renderer, Certificate]:
        return renderer, certificate

    return SimpleNamespace(config=SimpleNamespace(engine="vllm"), renderer=load)


async def test_partly_certified_template_is_a_warning_that_names_the_transitions(tmp_path: Path) -> None:
    [outcome] = await check_template(context(*certify_tokenizer(build_tokenizer(MOVING_TOOLS, tmp_path))))
    assert outcome.state == "warning"
    assert "certified only in part" in outcome.message and "a user message after an answer" in outcome.message
    assert "turngate certify FOLDER" in outcome.fix


@pytest.mark.parametrize(("unread", "count"), [((), 1), (("calls",), 2)])
async def test_unread_calls_are_a_warning(unread: tuple[str, ...], count: int) -> None:
    renderer, certificate = load_renderer(BUILTIN_TOKENIZER)
    outcomes = await check_template(context(renderer, msgspec.structs.replace(certificate, unread=unread)))
    assert len(outcomes) == count and outcomes[0].state == "ok"
    assert all("agents get them as text" in outcome.message for outcome in outcomes[1:])
