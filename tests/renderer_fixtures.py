"""Renderers for the exactness tests, each loaded once."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable
from typing import Any

import pytest

from tests.needs import require
from tools import parts
from turngate.render import BUILTIN_TOKENIZER, Renderer, load_renderer


@functools.cache
def _load(name: str) -> Renderer:
    if name == "builtin":
        return load_renderer(BUILTIN_TOKENIZER)[0]
    if name == "smollm2":
        return load_renderer(parts.ensure("smollm2"))[0]
    folder = parts.ensure("tokenizers")
    if name.startswith("family:"):
        family = name.removeprefix("family:")
        return load_renderer(folder / {"qwen3": "qwen3", "deepseek-v3": "deepseek_v3"}[family], family=family)[0]
    return load_renderer(folder / name, family="template")[0]


def renderer_params(names: Iterable[str], full: Container[str] = (), repeat: Container[str] = ()) -> list[Any]:
    """Return renderer names for `parametrize`, with their marks: for the part, and `full` or `repeat` for those in these sets."""
    marks: dict[str, list[pytest.MarkDecorator]] = {
        "builtin": [],
        "smollm2": [pytest.mark.needs("smollm2"), pytest.mark.full],
    }
    return [
        pytest.param(
            name,
            marks=[
                *marks.get(name, [pytest.mark.needs("tokenizers")]),
                *([pytest.mark.full] if name in full else []),
                *([pytest.mark.repeat] if name in repeat else []),
            ],
        )
        for name in names
    ]


@pytest.fixture(scope="session")
def renderers():
    """A function that loads a renderer by name."""

    def get(name: str) -> Renderer:
        if name != "builtin":
            require("smollm2" if name == "smollm2" else "tokenizers")
        return _load(name)

    return get
