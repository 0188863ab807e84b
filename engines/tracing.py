"""Spans of OpenTelemetry: a request, an attempt, a call of an engine, a weight update and its steps.

Nothing is recorded, and nothing is loaded, until `start` has named a collector. A span's parent is the trace context of
the code that runs (`TRACE_CONTEXT`), and the span is that context while its block runs, so engines' spans join it.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

from engines.errors import ConfigError
from engines.trace_context import TRACE_CONTEXT

Kind = Literal["server", "client", "internal"]
Attributes = Mapping[str, str | int | float | None]
"""Values of None are left out."""

_LONGEST_ERROR = 500
_NOTHING: Attributes = {}


class Span:
    """A span that records nothing, and the base of those that do."""

    context: Mapping[str, str] = {}
    """Headers by which spans of other processes join; none of this class."""

    def note(self, attributes: Attributes) -> None:
        """Add attributes."""

    def end(self, error: str = "") -> None:
        """End the span, as failed with an `error`."""


class Tracer(Protocol):
    """Begins spans, and sends ended ones until `stop`."""

    def begin(self, name: str, kind: Kind, parent: Mapping[str, str], attributes: Attributes) -> Span: ...

    def stop(self) -> None: ...


_OFF = Span()
_OFF_BLOCK = nullcontext(_OFF)
_tracer: Tracer | None = None


def start(endpoint: str, name: str) -> None:
    """Send spans of the gateway `name` to a collector as OTLP over HTTP. Raise `ConfigError` without the extra."""
    try:
        from engines.open_telemetry import otlp_tracer
    except ImportError as error:
        raise ConfigError(
            f"gateway.otlp_endpoint needs OpenTelemetry: pip install 'rollout-gateway[otel]' ({error})"
        ) from error
    use(otlp_tracer(endpoint, name))


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
