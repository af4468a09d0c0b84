"""Test models with a chat template for conversations with tools, `tool_use`, beside `default`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.render.template_conversation import TOOL, build_tokenizer, play
from turngate.render import BUILTIN_TOKENIZER, TemplateRenderer, Tokenizer, load_renderer
from turngate.render.certify import certify
from turngate.render.transition import Transition
from turngate.server.app import Gateway
from turngate.server.run import log_renderer
from turngate.types import Message

DEFAULT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = (BUILTIN_TOKENIZER / "chat_template.jinja").read_text()
COUNTING = WITH_TOOLS + "{{ messages | length }} messages\n"
# Like that of Command R+: with a form of its own for tools, and without calls and results
OWN_FORM = "{% for tool in tools %}{{ tool.name + tool.parameter_definitions | tojson }}{% endfor %}" + DEFAULT
ACTIONS = WITH_TOOLS.replace("<tool_call>", "Action: ```").replace("</tool_call>", "```")
ASK = [Message("user", "What does main.py do?")]


def save(folder: Path, how: str, default: str, with_tools: str) -> Path:
    build_tokenizer(default, folder)
    (folder / "chat_template.jinja").unlink()
    if how == "files":
        (folder / "chat_template.jinja").write_text(default)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
    else:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        named = {"rag": "{{ documents }}", "default": default, "tool_use": with_tools}
        config["chat_template"] = [{"name": name, "template": source} for name, source in named.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("how", ["files", "list"])
def test_template_is_chosen_for_each_call(how: str, tmp_path: Path) -> None:
    renderer = TemplateRenderer(Tokenizer(save(tmp_path, how, DEFAULT, WITH_TOOLS), fast=False))
    alone = {
        name: TemplateRenderer(build_tokenizer(source, tmp_path / name))
        for name, source in (("default", DEFAULT), ("tool_use", WITH_TOOLS))
        if not (tmp_path / name).mkdir()
    }
    assert renderer.unused_template == "" and renderer.template.traits.native_tools
    assert renderer.text(ASK, [], {}) == alone["default"].text(ASK, [], {})
    assert renderer.text(ASK, [TOOL], {}) == alone["tool_use"].text(ASK, [TOOL], {})
    assert renderer.text(ASK, [], {}) != alone["tool_use"].text([Message("system", ""), *ASK], [], {})


@pytest.mark.parametrize(
    ("default", "with_tools", "passes"), [(COUNTING, WITH_TOOLS, (False, True)), (DEFAULT, COUNTING, (True, False))]
)
async def test_each_template_is_certified_alone(
    default: str, with_tools: str, passes: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    save(folder, "files", default, with_tools)
    for _ in range(2):  # probed, then from the cache
        renderer, certificate = load_renderer(folder)
        assert isinstance(renderer, TemplateRenderer)
        assert tuple(certificate.select(has_tools=has).passed for has in (False, True)) == passes
        after_answer = Transition(0, ("user",))
        assert (after_answer not in renderer.uncertified, not renderer.uncertified_with_tools) == passes


async def test_conversation_with_tools_is_one_row(tmp_path: Path) -> None:
    renderer = TemplateRenderer(Tokenizer(save(tmp_path, "files", COUNTING, WITH_TOOLS), fast=False))
    certificate = certify(renderer)
    renderer.uncertified = certificate.select(has_tools=False).uncertified
    renderer.uncertified_with_tools = certificate.select(has_tools=True).uncertified
    assert (await play(renderer, certificate, tmp_path / "data")).rows == 1


@pytest.mark.parametrize(
    ("with_tools", "why"),
    [(OWN_FORM, "in the format of OpenAI's API"), (ACTIONS, "cannot parse")],
    ids=["form", "calls"],
)
def test_unusable_template_for_tools_is_not_used_and_reported(with_tools: str, why: str, tmp_path: Path) -> None:
    renderer = TemplateRenderer(Tokenizer(save(tmp_path, "list", DEFAULT, with_tools), fast=False))
    assert why in renderer.unused_template and "tool_use" in renderer.unused_template
    assert "<tools>" in renderer.text(ASK, [TOOL], {})
    assert certify(renderer).passed


@pytest.mark.parametrize("is_installed", [False, True])
def test_log_names_command_for_calls_that_cannot_be_parsed(
    is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with gpt-oss, whose calls only a hand-written renderer can parse."""
    renderer = TemplateRenderer(build_tokenizer(ACTIONS, tmp_path))
    certificate = certify(renderer)
    assert "calls" in certificate.unread
    monkeypatch.setattr(
        sys.modules["turngate.render.certify"], "find_spec", lambda name: object() if is_installed else None
    )
    log_renderer(cast(Gateway, SimpleNamespace(renderer=renderer, certificate=certificate)))
    assert "calls" in caplog.text and "--family" in caplog.text
    assert ("pip install 'turngate[families]'" in caplog.text) != is_installed
