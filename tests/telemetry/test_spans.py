"""OpenTelemetry spans: their parents, attributes and secrets, and no cost when they are off."""

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
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    spans.start_tracing("turngate-test", exporter)
    yield exporter
    spans.stop_tracing()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


async def test_turn_span_has_session_parent_and_engine_child(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    async with gateway([say("Hello.")], data=tmp_path) as g:
        response = await g.admin.post("/admin/sessions", json={}, headers={"traceparent": PARENT})
        session = response.json()
        await g.ask(session["api_key"], "the words of a prompt", temperature=0.5, seed=7)
        turns = await g.turns(session["id"])
    turn, engine = by_name(exporter)["chat m"], by_name(exporter)["text_completion m"]
    assert turn.context is not None and turn.parent is not None and engine.parent is not None
    assert f"{turn.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{turn.parent.span_id:016x}" == PARENT.split("-")[2]
    assert engine.parent.span_id == turn.context.span_id
    turn_attributes = attributes(turn)
    assert turn_attributes["gen_ai.operation.name"] == "chat" and turn_attributes["gen_ai.request.model"] == "m"
    assert turn_attributes["gen_ai.conversation.id"] == session["id"] and turn_attributes["turngate.dialect"] == "chat"
    assert turn_attributes["gen_ai.response.finish_reasons"] == ("stop",)
    [sampled] = turns
    assert (
        turn_attributes["gen_ai.usage.output_tokens"] == len(sampled["ids"])
        and turn_attributes["turngate.node"] == sampled["id"]
    )
    assert attributes(engine)["gen_ai.provider.name"] == "scripted"
    assert attributes(engine)["gen_ai.request.temperature"] == 0.5 and attributes(engine)["gen_ai.request.seed"] == 7
    everything = "".join(span.to_json() for span in exporter.get_finished_spans())
    for secret in ("the words of a prompt", "Hello", session["api_key"], g.app.admin_key):
        assert secret not in everything


async def test_parent_survives_restart_and_invalid_parent_is_ignored(
    tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    async with gateway([say("Hello.")], data=tmp_path) as g:
        session = (await g.admin.post("/admin/sessions", json={}, headers={"traceparent": PARENT})).json()
        odd = (await g.admin.post("/admin/sessions", json={}, headers={"traceparent": "00-zz-1-01"})).json()
    async with gateway([say("Hello.")], data=tmp_path) as g:
        await g.ask(session["api_key"], "Hi")
        await g.ask(odd["api_key"], "Hi")
    with_parent, root = [span for span in exporter.get_finished_spans() if span.name == "chat m"]
    assert with_parent.parent is not None and root.parent is None


async def test_failed_span_has_error_type_only(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    async with gateway([say("x", fail_before=True)], data=tmp_path) as g:
        session = await g.open()
        with pytest.raises(openai.APIStatusError):
            await g.ask(session.key, "Hi")
    for span in exporter.get_finished_spans():
        assert attributes(span)["error.type"] == "engine_unavailable" and not span.status.is_ok
        assert span.status.description is None and not span.events


@pytest.mark.process
async def test_rollout_stages_and_turns_are_one_trace(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    async with open_harness([say("Hello.")]) as stage:
        outcome = await stage.run('print(ask("Hi"))')
    found = by_name(exporter)
    rollout, run, turn = found["rollout"], found["invoke_agent shell"], found["chat m"]
    assert rollout.context is not None and run.context is not None
    assert rollout.parent is None and attributes(rollout)["turngate.status"] == outcome.status == "finished"
    assert {span.context.trace_id for span in found.values() if span.context} == {rollout.context.trace_id}
    parents = {name: span.parent.span_id for name, span in found.items() if span.parent is not None}
    for name in ("stage sandbox", "stage files", "stage setup", "invoke_agent shell"):
        assert parents[name] == rollout.context.span_id
    for name in ("stage session", "stage launch", "stage agent", "stage seal", "stage collect", "chat m"):
        assert parents[name] == run.context.span_id
    assert attributes(run)["gen_ai.conversation.id"] == outcome.session == attributes(turn)["gen_ai.conversation.id"]
    assert attributes(rollout)["turngate.turns"] == 1


@pytest.mark.parametrize(
    ("served_model", "requested_model"),
    [("m", "the words of a prompt"), ("", "the words of a prompt"), ("", "x" * 101)],
)
async def test_span_names_exclude_unknown_model_names(
    tmp_path: Path, exporter: InMemorySpanExporter, served_model: str, requested_model: str
) -> None:
    async with gateway([say("Hello.")] * 2, data=tmp_path, model=served_model) as g:
        session = await g.open()
        for model in (requested_model, served_model or "some/model-1:b"):
            body = {"model": model, "messages": [{"role": "user", "content": "Hi"}]}
            await g.http().post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {session.key}"})
    assert requested_model not in "".join(span.to_json() for span in exporter.get_finished_spans())
    turns = [span.name for span in exporter.get_finished_spans() if span.name.startswith("chat")]
    assert turns == (["chat m", "chat m"] if served_model else ["chat", "chat some/model-1:b"])


class HangingExporter(InMemorySpanExporter):
    """An exporter that hangs on shutdown."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def shutdown(self) -> None:
        self.over.wait()


def test_hanging_exporter_does_not_delay_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spans, "_FLUSH_S", 0.1)
    hanging = HangingExporter()
    spans.start_tracing("turngate-test", hanging)
    try:
        spans.stop_tracing()
    finally:
        hanging.over.set()
    assert spans.current_tracer() is None and "could not be sent within 0.1 s" in caplog.text


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """Run an OTLP receiver over HTTP; yield its URL and the requests it receives."""
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


def test_tracing_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    assert not spans.is_enabled(False) and spans.is_enabled(True)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1/v1/traces")
    assert spans.is_enabled(False)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not spans.is_enabled(True)


@pytest.mark.process
def test_opentelemetry_is_not_imported_when_off() -> None:
    code = "import sys, turngate.server.app, turngate.rollout.rollout; print([m for m in sys.modules if 'opentelemetry' in m])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_extra_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'turngate\[otel\]'"):
        spans.start_tracing("turngate-test")
    assert spans.current_tracer() is None
