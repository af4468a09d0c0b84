"""OpenTelemetry spans of rollouts, their stages, turns and engine calls. Off, and nothing of it imported, unless it was switched on.

    rollout                     by the runner
      stage sandbox …
      invoke_agent NAME         the run, from the session's opening to its sealing; the gateway learns of it when the session is opened
        stage session, launch, agent, seal …
        chat MODEL              a turn, by the gateway
          text_completion MODEL the engine's part of it

The trace context goes from the runner to the gateway in the header of the call that opens a session, and never through the agent. Names
follow OpenTelemetry's conventions for generative AI where they have one; ours begin with `turngate.`. No prompt, no answer, no task's
text, no key and no URL is ever in a span.

`begin` is called by whoever owns the process, `tracing` by those who have something to tell. Needs `pip install 'turngate[otel]'`.
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
_LAST_S = 10.0  # for what is left when the process ends
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
# What the conventions call providers that we call otherwise.
_PROVIDERS = {"gemini": "gcp.gemini", "responses": "openai"}
_MODEL = re.compile(r"[\w.:/@+-]{1,100}", re.ASCII)  # a name; anything else could be whatever an agent wants to be read
_OPERATIONS = {"gemini": "generate_content"}  # by dialect; all others chat
_current: Spans | None = None


def tracing() -> Spans | None:
    """Where spans are told; None: they are off."""
    return _current


def wanted(asked: bool) -> bool:
    """Whether somebody asked for spans, or the environment says where to send them."""
    switched_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not switched_off and (asked or any(os.environ.get(name) for name in _ENDPOINTS))


def begin(service: str, exporter: SpanExporter | None = None) -> Spans:
    """Spans of this process are told from now on; to where the environment says (OTLP over HTTP), or to `exporter` as they end."""
    global _current
    try:
        _current = Spans(service, exporter)
    except ModuleNotFoundError as error:
        raise ConfigError(f"spans: {error.name} is missing: pip install 'turngate[otel]'", param="spans") from None
    return _current


def end() -> None:
    """What is still to be sent is; then spans are off."""
    global _current
    if _current is not None:
        spans, _current = _current, None
        spans.close()


def parent_of(text: str) -> str:
    """A `traceparent` header, if it is one."""
    return text if _PARENT.fullmatch(text) else ""


class Spans:
    def __init__(self, service: str, exporter: SpanExporter | None = None) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        from turngate import __version__

        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        sends: SpanProcessor
        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            sends = BatchSpanProcessor(OTLPSpanExporter())
        else:
            sends = SimpleSpanProcessor(exporter)
        self._provider.add_span_processor(sends)
        self._tracer: Tracer = self._provider.get_tracer("turngate", __version__)
        self._trace = trace
        self.empty = Context()  # so that whatever else the process traces is no parent of ours

    def close(self) -> None:
        """Sends what is left, for ten seconds at most where nobody takes it: the SDK itself waits for longer than it is told to."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_LAST_S)
        if sending.is_alive():
            log.warning("spans: the last ones were not taken within %g s, and are lost", _LAST_S)

    def rollout(self, rollout: str, group: str, task: str, agent: str, sandbox: str, attempt: int) -> Span:
        return self._begun(
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

    def turn(self, session: str, facts: Mapping[str, Json], dialect: str, model: str) -> TurnSpan:
        """`facts`: the session's metadata, in which its parent was noted when it was opened. `model` may be an agent's own word."""
        model = model if _MODEL.fullmatch(model) else ""
        told = facts.get(TRACEPARENT)
        operation = _OPERATIONS.get(dialect, "chat")
        span = self._start(
            f"{operation} {model}".strip(),
            self._remote(told) if isinstance(told, str) else None,
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

    def _remote(self, traceparent: str) -> Context | None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent}, self.empty)

    def _begun(self, name: str, parent: Span | None, attributes: Mapping[str, AttributeValue]) -> Span:
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
    """One that was begun. Ending it twice is fine."""

    def __init__(self, spans: Spans, span: OtelSpan) -> None:
        self._spans = spans
        self._span = span

    @property
    def context(self) -> Context:
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(self._span, self._spans.empty)

    @property
    def traceparent(self) -> str:
        """As a header has it."""
        of = self._span.get_span_context()
        return f"00-{of.trace_id:032x}-{of.span_id:016x}-{of.trace_flags:02x}"

    def inside(self, name: str, attributes: Mapping[str, AttributeValue]) -> Span:
        return self._spans._begun(name, self, attributes)

    def note(self, attributes: Mapping[str, AttributeValue | None]) -> None:
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(name, value)

    def failed(self, kind: str) -> None:
        """By the error's kind alone: its words may quote what an engine or an agent said."""
        self._span.set_attribute("error.type", kind)
        self._span.set_status(self._spans._trace.Status(self._spans._trace.StatusCode.ERROR))

    def end(self) -> None:
        if self._span.is_recording():
            self._span.end()


class TurnSpan(Span):
    def __init__(self, spans: Spans, span: OtelSpan, model: str) -> None:
        super().__init__(spans, span)
        self._model = model

    def engine(self, engine: str, sampling: Sampling, max_tokens: int | None) -> EngineSpan:
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
        span = self._spans._start(name, self.context, attributes, self._spans._trace.SpanKind.CLIENT)
        return EngineSpan(self._spans, span)

    def recorded(self, node: int, finish: str, prompt: int, sampled: int, version: int) -> None:
        self.note(
            {
                "gen_ai.response.finish_reasons": (finish,),
                "gen_ai.usage.input_tokens": prompt,
                "gen_ai.usage.output_tokens": sampled,
                "turngate.node": node,
                "turngate.policy.version": version,
            }
        )


class EngineSpan(Span):
    def over(self, finish: str, prompt: int, sampled: int) -> None:
        self.note(
            {
                "gen_ai.response.finish_reasons": (finish,),
                "gen_ai.usage.input_tokens": prompt,
                "gen_ai.usage.output_tokens": sampled,
            }
        )
        self.end()
