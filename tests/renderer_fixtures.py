"""Renderers for the exactness tests, each loaded once."""

from __future__ import annotations

import functools
import os

import pytest

from tools import parts
from turngate.render import Renderer, load
from turngate.server.app import BUILTIN_TOKENIZER


@functools.cache
def _load(name: str) -> Renderer:
    if name == "builtin":
        return load(BUILTIN_TOKENIZER)[0]
    if name == "smollm2":
        return load(parts.ensure("smollm2"))[0]
    folder = parts.ensure("tokenizers")
    if name.startswith("family:"):
        family = name.removeprefix("family:")
        return load(folder / {"qwen3": "qwen3", "deepseek-v3": "deepseek_v3"}[family], family=family)[0]
    return load(folder / name, family="template")[0]


@pytest.fixture(scope="session")
def renderers():
    """Loads a renderer by name; without the part it is made of, the test is skipped (in CI: it fails)."""

    def get(name: str) -> Renderer:
        needs = {"builtin": None, "smollm2": "smollm2"}.get(name, "tokenizers")
        if needs is not None and os.environ.get("CI") != "true" and (reason := parts.missing(needs)):
            pytest.skip(f"{reason}; make it with: python tools/parts.py {needs}")
        return _load(name)

    return get
