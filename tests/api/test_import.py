"""`import turngate` is lazy: it loads nothing before something is used."""

from __future__ import annotations

import subprocess
import sys
from typing import get_type_hints

import pytest

import turngate as tg
from turngate.api import arguments

pytestmark = pytest.mark.process

HEAVY = ("typing", "numpy", "msgspec", "aiohttp", "rich", "starlette", "tokenizers", "IPython", "torch", "asyncio")


def run_code(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_loads_nothing() -> None:
    output = run_code(
        "import sys; before = set(sys.modules); import turngate; print(*sorted(set(sys.modules) - before))"
    )
    loaded = output.split()
    assert [name for name in loaded if name.startswith("turngate")] == ["turngate", "turngate._moved"]
    assert not [name for name in loaded if name.partition(".")[0] in HEAVY]


def test_api_does_not_load_optional_packages() -> None:
    output = run_code(
        "import sys, turngate as tg; tg.run; print(*(n for n in ('IPython', 'torch', 'typer', 'mcp') if n in sys.modules))"
    )
    assert output.strip() == ""


def test_every_public_name_exists_and_is_documented() -> None:
    for name in tg.__all__:
        value = getattr(tg, name)
        assert value.__doc__, name
    assert {*tg.__all__} <= {*dir(tg)}
    with pytest.raises(AttributeError, match="module 'turngate' has no attribute 'rum'"):
        tg.rum  # noqa: B018


def test_typed_arguments_match_checked_arguments() -> None:
    """The arguments are declared twice: for type checkers, and for checks at run time."""
    assert {*get_type_hints(arguments.ClientArguments)} == {*arguments.ClientSettings.__struct_fields__}
    assert {*get_type_hints(arguments.RunArguments)} == {*arguments.RunSettings.__struct_fields__}
