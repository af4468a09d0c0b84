"""The check of the chat template: which transitions fork, and which parts of replies are not read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.render.template_conversation import build_tokenizer, certify_tokenizer
from tests.render.test_transitions import MOVING_TOOLS
from turngate.doctor.tokenizer import check_template
from turngate.render import BUILTIN_TOKENIZER, Certificate, Renderer, load_renderer
from turngate.server.run import log_renderer


def context(renderer: Renderer, certificate: Certificate) -> Any:
    async def load() -> tuple[Renderer, Certificate]:
        return renderer, certificate

    return SimpleNamespace(config=SimpleNamespace(engine="vllm"), renderer=load)


async def test_partly_certified_template_is_a_warning_that_names_the_transitions(tmp_path: Path) -> None:
    [outcome] = await check_template(context(*certify_tokenizer(build_tokenizer(MOVING_TOOLS, tmp_path))))
    assert outcome.state == "warning"
    assert "certified only in part" in outcome.message and "a user message after an answer" in outcome.message
    assert (
        "; at some transitions (a user message after a call" in outcome.message
        and "), the conversation is rendered in full, and the trace may fork" in outcome.message
    )
    assert "turngate certify FOLDER" in outcome.fix


async def test_hand_written_bridge_that_differs_is_reported_as_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    renderer, certificate = certify_tokenizer(build_tokenizer(MOVING_TOOLS, tmp_path))
    certificate = msgspec.structs.replace(certificate, renderer="family:qwen3")
    [outcome] = await check_template(context(renderer, certificate))
    log_renderer(cast(Any, SimpleNamespace(renderer=renderer, certificate=certificate)))
    for message in (outcome.message, caplog.messages[-1]):
        assert "the hand-written renderer family:qwen3 has no bridge (so the trace may fork)" in message
        assert "or a bridge that differs from a render of the whole conversation" in message
        assert "at some transitions (a user message after a call; a user message after an answer" in message
        assert "rendered in full" not in message
    assert "--family template" in outcome.fix


@pytest.mark.parametrize(("unread", "count"), [((), 1), (("calls",), 2)])
async def test_unread_calls_are_a_warning(unread: tuple[str, ...], count: int) -> None:
    renderer, certificate = load_renderer(BUILTIN_TOKENIZER)
    outcomes = await check_template(context(renderer, msgspec.structs.replace(certificate, unread=unread)))
    assert len(outcomes) == count and outcomes[0].state == "ok"
    assert all("agents get them as text" in outcome.message for outcome in outcomes[1:])
