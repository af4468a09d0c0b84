"""A real model's tokenizer and chat template, as an inference server uses them. For the mock engine and the script of what it says."""

from __future__ import annotations

import datetime
import json
import os
import random
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Json = dict[str, Any]
_SPECIAL = re.compile(r"(<\|im_start\|>|<\|im_end\|>)")
_TAG = re.compile(r"(</?(?:think|tool_call)>)")


def cache() -> Path:
    """Where heavy things are kept between runs."""
    return Path(os.environ.get("TURNGATE_CACHE") or Path.home() / ".cache" / "turngate")


def tokenizer() -> Path:
    """Qwen3's, as `tools/parts.py tokenizers` leaves it."""
    return cache() / "tokenizers" / "qwen3"


def default_model() -> Path:
    """The folder that every gateway and the engine are given: Qwen3's tokenizer with the chat template that came with it."""
    return tokenizer()


class Model:
    """What a model is to the Gauntlet: ids, text and a template. It has no weights."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        self.folder = folder
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._template = _environment().from_string(config["chat_template"])
        self.stop = int(self._tokenizer.token_to_id(_named(config["eos_token"])) or 0)
        special = [self._tokenizer.token_to_id(_named(name)) for name in config["additional_special_tokens"]]
        self._encoded = lru_cache(maxsize=8192)(self._encode)
        self._special = {self.stop, *(token for token in special if token is not None)}

    def encode(self, text: str) -> list[int]:
        """Message by message: special tokens part the text before anything else does, and old messages are known."""
        return [token for part in _SPECIAL.split(text) for token in self._encoded(part)]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_oddly(self, text: str, seed: str) -> list[int]:
        """Ids that say the text, but not those that a tokenizer would choose: words come in pieces, as models sample them.

        Tags such as `<tool_call>` stay the single tokens that they are: no model spells those out.
        """
        draw = random.Random(seed)
        ids: list[int] = []
        for part in _TAG.split(text):
            if _TAG.fullmatch(part):
                ids += self.encode(part)
                continue
            while part:
                size = draw.randint(1, 9)
                ids += self.encode(part[:size])
                part = part[size:]
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        if special:
            return text
        return str(
            self._tokenizer.decode([token for token in ids if token not in self._special], skip_special_tokens=False)
        )

    def token(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def render(self, messages: Sequence[Json], tools: Sequence[Json] | None, **variables: Any) -> str:
        """A conversation and the generation prompt, as the template has it."""
        return self._template.render(
            messages=[_for_template(message) for message in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=True,
            **variables,
        )


def _for_template(message: Json) -> Json:
    """What inference servers do to a message before the template sees it."""
    out = {**message, "content": _text(message.get("content"))}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        out["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        out["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return out


def _call(call: Json) -> Json:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _named(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that Hugging Face documents for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
