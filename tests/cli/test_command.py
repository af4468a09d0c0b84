"""The help of `turngate`, and errors that name flags."""

from __future__ import annotations

import pytest
import typer.main

from tests.cli.kit import run_cli
from turngate.cli.command import name_flags
from turngate.cli.main import TurngateCommands, app
from turngate.errors import ConfigError

FLAGS = {"on_timeout": "--on-timeout", "engine_url": "--engine-url", "data": "--data", "tasks": "--tasks"}


@pytest.mark.parametrize(
    ("message", "param", "expected"),
    [
        ("on_timeout must be grade, not 'x'", "on_timeout", "--on-timeout must be grade, not 'x'"),
        ("engine vllm needs engine_url, and model", "engine", "engine vllm needs --engine-url, and model"),
        ("data: no recordings", "data", "data: no recordings"),
        ("data must be a folder", "data", "--data must be a folder"),
        ("'data' must be a folder", "data", "--data must be a folder"),
        ("data folder x must be empty", "data", "data folder x must be empty"),
        ("tasks must be named", "data", "tasks must be named"),
        ("task: nope does not exist", "tasks", "--tasks: nope does not exist"),
        ("task: one: tests/ has no test.sh", "tests", "task: one: tests/ has no test.sh"),
        ("out: /tmp/engine_url/x and 'engine_url' stay", "out", "out: /tmp/engine_url/x and 'engine_url' stay"),
    ],
)
def test_errors_name_flags(message: str, param: str, expected: str) -> None:
    assert name_flags(ConfigError(message, param=param), FLAGS) == expected


def test_setting_of_a_config_file_keeps_its_name(tmp_path: object) -> None:
    file = f"{tmp_path}/turngate.toml"
    with open(file, "w") as opened:
        opened.write("idle_s = 0\n")
    assert "turngate: idle_s " in run_cli("serve", "--config", file).stderr
    assert "turngate: --idle-s " in run_cli("serve", "--config", file, "--idle-s", "-1").stderr


def test_every_command_has_a_place_in_the_help() -> None:
    listed = [name for names in TurngateCommands.panels.values() for name in names]
    assert sorted(listed) == sorted(vars(typer.main.get_command(app))["commands"])
    assert listed[:3] == ["run", "show", "batch"]


def test_help_shows_no_types_of_flags_and_lists() -> None:
    for words in ([], ["run"], ["batch"], ["agents", "install"]):
        text = run_cli(*words, "--help").stdout
        assert "<bool>" not in text and "list[" not in text
    text = run_cli("batch", "--help").stdout
    panels = [line.split("─ ")[1].split(" ─")[0] for line in text.splitlines() if line.startswith("╭─")]
    assert panels[:3] == ["Options", "What to run", "Batch"]
