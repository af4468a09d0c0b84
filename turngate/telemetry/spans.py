"""OpenTelemetry spans of rollouts, stages, turns and engine calls. Spans are off by default; OpenTelemetry is imported only if they are on.

    rollout                     recorded by the runner
      stage sandbox …
      invoke_agent NAME         the agent's run, from opening the session to copying the agent's work
        stage session, launch, agent, seal …
        chat MODEL              a turn, recorded by the gateway
          text_completion MODEL the engine call

The runner passes the trace context to the gateway in a header of the request that opens the session, never through the agent. Attribute
names follow OpenTelemetry's conventions for generative AI; our own attributes begin with `turngate.`. Spans never contain prompts, replies,
task texts, keys or URLs.

A process calls `start_tracing` once, and `current_tracer` wherever it records spans. Tracing requires `pip install 'turngate[otel]'`.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from turngate.errors import ConfigError
from turngate.types import Json, Sampling

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanKind, Tracer
    from opentelemetry.util.types import AttributeValue

log = logging.getLogger("turngate")
TRACEPARENT = "traceparent"
_FLUSH_S = 10.0  # time to send the last spans when the process exits
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_TRACEPARENT_FORMAT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
# Our names for providers that have different names in OpenTelemetry's conventions.
_PROVIDERS = {"gemini": "gcp.gemini", "responses": "openai"}
_MODEL_NAME = re.compile(r"[\w.:/@+-]{1,100}", re.ASCII)  # other text could be content that the agent wrote
_OPERATIONS = {"gemini": "generate_content"}  # by dialect; the default is chat
_current: RolloutTracer | None = None


def current_tracer() -> RolloutTracer | None:
    """Return the tracer of this process, or None if spans are disabled."""
    return _current


def is_enabled(requested: bool) -> bool:
    """Return whether spans are enabled, by `requested` or by an OTLP endpoint in the environment. OTEL_SDK_DISABLED=true overrides both."""
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not disabled and (requested or any(os.environ.get(name) for name in _ENDPOINTS))


def start_tracing(service: str, exporter: SpanExporter | None = None) -> RolloutTracer:
    """Start recording the spans of this process.

    If `exporter` is None, spans are sent over HTTP to the OTLP endpoint that the environment sets, or else to the SDK's default endpoint.
    Raise `ConfigError` if OpenTelemetry is not installed.
    """
    global _current
    try:
        _current = RolloutTracer(service, exporter)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"spans need {error.name}, which is not installed; run `pip install 'turngate[otel]'`", param="spans"
        ) from None
    return _current


def stop_tracing() -> None:
    """Stop recording spans, and send the remaining ones."""
    global _current
    if _current is not None:
        tracer, _current = _current, None
        tracer.close()


def parse_traceparent(text: str) -> str:
    """Return the value of a `traceparent` header if it is valid, otherwise an empty string."""
    return text if _TRACEPARENT_FORMAT.fullmatch(text) else ""


class RolloutTracer:
    """Creates the spans of rollouts and turns."""

    def __init__(self, service: str, exporter: SpanExporter | None = None) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        from turngate import __version__

        attributes = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        processor: SpanProcessor
        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            processor = BatchSpanProcessor(OTLPSpanExporter())
        else:
            processor = SimpleSpanProcessor(exporter)
        self._provider.add_span_processor(processor)
        self._tracer: Tracer = self._provider.get_tracer("turngate", __version__)
        self._trace = trace
        self.empty = Context()  # keeps other spans of the process from becoming parents of ours

    def close(self) -> None:
        """Send the remaining spans, but wait at most ten seconds. The SDK's own time limit is not reliable."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_FLUSH_S)
        if sending.is_alive():
            log.warning("the last spans could not be sent within %g s and may be lost", _FLUSH_S)

    def start_rollout(self, rollout: str, group: str, task: str, agent: str, sandbox: str, attempt: int) -> Span:
        return self._start_child(
            "rollout",
            None,
            {
                "turngate.rollout": rollout,
                "turngate.group": group,
                "turngate.task": task,
                "turngate.sandbox": sandbox,
                "turngate.attempt": attempt,
                "gen_ai.agent.name": agent,
            },
        )

    def start_turn(self, session: str, metadata: Mapping[str, Json], dialect: str, model: str) -> TurnSpan:
        """Start the span of a turn. `metadata` is the session's; its `traceparent`, if any, identifies the parent span.

        A `model` that does not look like a name is left out.
        """
        model = model if _MODEL_NAME.fullmatch(model) else ""
        parent = metadata.get(TRACEPARENT)
        operation = _OPERATIONS.get(dialect, "chat")
        span = self._start(
            f"{operation} {model}".strip(),
            self._remote_context(parent) if isinstance(parent, str) else None,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "turngate",
                "gen_ai.conversation.id": session,
                "turngate.dialect": dialect,
                **({"gen_ai.request.model": model} if model else {}),
            },
            self._trace.SpanKind.SERVER,
        )
        return TurnSpan(self, span, model)

    def _remote_context(self, traceparent: str) -> Context | None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent}, self.empty)

    def _start_child(self, name: str, parent: Span | None, attributes: Mapping[str, AttributeValue]) -> Span:
        return Span(self, self._start(name, None if parent is None else parent.context, attributes))

    def _start(
        self,
        name: str,
        context: Context | None,
        attributes: Mapping[str, AttributeValue],
        kind: SpanKind | None = None,
    ) -> OtelSpan:
        return self._tracer.start_span(
            name,
            context=self.empty if context is None else context,
            kind=kind or self._trace.SpanKind.INTERNAL,
            attributes=attributes,
        )


class Span:
    """A span that has been started. Only the first call to `end` has an effect."""

    def __init__(self, tracer: RolloutTracer, span: OtelSpan) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def context(self) -> Context:
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(self._span, self._tracer.empty)

    @property
    def traceparent(self) -> str:
        """The value of a `traceparent` header that identifies this span."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def start_child(self, name: str, attributes: Mapping[str, AttributeValue]) -> Span:
        return self._tracer._start_child(name, self, attributes)

    def set_attributes(self, attributes: Mapping[str, AttributeValue | None]) -> None:
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(name, value)

    def set_error(self, kind: str) -> None:
        """Mark the span as failed. The error's message is omitted, because it may quote the engine or the agent."""
        self._span.set_attribute("error.type", kind)
        self._span.set_status(self._tracer._trace.Status(self._tracer._trace.StatusCode.ERROR))

    def end(self) -> None:
        if self._span.is_recording():
            self._span.end()


class TurnSpan(Span):
    def __init__(self, tracer: RolloutTracer, span: OtelSpan, model: str) -> None:
        super().__init__(tracer, span)
        self._model = model

    def start_engine_call(self, engine: str, sampling: Sampling, max_tokens: int | None) -> EngineSpan:
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": _PROVIDERS.get(engine, engine),
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
        }
        attributes |= {"gen_ai.request.model": self._model} if self._model else {}
        attributes |= {"gen_ai.request.max_tokens": max_tokens} if max_tokens is not None else {}
        attributes |= {"gen_ai.request.seed": sampling.seed} if sampling.seed is not None else {}
        name = f"text_completion {self._model}".strip()
        span = self._tracer._start(name, self.context, attributes, self._tracer._trace.SpanKind.CLIENT)
        return EngineSpan(self._tracer, span)

    def set_result(self, node: int, finish: str, prompt: int, sampled: int, version: int) -> None:
        self.set_attributes(
            {
                "gen_ai.response.finish_reasons": (finish,),
                "gen_ai.usage.input_tokens": prompt,
                "gen_ai.usage.output_tokens": sampled,
                "turngate.node": node,
                "turngate.policy.version": version,
            }
        )


class EngineSpan(Span):
    def finish(self, finish: str, prompt: int, sampled: int) -> None:
        self.set_attributes(
            {
                "gen_ai.response.finish_reasons": (finish,),
                "gen_ai.usage.input_tokens": prompt,
                "gen_ai.usage.output_tokens": sampled,
            }
        )
        self.end()
