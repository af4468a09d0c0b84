"""Fixtures for every folder of tests. The helpers behind them are in `kit.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import kit
from turngate.render import Renderer, Tokenizer


@pytest.fixture(autouse=True)
def _no_admin_key_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNGATE_ADMIN_KEY", raising=False)


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    """The renderer of the builtin tokenizer."""
    return kit.renderer()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The builtin tokenizer."""
    return kit.tokenizer()


@pytest.fixture(params=kit.REAL_TOKENIZERS)
def real_tokenizer(request: pytest.FixtureRequest) -> Path:
    """The folder of each real tokenizer in turn."""
    return kit.real_tokenizer(request.param)
