"""Fixtures for all tests. Their helpers are in `kit.py`."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import starlette.routing
import typer.testing

from tests import kit
from tests.needs import needs
from tests.postgres import CutOffProxy, PostgresServer, start_postgres
from tests.vllm import Servers
from turngate.render import Renderer, Tokenizer
from turngate.telemetry import logs

pytest_plugins = ["tests.tiers"]
_vllm = pytest.StashKey[Servers]()
typer.testing._get_command = functools.cache(typer.testing._get_command)  # builds all commands for each call
starlette.routing.compile_path = functools.cache(starlette.routing.compile_path)  # each gateway has the same 120 routes
gc.set_threshold(50_000, 50, 50)  # by default, garbage collection took a sixth of the time of the fast tests


def pytest_sessionstart(session: pytest.Session) -> None:
    kit.sweep_memory_folders()


def pytest_collection_finish() -> None:
    """Let torch's loggers propagate. Pytest attaches its handlers to each logger that does not, six times per test."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def _forget_secrets_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs redact the secrets of this test only."""
    monkeypatch.setattr(logs, "_secrets", set(logs._secrets))


@pytest.fixture(autouse=True)
def _unset_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNGATE_ADMIN_KEY", raising=False)
    monkeypatch.delenv("TURNGATE_ADMIN_KEY_FILE", raising=False)


@pytest.fixture(scope="session")
def vllm(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Real vLLM servers, one at a time."""
    with closing(Servers(tmp_path_factory.mktemp("vllm"))) as servers:
        pytestconfig.stash[_vllm] = servers
        yield servers


@pytest.hookimpl(trylast=True)  # after the fixtures of the test
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop vLLM after the last test that needs it: an idle server keeps over a gigabyte of memory."""
    servers = item.config.stash.get(_vllm, None)
    if servers and (nextitem is None or "vllm" not in needs(nextitem)):
        servers.close()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One PostgreSQL server for the tests of this process. A test that stops or damages a server starts its own."""
    with start_postgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """The URL of an empty database of this test."""
    return postgres_server.create_database()


@pytest.fixture
def cut_off_proxy(postgres_url: str) -> Iterator[CutOffProxy]:
    """A proxy to the database of this test."""
    with closing(CutOffProxy(postgres_url)) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    """The renderer of the builtin tokenizer."""
    return kit.renderer()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The builtin tokenizer."""
    return kit.tokenizer()


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.needs("tokenizers")) for name in kit.REAL_TOKENIZERS])
def real_tokenizer(request: pytest.FixtureRequest) -> Path:
    """The folder of each real tokenizer in turn."""
    return kit.real_tokenizer(request.param)
