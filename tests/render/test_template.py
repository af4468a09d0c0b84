"""Rendering compared with `transformers` on real tokenizers and templates, and templates that fail certification."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.renderer_fixtures import renderer_params
from turngate.errors import BadRequest, ConfigError
from turngate.render import BUILTIN_TOKENIZER, load_renderer
from turngate.render.certify import CASES
from turngate.render.renderer import TemplateRenderer
from turngate.render.template import Template, _to_wire
from turngate.render.tokenizer import Tokenizer, probe_corpus
from turngate.types import Message

REAL = ["qwen3", "qwen2_5", "llama3_1", "deepseek_v3"]


@pytest.mark.sample(3)
@pytest.mark.xdist_group("transformers")  # its import takes ten seconds, so one worker does it
@pytest.mark.parametrize("name", renderer_params([*REAL, "builtin"]))
def test_rendering_matches_transformers(name: str, renderers: Any) -> None:
    transformers = pytest.importorskip("transformers")
    renderer: TemplateRenderer = renderers(name)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(renderer.tokenizer.folder / "tokenizer.json"), **renderer.tokenizer.special_tokens
    )
    theirs.chat_template = renderer.tokenizer.chat_template
    native = renderer.template.traits.native_tools
    for case in CASES:
        if case.tools and not native:
            continue  # tools in the system prompt are our own doing
        late = any(m.role == "system" for m in case.messages[1:])
        if late and not (renderer.template.traits.late_system and renderer.template.traits.system_after_answer):
            continue  # so are moved system messages
        messages = [_to_wire(m, renderer.template.traits) for m in case.messages]
        tools = [t.wire for t in case.tools] or None
        expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        assert renderer.text(case.messages, case.tools, {}) == expected, case.name
        ids = theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert renderer.render(case.messages, case.tools, {}) == ids, case.name


@pytest.mark.parametrize("name", renderer_params([*REAL, "smollm2", "builtin"]))
def test_incremental_decoding_matches_full_decoding(name: str, renderers: Any) -> None:
    tokenizer = renderers(name).tokenizer
    for text in probe_corpus(tokenizer.added)[:60]:
        ids = tokenizer.encode(text)
        decoder = tokenizer.decoder()
        assert "".join(decoder.feed([i]) for i in ids) + decoder.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("name", renderer_params(["qwen3", "qwen2_5", "llama3_1", "smollm2", "builtin"]))
def test_fast_encoder_is_used(name: str, renderers: Any) -> None:
    assert renderers(name).tokenizer.fast


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", renderer_params([*REAL, "smollm2", "builtin", "family:qwen3", "family:deepseek-v3"]))
def test_real_templates_are_certified(name: str, renderers: Any) -> None:
    from turngate.render.certify import certify

    certificate = certify(renderers(name))
    assert certificate.passed, [f for f in certificate.findings if f.verdict == "differs"]
    assert {f.verdict for f in certificate.findings} <= {"same", "thinking", "turn", "refused"}


def folder_with(tmp_path: Path, template: str) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((BUILTIN_TOKENIZER / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return tmp_path


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_template_that_counts_messages_is_not_certified(tmp_path: Path) -> None:
    """Every message is numbered from the end, so that a new one rewrites all before it."""
    counting = CHATML.replace("{{ m.role }}", "{{ m.role }} {{ loop.revindex }}")
    _, certificate = load_renderer(folder_with(tmp_path, counting))
    assert not certificate.passed
    assert not certificate.certified


def test_template_that_drops_old_messages_is_not_certified(tmp_path: Path) -> None:
    _, certificate = load_renderer(folder_with(tmp_path, CHATML.replace("in messages %}", "in messages[-2:] %}")))
    assert not certificate.passed


def test_template_without_tools_gets_hermes_format(tmp_path: Path) -> None:
    renderer, certificate = load_renderer(folder_with(tmp_path, CHATML))
    assert certificate.passed
    case = next(c for c in CASES if c.name == "parallel calls")
    text = renderer.tokenizer.decode(renderer.render(case.messages, case.tools, {}))
    assert "<tools>" in text
    assert text.count('<tool_call>\n{"name": "read_file"') == 2
    assert (
        "<|im_start|>user\n<tool_response>\nA\n</tool_response>\n<tool_response>\nB\n</tool_response><|im_end|>" in text
    )


def test_rejected_system_message_moves_into_question(tmp_path: Path) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    renderer, _ = load_renderer(folder_with(tmp_path, refusing))
    text = renderer.tokenizer.decode(renderer.render([Message("system", "Be kind."), Message("user", "hi")], (), {}))
    assert text.startswith("<|im_start|>user\nBe kind.\n\nhi<|im_end|>")


@pytest.mark.parametrize(
    "use", ["messages.append(1)", "messages[0].pop('role')", "messages[0].role.__class__.__name__"]
)
def test_sandbox_refuses_unsafe_attributes_each_time(use: str) -> None:
    template = Template("{% if attack %}{{ " + use + " }}{% endif %}{{ messages[0].role.upper() }}", {})
    messages = [Message("user", "hi")]
    for _ in range(2):
        assert template.text(messages, generate=False, kwargs={}) == "USER"
        with pytest.raises(BadRequest, match="is unsafe"):
            template.text(messages, generate=False, kwargs={"attack": True})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "does not exist"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "chat_template.jinja").unlink(), "no chat template"),
        (lambda f: (f / "chat_template.jinja").write_text("{% if %}"), "chat template has a syntax error on line 1"),
    ],
)
def test_broken_folder_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    folder = folder_with(tmp_path, CHATML)
    damage(folder)
    with pytest.raises(ConfigError, match=message):
        load_renderer(folder)


def test_fast_encoder_is_disabled_if_it_disagrees(tmp_path: Path) -> None:
    spec = json.loads((BUILTIN_TOKENIZER / "tokenizer.json").read_text())
    spec["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Punctuation", "behavior": "Isolated"})
    folder = folder_with(tmp_path, CHATML)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert not Tokenizer(folder).fast
