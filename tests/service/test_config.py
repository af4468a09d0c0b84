"""Settings of the service."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngate.errors import ConfigError
from turngate.service.agents import Agents
from turngate.service.config import ServiceConfig, load_config
from turngate.service.planning import build_task
from turngate.service.request import SweRolloutRequest

EXAMPLE = Path(__file__).parents[2] / "examples" / "service.toml"
ROW = {
    "instance_id": "own__thing-1",
    "repo": "own/thing",
    "base_commit": "a" * 40,
    "problem_statement": "It is broken.",
    "test_patch": "diff --git a/test_x.py b/test_x.py\n--- a/test_x.py\n+++ b/test_x.py\n@@ -1 +1 @@\n-a\n+b\n",
    "FAIL_TO_PASS": ["test_x.py::test_a"],
    "PASS_TO_PASS": [],
    "image_name": "own/thing:1",
    "install_config": {"test_cmd": "pytest -rA", "log_parser": "pytest"},
}


def test_example_is_valid_and_overrides_win() -> None:
    config = load_config(EXAMPLE, {"running": 3, "data": None})
    assert config.running == 3 and config.endpoints and config.sandbox == "bubblewrap"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("runing = 1", "did you mean running?"),
        ("running = 0", "running"),
        ('sandbox = "chroot"', "bubblewrap"),
        ('network = "some"', "network"),
        ("[clamp]\ntext = -1", "clamp.text"),
        ('public_url = "https://a"\ntunnel = "x"', "either"),
        ("running = [", "not valid TOML"),
        ("endpoints = []", "endpoints must be an object, not a list"),
    ],
)
def test_invalid_setting_is_named(text: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "service.toml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "service.toml")
    assert word in raised.value.message


def test_only_configured_agents_are_allowed(tmp_path: Path) -> None:
    presets = Agents(ServiceConfig())
    assert presets.names[0] == "mini-swe-agent" and "shell" not in presets.names and "pi" in presets.names
    (tmp_path / "mine.toml").write_text(
        'name = "mine"\ntitle = "Mine"\ndialect = "chat"\ncommand = ["true", "{prompt}"]\n'
    )
    own = Agents(ServiceConfig(agents=[str(tmp_path / "mine.toml"), "pi"]))
    assert own.names == ["mine", "pi"]
    for name in ("shell", "codex", str(tmp_path / "mine.toml"), "./mine.toml", "../../x"):
        with pytest.raises(Exception, match=r"agent .* is not allowed on this server; choose one of mine, pi"):
            own.find(name)
    for wrong in ({"agent": "nobody"}, {"agent_options": {"nobody": {}}}, {"agents": ["shell"]}):
        with pytest.raises(ConfigError, match="agent"):
            Agents(ServiceConfig(**wrong))  # type: ignore[arg-type]


def test_row_image_must_be_allowed(tmp_path: Path) -> None:
    request = SweRolloutRequest(task=ROW, model_key="scripted://m").check()
    with pytest.raises(Exception, match="uses the image 'own/thing:1', which this server does not allow"):
        build_task(request, ServiceConfig(), tmp_path)
    task = build_task(request, ServiceConfig(images=("own/*",)), tmp_path)
    assert (task.id, task.image) == ("own__thing-1", "own/thing:1")
    with pytest.raises(Exception, match="FAIL_TO_PASS is missing") as raised:
        rest = {name: value for name, value in ROW.items() if name != "FAIL_TO_PASS"}
        build_task(SweRolloutRequest(task=rest, model_key="m"), ServiceConfig(), tmp_path)
    assert raised.value.param == "task.FAIL_TO_PASS"  # type: ignore[attr-defined]
