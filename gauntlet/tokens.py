"""A real model's tokenizer and chat template, used as an inference server uses them."""

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


def cache_folder() -> Path:
    """Return the folder for downloads and environments that are kept between runs."""
    return Path(os.environ.get("TURNGATE_CACHE") or Path.home() / ".cache" / "turngate")


def tokenizer_folder() -> Path:
    """Return the folder of Qwen3's tokenizer, which `tools/parts.py tokenizers` installs."""
    return cache_folder() / "tokenizers" / "qwen3"


def model_folder() -> Path:
    """Return the model folder for every gateway and the engine: Qwen3's tokenizer with its own chat template."""
    return tokenizer_folder()


class Model:
    """A tokenizer and a chat template, without weights."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        self.folder = folder
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._template = _environment().from_string(config["chat_template"])
        self.stop = int(self._tokenizer.token_to_id(_token_text(config["eos_token"])) or 0)
        special = [self._tokenizer.token_to_id(_token_text(name)) for name in config["additional_special_tokens"]]
        self._encoded = lru_cache(maxsize=8192)(self._encode)
        self._special = {self.stop, *(token for token in special if token is not None)}

    def encode(self, text: str) -> list[int]:
        """Encode text message by message. Special tokens split it first, and earlier messages are cached."""
        return [token for part in _SPECIAL.split(text) for token in self._encoded(part)]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_oddly(self, text: str, seed: str) -> list[int]:
        """Encode text to ids that a tokenizer would not choose: words are split into fragments, as models sometimes sample them.

        Tags such as `<tool_call>` remain single tokens, because no model samples them in fragments.
        """
        rng = random.Random(seed)
        ids: list[int] = []
        for part in _TAG.split(text):
            if _TAG.fullmatch(part):
                ids += self.encode(part)
                continue
            while part:
                size = rng.randint(1, 9)
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
        """Render a conversation and the generation prompt with the chat template."""
        return self._template.render(
            messages=[_for_template(message) for message in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=True,
            **variables,
        )


def _for_template(message: Json) -> Json:
    """Convert a message as inference servers do before rendering it."""
    out = {**message, "content": _join_text(message.get("content"))}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        out["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        out["tool_calls"] = [_decode_arguments(call) for call in message["tool_calls"]]
    return out


def _decode_arguments(call: Json) -> Json:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def _join_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _environment() -> ImmutableSandboxedEnvironment:
    """Build the Jinja environment that Hugging Face documents for chat templates."""
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
