"""The flags --ray and --ray-label of `turngate batch`."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from turngate.cli import app
from turngate.cli import batch as command
from turngate.cli.cluster import choose_cluster
from turngate.cli.options import BatchOptions
from turngate.config import ServeConfig
from turngate.errors import ConfigError
from turngate.rollout.cluster.ray_nodes import RayConnection

URL = "postgresql://turngate@db/turngate"
SHARED = ServeConfig(data=URL)


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ([], ""),
        (["--ray"], "auto"),
        (["--ray", "--n", "2"], "auto"),
        (["--ray", "10.0.0.1:6379"], "10.0.0.1:6379"),
        (["--ray=ray://head:10001"], "ray://head:10001"),
    ],
)
def test_address_is_optional(monkeypatch: pytest.MonkeyPatch, given: list[str], address: str) -> None:
    seen: list[BatchOptions] = []
    monkeypatch.setattr(command, "run_batch", lambda options: seen.append(options) or 0)
    done = CliRunner().invoke(app, ["batch", "--tasks", "t", "--agent", "pi", *given])
    assert done.exit_code == 0, done.output
    assert seen[0].ray == address


def options(**values: Any) -> BatchOptions:
    return BatchOptions(tasks="t", agent="pi", **values)


@pytest.mark.parametrize(
    ("given", "config", "message"),
    [
        ({"ray": "auto"}, ServeConfig(), "data must be the URL of a PostgreSQL database"),
        ({"ray_label": ["pool=docker"]}, SHARED, "also pass --ray"),
        ({"ray": "auto", "ray_label": ["pool"]}, SHARED, "must be NAME=VALUE"),
        ({"ray": "auto", "gateway": "http://g"}, SHARED, "remove --gateway"),
        ({"ray": "auto", "public_url": "http://g"}, SHARED, "remove --public-url"),
        ({"ray": "auto", "tunnel": "t"}, SHARED, "remove --tunnel"),
    ],
)
def test_wrong_flags_are_refused(given: dict[str, Any], config: ServeConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_cluster(options(**given), config)


def test_choice_of_a_cluster() -> None:
    choice = choose_cluster(options(ray="h:1", ray_label=["pool=docker"]), SHARED)
    assert choice is not None and (choice.address, choice.labels) == ("h:1", {"pool": "docker"})
    assert choose_cluster(options(gateway="http://cell"), SHARED) is None
    with pytest.raises(ConfigError, match=r"to use a shared store, also pass --ray, or the URL of a cell as --gateway"):
        choose_cluster(options(), SHARED)


def test_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"turngate\[ray\]"):
        RayConnection("auto")
