"""Fixtures for every folder of tests. The helpers behind them are in `kit.py`."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests import kit
from turngate import logs
from turngate.render import Renderer, Tokenizer

gc.set_threshold(50_000, 50, 50)  # a sixth of the time of the fast tests went into looking through what stays

# Heavy, but each looks after its own things only: two files may run at a time. What takes longest comes first, so that neither of two
# workers is left alone with it at the end.
_LONGEST = (
    "tests/trainers/test_trl",
    "tests/real",
    "tests/agents_real",
    "tests/trainers/test_demo",
    "tests/environment",
    "tests/trainers/test_verifiers",
    "tests/trainers/test_grpo_crash",
    "tests/secrets",
    "tests/deploy/test_image",
    "tests/page",
    "tests/tasks",
    "tests/swe",
)
_BESIDE = (
    "tests/real",
    "tests/agents_real",
    "tests/sandboxes/test_contract",
    "tests/sandboxes/test_docker",
    "tests/sandboxes/test_e2b",
    "tests/sandboxes/test_huggingface",
    "tests/sandboxes/test_places",
    "tests/sandboxes/test_relay",
    "tests/sandboxes/test_tunnel",
    "tests/sandboxes/test_wayout",
    "tests/page/",
    "tests/api/test_run",
    "tests/api/test_docs",
    "tests/api/test_notebook",
    "tests/rollout",
    "tests/service/test_rollouts",
    "tests/service/test_abort",
    "tests/service/test_restart",
    "tests/service/test_many",
    "tests/service/test_own",
    "tests/service/test_direct",
    "tests/tasks/grading",
    "tests/tasks/test_prove",
    "tests/batch",
    "tests/cli/test_run",
    "tests/doctor/test_places",
    "tests/mcp",
    "tests/secrets/test_gateway",
    "tests/secrets/test_service",
    "tests/secrets/test_environment",
    "tests/swe/test_swe",
    "tests/engines/test_local",
    "tests/trainers/test_openenv_real",
    "tests/environment",
    "tests/trainers/test_export_real",
    "tests/trainers/test_trl",
    "tests/trainers/test_verifiers",
    "tests/trainers/test_grpo_crash",
    "tests/trainers/test_training",
    "tests/trainers/test_demo",
    "tests/deploy/test_image",
)
# These count what is on the machine, kill what they find, or need all of it.
_ALONE = (
    "tests/batch/test_storm",
    "tests/crash",
    "tests/feed/test_crash",
    "tests/redteam",  # fork bombs
    "tests/workers",
    "tests/sandboxes/test_attacks",
    "tests/sandboxes/test_escape",
    "tests/sandboxes/test_isolation",
    "tests/sandboxes/test_limits",
    "tests/gauntlet/test_turngate",
)
_LIGHT = (
    "test_archive.py",
    "test_door.py",
    "test_patch.py",
    "test_testimony.py",
    "test_reward.py",
    "test_ledger.py",
    "test_plan.py",
    "test_summary.py",
    "test_source.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parents[1]
    for item in items:
        place = item.path.relative_to(root).as_posix()
        if place.startswith((*_BESIDE, *_ALONE)) and item.path.name not in _LIGHT:
            item.add_marker(pytest.mark.real)
            if place.startswith(_ALONE):
                item.add_marker(pytest.mark.alone)
    items.sort(key=lambda item: _rank(item.path.relative_to(root).as_posix()))


def _rank(place: str) -> int:
    return next((at for at, begin in enumerate(_LONGEST) if place.startswith(begin)), len(_LONGEST))


@pytest.fixture(autouse=True)
def _keys_of_one_test_are_words_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_kept_out", set(logs._kept_out))


@pytest.fixture(autouse=True)
def _no_admin_key_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNGATE_ADMIN_KEY", raising=False)
    monkeypatch.delenv("TURNGATE_ADMIN_KEY_FILE", raising=False)


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
