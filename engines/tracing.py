"""Spans of OpenTelemetry: a request, an attempt, a call of an engine, a weight update and its steps.

Nothing is recorded, and nothing is loaded, until `start` has named a collector. A span's parent is the trace context of
the code that runs (`TRACE_CONTEXT`), and the span is that context while its block runs, so engines' spans join it.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from typing import Any, Literal

from engines.errors import ConfigError
from engines.trace_context import TRACE_CONTEXT

Kind = Literal["server", "client", "internal"]
Attributes = Mapping[str, str | int | float | None]
"""Values of None are left out."""

_LONGEST_ERROR = 500
_SEND_TIMEOUT_S = 5.0
_NOTHING: Attributes = {}


class Span:
    """A span of OpenTelemetry's SDK; one without it records nothing."""

    context: Mapping[str, str] = {}
    """Headers by which spans of other processes join; none of a span that records nothing."""

    def __init__(self, recorded: Any = None, context: Mapping[str, str] = context) -> None:
        self._recorded = recorded
        self.context = context

    def note(self, attributes: Attributes) -> None:
        """Add attributes."""
        if self._recorded is not None:
            self._recorded.set_attributes(_given(attributes))

    def end(self, error: str = "") -> None:
        """End the span, as failed with an `error`."""
        if self._recorded is None:
            return
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._recorded.set_status(Status(StatusCode.ERROR, error))
        self._recorded.end()


class Tracer:
    """Hands ended spans to a processor of the SDK, whose variables (OTEL_TRACES_SAMPLER and so on) hold."""

    def __init__(self, processor: Any, name: str) -> None:
        from opentelemetry import context, trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        service = {"service.name": "rollout-gateway", "service.instance.id": name}
        self._provider = TracerProvider(resource=Resource.create(service))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("rollout-gateway", version("rollout-gateway"))
        self._w3c, self._no_context, self._trace = TraceContextTextMapPropagator(), context.Context(), trace

    def begin(self, name: str, kind: Kind, parent: Mapping[str, str], attributes: Attributes) -> Span:
        """Begin a span; without a `parent` it is the first of a trace."""
        above = self._w3c.extract(parent, context=self._no_context)
        made = self._tracer.start_span(name, above, self._trace.SpanKind[kind.upper()], _given(attributes))
        headers: dict[str, str] = {}
        self._w3c.inject(headers, self._trace.set_span_in_context(made))
        return Span(made, headers)

    def stop(self) -> None:
        self._provider.shutdown()


_OFF = Span()
_OFF_BLOCK = nullcontext(_OFF)
_tracer: Tracer | None = None


def start(endpoint: str, name: str) -> None:
    """Send spans of the gateway `name` in batches to the collector at `endpoint`, such as http://127.0.0.1:4318, as
    OTLP over HTTP. Raise `ConfigError` without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"gateway.otlp_endpoint needs OpenTelemetry: pip install 'rollout-gateway[otel]' ({error})"
        ) from error
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=_SEND_TIMEOUT_S)
    use(Tracer(BatchSpanProcessor(exporter), name))


def use(tracer: Tracer) -> None:
    """Record with a tracer from now on."""
    global _tracer
    _tracer = tracer


def stop() -> None:
    """Send what is recorded, and record no more. May wait for the collector."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is not None:
        tracer.stop()


def begin(name: str, attributes: Attributes = _NOTHING, kind: Kind = "internal") -> Span:
    """Begin a span that its owner ends."""
    return _tracer.begin(name, kind, TRACE_CONTEXT.get(), attributes) if _tracer is not None else _OFF


def span(
    name: str, attributes: Attributes = _NOTHING, kind: Kind = "internal", *, parent: Span | None = None
) -> AbstractContextManager[Span]:
    """Record the block; an exception that leaves it is the span's error. `parent` replaces the current context."""
    return _recorded(_tracer, name, attributes, kind, parent) if _tracer is not None else _OFF_BLOCK


def engine_call(name: str, attributes: Attributes) -> AbstractContextManager[Span]:
    """Record a call of an engine that belongs to a request or an update; probes have no span."""
    return span(name, attributes, "client") if TRACE_CONTEXT.get() else _OFF_BLOCK


@contextmanager
def _recorded(tracer: Tracer, name: str, attributes: Attributes, kind: Kind, parent: Span | None) -> Iterator[Span]:
    before = TRACE_CONTEXT.get()
    recorded = tracer.begin(name, kind, before if parent is None else parent.context, attributes)
    # Set back without a token: the end of a stream may run in another context than its beginning.
    TRACE_CONTEXT.set(dict(recorded.context))
    error = ""
    try:
        yield recorded
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"[:_LONGEST_ERROR]
        raise
    finally:
        TRACE_CONTEXT.set(before)
        recorded.end(error)


def _given(attributes: Attributes) -> dict[str, str | int | float]:
    return {key: value for key, value in attributes.items() if value is not None}
