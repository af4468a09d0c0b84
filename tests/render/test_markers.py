"""Special tokens: those that only tokenizer_config.json declares are used, and a template marker must be one token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from turngate.errors import ConfigError
from turngate.render import BUILTIN_TOKENIZER, TemplateRenderer, Tokenizer
from turngate.types import Message

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


def make_folder(folder: Path, template: str, config: dict[str, Any], change: Any = lambda spec: None) -> Path:
    spec = json.loads((BUILTIN_TOKENIZER / "tokenizer.json").read_text())
    change(spec)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", **config}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def declare(*tokens: str, start: int) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(start + n): {"content": t, "special": True} for n, t in enumerate(tokens)}}


def vocabulary_size() -> int:
    spec = json.loads((BUILTIN_TOKENIZER / "tokenizer.json").read_text())
    return max(*spec["model"]["vocab"].values(), *(t["id"] for t in spec["added_tokens"])) + 1


def add_placeholders(spec: dict[str, Any]) -> None:
    """Reserve ids, as some vocabularies do for tokens that are only named elsewhere."""
    for n in range(4):
        spec["model"]["vocab"][f"[UNUSED_{n}]"] = vocabulary_size() + n


@pytest.mark.sample(3)
@pytest.mark.parametrize("gap", [0, 7])
@pytest.mark.parametrize("change", [lambda spec: None, add_placeholders], ids=["no placeholder", "placeholder"])
@pytest.mark.parametrize("fast", [None, False])
def test_declared_tokens_are_used(fast: bool | None, change: Any, gap: int, tmp_path: Path) -> None:
    start = vocabulary_size() + gap
    folder = make_folder(tmp_path, TEMPLATE, declare(*ROLES, start=start), change)
    tokenizer = Tokenizer(folder, fast=fast)
    renderer = TemplateRenderer(tokenizer)
    ids = renderer.render([Message("user", "Hi")], (), {})
    assert (ids[0], ids[-2], ids[-1]) == (start + 1, start + 3, start + 2)
    assert renderer.stop_ids[0] == start + 3
    assert tokenizer.decode(ids) == "<|user|>Hi<|end|><|assistant|>"
    assert tokenizer.vocab_size == start + 4


@pytest.mark.parametrize(
    ("template", "config", "message"),
    [
        (TEMPLATE, {}, r"writes '<\|end\|>'.*encodes '<\|end\|>' as \d+ tokens"),
        (TEMPLATE, declare(*ROLES[:1], ROLES[3], start=20_000), r"writes '<\|assistant\|>', '<\|user\|>'"),
        (TEMPLATE, declare(*ROLES, start=300), r"writes '<\|assistant\|>'"),  # ids of ordinary tokens
        ("{{ bos_token }}" + TEMPLATE.replace("<|end|>", "<|im_end|>"), {"bos_token": "<bos>"}, "'<bos>'"),
        ("{% for m in messages %}{% endfor %}", {}, "leaves out the assistant's answer"),
        ("{{ raise_exception('never') }}", {}, r"two questions and an answer \(never\)"),
    ],
)
def test_template_with_marker_of_several_tokens_is_refused(
    template: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(make_folder(tmp_path, template, config), fast=False)
    with pytest.raises(ConfigError, match=message):
        TemplateRenderer(tokenizer)


def test_role_markers_may_be_text_if_none_is_a_token(tmp_path: Path) -> None:
    """Zephyr's template: roles in plain text, and a real token at the end of each turn."""
    template = TEMPLATE.replace("<|end|>", "{{ eos_token }}")
    config = {"eos_token": "</s>", **declare("</s>", start=vocabulary_size())}
    renderer = TemplateRenderer(Tokenizer(make_folder(tmp_path, template, config), fast=False))
    assert renderer.stop_ids == (vocabulary_size(),)


def test_ids_that_the_encoder_would_not_use_are_refused(tmp_path: Path) -> None:
    def shift(spec: dict[str, Any]) -> None:
        spec["added_tokens"].append({**spec["added_tokens"][0], "content": "<|extra|>", "id": 90_000})

    folder = make_folder(tmp_path, TEMPLATE, {}, shift)
    with pytest.raises(ConfigError, match=r"declares the id 90000 for '<\|extra\|>'"):
        Tokenizer(folder, fast=False)
