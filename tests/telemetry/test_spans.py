"""OpenTelemetry spans: what hangs where, what they say, what they never say, and that they cost nothing when they are off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.cli.kit import ROOT
from tests.kit import gateway, say
from tests.rollout.kit import open_harness
from turngate.errors import ConfigError
from turngate.telemetry import spans

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def told() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    spans.start_tracing("turngate-test", exporter)
    yield exporter
    spans.stop_tracing()


def by_name(told: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in told.get_finished_spans()}


def facts(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


async def test_a_turn_hangs_on_who_opened_its_session_and_has_the_engines_part_in_it(
    tmp_path: Path, told: InMemorySpanExporter
) -> None:
    async with gateway([say("Hello.")], data=tmp_path) as g:
        response = await g.admin.post("/admin/sessions", json={}, headers={"traceparent": PARENT})
        session = response.json()
        await g.ask(session["api_key"], "the words of a prompt", temperature=0.5, seed=7)
        turns = await g.turns(session["id"])
    turn, engine = by_name(told)["chat m"], by_name(told)["text_completion m"]
    assert turn.context is not None and turn.parent is not None and engine.parent is not None
    assert f"{turn.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{turn.parent.span_id:016x}" == PARENT.split("-")[2]
    assert engine.parent.span_id == turn.context.span_id
    said = facts(turn)
    assert said["gen_ai.operation.name"] == "chat" and said["gen_ai.request.model"] == "m"
    assert said["gen_ai.conversation.id"] == session["id"] and said["turngate.dialect"] == "chat"
    assert said["gen_ai.response.finish_reasons"] == ("stop",)
    [sampled] = turns
    assert said["gen_ai.usage.output_tokens"] == len(sampled["ids"]) and said["turngate.node"] == sampled["id"]
    assert facts(engine)["gen_ai.provider.name"] == "scripted"
    assert facts(engine)["gen_ai.request.temperature"] == 0.5 and facts(engine)["gen_ai.request.seed"] == 7
    everything = "".join(span.to_json() for span in told.get_finished_spans())
    for secret in ("the words of a prompt", "Hello", session["api_key"], g.app.admin_key):
        assert secret not in everything


async def test_a_parent_outlives_a_restart_and_nonsense_is_none(tmp_path: Path, told: InMemorySpanExporter) -> None:
    async with gateway([say("Hello.")], data=tmp_path) as g:
        session = (await g.admin.post("/admin/sessions", json={}, headers={"traceparent": PARENT})).json()
        odd = (await g.admin.post("/admin/sessions", json={}, headers={"traceparent": "00-zz-1-01"})).json()
    async with gateway([say("Hello.")], data=tmp_path) as g:
        await g.ask(session["api_key"], "Hi")
        await g.ask(odd["api_key"], "Hi")
    known, root = [span for span in told.get_finished_spans() if span.name == "chat m"]
    assert known.parent is not None and root.parent is None


async def test_what_fails_says_of_what_kind_and_no_more(tmp_path: Path, told: InMemorySpanExporter) -> None:
    async with gateway([say("x", fail_before=True)], data=tmp_path) as g:
        session = await g.open()
        with pytest.raises(openai.APIStatusError):
            await g.ask(session.key, "Hi")
    for span in told.get_finished_spans():
        assert facts(span)["error.type"] == "engine_unavailable" and not span.status.is_ok
        assert span.status.description is None and not span.events


@pytest.mark.process
async def test_a_rollout_its_stages_and_its_turns_are_one_trace(tmp_path: Path, told: InMemorySpanExporter) -> None:
    async with open_harness([say("Hello.")]) as stage:
        outcome = await stage.run('print(ask("Hi"))')
    found = by_name(told)
    rollout, run, turn = found["rollout"], found["invoke_agent shell"], found["chat m"]
    assert rollout.context is not None and run.context is not None
    assert rollout.parent is None and facts(rollout)["turngate.status"] == outcome.status == "finished"
    assert {span.context.trace_id for span in found.values() if span.context} == {rollout.context.trace_id}
    under = {name: span.parent.span_id for name, span in found.items() if span.parent is not None}
    for name in ("stage sandbox", "stage files", "stage setup", "invoke_agent shell"):
        assert under[name] == rollout.context.span_id
    for name in ("stage session", "stage launch", "stage agent", "stage seal", "stage collect", "chat m"):
        assert under[name] == run.context.span_id
    assert facts(run)["gen_ai.conversation.id"] == outcome.session == facts(turn)["gen_ai.conversation.id"]
    assert facts(rollout)["turngate.turns"] == 1


@pytest.mark.parametrize(
    ("served", "asked"), [("m", "the words of a prompt"), ("", "the words of a prompt"), ("", "x" * 101)]
)
async def test_no_span_is_called_what_an_agent_makes_up(
    tmp_path: Path, told: InMemorySpanExporter, served: str, asked: str
) -> None:
    async with gateway([say("Hello.")] * 2, data=tmp_path, model=served) as g:
        session = await g.open()
        for model in (asked, served or "some/model-1:b"):
            body = {"model": model, "messages": [{"role": "user", "content": "Hi"}]}
            await g.http().post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {session.key}"})
    assert asked not in "".join(span.to_json() for span in told.get_finished_spans())
    turns = [span.name for span in told.get_finished_spans() if span.name.startswith("chat")]
    assert turns == (["chat m", "chat m"] if served else ["chat", "chat some/model-1:b"])


class Silent(InMemorySpanExporter):
    """Nobody takes what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def shutdown(self) -> None:
        self.over.wait()


def test_nobody_waits_for_a_receiver_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spans, "_FLUSH_S", 0.1)
    silent = Silent()
    spans.start_tracing("turngate-test", silent)
    try:
        spans.stop_tracing()
    finally:
        silent.over.set()
    assert spans.current_tracer() is None and "could not be sent within 0.1 s" in caplog.text


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """What speaks OTLP over HTTP, on a port of its own, and what it was sent."""
    received: list[ExportTraceServiceRequest] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_spans_reach_a_collector_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        assert spans.is_enabled(False)
        spans.start_tracing("turngate-gateway")
        try:
            async with gateway([say("Hello.")], data=tmp_path) as g:
                await g.ask((await g.open()).key, "Hi")
        finally:
            await asyncio.to_thread(spans.stop_tracing)
    sent = [scope for request in received for resource in request.resource_spans for scope in resource.scope_spans]
    assert {span.name for scope in sent for span in scope.spans} == {"chat m", "text_completion m"}
    [resource] = [resource.resource for request in received for resource in request.resource_spans]
    assert ("service.name", "turngate-gateway") in [(a.key, a.value.string_value) for a in resource.attributes]


def test_they_are_off_unless_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    assert not spans.is_enabled(False) and spans.is_enabled(True)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1/v1/traces")
    assert spans.is_enabled(False)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not spans.is_enabled(True)


@pytest.mark.process
def test_nothing_of_it_is_imported_when_they_are_off() -> None:
    look = "import sys, turngate.server.app, turngate.rollout.rollout; print([m for m in sys.modules if 'opentelemetry' in m])"
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_the_extra_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'turngate\[otel\]'"):
        spans.start_tracing("turngate-test")
    assert spans.current_tracer() is None
