"""A sample of the fuzzing of every HTTP route, with a fixed seed. `make fuzz` runs it for longer and with other seeds."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.fuzz.requests import FuzzRequest, list_operations, requests
from tests.fuzz.rounds import HISTORIES, run_examples
from tests.fuzz.world import DAMAGES, LATE_S, Damage, Finding, World
from tests.speed import scaled

SEED = 1
SAMPLED_BASES = ("/v1/", "/v1beta/", "/s/{id}/v1/responses")
DIALECTS = ("chat", "gemini", "messages", "responses")
TAGS = ("chat", "gemini", "messages", "responses", "sessions", "public", "admin", "openenv", "page")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(late_s=scaled(LATE_S))  # other tests run at the same time
    yield world
    world.close()


def fuzz_tag(world: World, tag: str, examples: int, *, memory: bool = False) -> None:
    before = world.statuses.copy()
    for method, path, operation in list_operations(world.document):
        if operation["tags"][0] == tag:
            if tag in DIALECTS and (not path.startswith(SAMPLED_BASES) or path.startswith("/v1/rollouts")):
                continue  # the same endpoint at another address
            check = lambda request: world.check(request, memory=memory)  # noqa: E731
            run_examples(requests(world.document, method, path), check, examples, SEED)
    seen = world.statuses - before
    assert seen[200] + seen[201] > 0, f"no request succeeded, so nothing was tested in depth: {seen}"


@pytest.mark.sample(4)
@pytest.mark.parametrize("tag", TAGS)
def test_routes(world: World, tag: str) -> None:
    fuzz_tag(world, tag, 10 if tag in DIALECTS else 3)


@pytest.mark.repeat
@pytest.mark.parametrize("tag", TAGS)
def test_more_requests(world: World, tag: str) -> None:
    fuzz_tag(world, tag, 20 if tag in DIALECTS else 6)


@pytest.mark.full
@pytest.mark.parametrize("tag", ("chat", "gemini", "messages", "responses", "admin"))
def test_memory_is_bounded_by_the_size_of_the_request(world: World, tag: str) -> None:
    fuzz_tag(world, tag, 10 if tag in DIALECTS else 1, memory=True)


def test_gate_routes() -> None:
    world = World(gated=True, late_s=scaled(LATE_S))
    try:
        for method, path, _ in list_operations(world.document):
            if path.startswith("/admin/gate"):
                run_examples(requests(world.document, method, path), world.check, 8, SEED)
    finally:
        world.close()


def test_damaged_rows(world: World) -> None:
    run_examples(DAMAGES, world.check_damaged_row, 6, SEED)


@pytest.mark.repeat
def test_more_damaged_rows(world: World) -> None:
    run_examples(DAMAGES, world.check_damaged_row, 40, SEED)


def test_trees(world: World) -> None:
    run_examples(HISTORIES, world.check_tree, 8, SEED)


# ── findings of earlier runs ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("sessions", "opened", "x'ff'"),
        ("sessions", "closed", "'x'"),
        ("sessions", "status", "'x'"),
        ("sessions", "config", "-1"),
        ("outcomes", "outcome", "-1"),
        ("events", "data", "'x'"),
        ("events", "time", "'x'"),
        ("events", "kind", "x'ff'"),
        ("preambles", "tools", "x'ff'"),
        ("preambles", "tools", "5"),
        ("nodes", "delivered", "9223372036854775807"),
        ("preambles", "kwargs", "-1"),
        ("nodes", "ids", "x'ff'"),
        ("nodes", "ids", "CAST(x'7bff' AS TEXT)"),
        ("nodes", "info", "CAST(x'7bff' AS TEXT)"),
        ("events", "data", "CAST(x'7bff' AS TEXT)"),
        ("preambles", "tools", "CAST(x'7bff' AS TEXT)"),
        ("sessions", "id", "CAST(x'7bff' AS TEXT)"),
        ("sessions", "stop", "CAST(x'7bff' AS TEXT)"),
        ("events", "kind", "CAST(x'7bff' AS TEXT)"),
        ("refusals", "message", "CAST(x'7bff' AS TEXT)"),
    ],
)
def test_damaged_column_concerns_only_its_session(world: World, table: str, column: str, value: str) -> None:
    world.check_damaged_row(Damage(table, column, value))


BAD_UTF8 = (
    b'{"model": "m", "input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {"\xf2": 1}}]}',
    b'{"model": "m", "input": "Hi", "tools": [{"t\xaape": "custom", "name": "sh"}]}',
    b'{"model": "m", "input": "Hi", "metadata": {"a": "\xff"}}',
)


@pytest.mark.parametrize("body", [*BAD_UTF8, b"1", b"[]"])
def test_body_that_is_wrong_where_no_decoder_looks(world: World, body: bytes) -> None:
    headers = (("authorization", "Bearer $secret"),)
    world.check(FuzzRequest("POST", "/v1/responses", (), headers, body, "/v1/responses"))


def test_tool_call_number_that_does_not_fit_into_the_store(world: World) -> None:
    operation = "/admin/sessions/{id}/tools/{call}/answer"
    path = f"/admin/sessions/$open/tools/{2**63}/answer"
    headers = (("authorization", "Bearer $admin"),)
    world.check(FuzzRequest("POST", path, (), headers, b'{"reply": null}', operation))


@pytest.mark.parametrize("text", [b"{" * 60_000, b"[" + b"\\n" * 30_000 + b"{" * 200])
def test_memory_for_brackets_in_a_text(world: World, text: bytes) -> None:
    path, headers = "/admin/engines/drain", (("authorization", "Bearer $admin"),)
    world.check(FuzzRequest("POST", path, (), headers, b'{"url": "' + text + b'"}', path), memory=True)


@pytest.mark.full
def test_memory_for_a_long_session(world: World) -> None:
    """A reply about a session needs several times the size of its trace in memory, even a reply of 173 bytes."""
    opened = world.run(world.gateway.open())
    for turn in range(40):
        world.run(world.gateway.ask(opened.key, f"{turn} " + "word " * 2000))
    for operation in ("/sessions/{id}/rollout", "/sessions/{id}"):
        path, headers = operation.format(id=opened.id), (("authorization", "Bearer $admin"),)
        world.check(FuzzRequest("GET", path, (), headers, b"", operation), memory=True)


# ── the checks can fail ─────────────────────────────────────────────────────────────────────────────────────────────


def test_checks_detect_an_internal_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(**_: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(world.gateway.app.directory, "list_sessions", fail)
    request = FuzzRequest("GET", "/admin/sessions", (), (("authorization", "Bearer $admin"),), b"", "/admin/sessions")
    with pytest.raises(Finding, match="unhandled KeyError"):
        world.check(request)


def test_checks_detect_a_stall(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def compute(**_: object) -> list[object]:
        end = time.thread_time() + world.late_s * 1.2
        while time.thread_time() < end:
            pass
        return []

    monkeypatch.setattr(world.gateway.app.directory, "list_sessions", compute)
    request = FuzzRequest("GET", "/admin/sessions", (), (("authorization", "Bearer $admin"),), b"", "/admin/sessions")
    with pytest.raises(Finding, match="computed for"):
        world.check(request)


def test_checks_detect_a_reply_that_is_not_in_the_document(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def list_planted(**_: object) -> list[str]:
        return ["planted"]

    monkeypatch.setattr(world.gateway.app.directory, "list_sessions", list_planted)
    request = FuzzRequest("GET", "/admin/sessions", (), (("authorization", "Bearer $admin"),), b"", "/admin/sessions")
    with pytest.raises(Finding, match="not what the document says"):
        world.check(request)
