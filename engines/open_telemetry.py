"""Spans with OpenTelemetry's SDK, of the extra `otel`. `engines/tracing.py` loads it where spans are recorded."""

from collections.abc import Mapping
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engines.tracing import Attributes, Kind, Span

_W3C = TraceContextTextMapPropagator()
_KINDS: dict[Kind, SpanKind] = {
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}
_SEND_TIMEOUT_S = 5.0


class RecordedSpan(Span):
    """A span of the SDK."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        context: dict[str, str] = {}
        _W3C.inject(context, trace.set_span_in_context(span))
        self.context = context

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(_given(attributes))

    def end(self, error: str = "") -> None:
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class SdkTracer:
    """Hands ended spans to a processor. The SDK's variables (OTEL_TRACES_SAMPLER and so on) hold."""

    def __init__(self, processor: SpanProcessor, name: str) -> None:
        service = {"service.name": "rollout-gateway", "service.instance.id": name}
        self._provider = TracerProvider(resource=Resource.create(service))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("rollout-gateway", version("rollout-gateway"))

    def begin(self, name: str, kind: Kind, parent: Mapping[str, str], attributes: Attributes) -> Span:
        """Begin a span; without a `parent` it is the first of a trace."""
        above = _W3C.extract(parent, context=Context())
        return RecordedSpan(self._tracer.start_span(name, above, _KINDS[kind], _given(attributes)))

    def stop(self) -> None:
        self._provider.shutdown()


def otlp_tracer(endpoint: str, name: str) -> SdkTracer:
    """Return a tracer that sends batches to the collector at `endpoint`, such as http://127.0.0.1:4318."""
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=_SEND_TIMEOUT_S)
    return SdkTracer(BatchSpanProcessor(exporter), name)


def _given(attributes: Attributes) -> dict[str, str | int | float]:
    return {key: value for key, value in attributes.items() if value is not None}
