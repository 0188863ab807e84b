"""The W3C trace context of the request that is served now, which its calls to engines carry on."""

import re
from collections.abc import Mapping
from contextvars import ContextVar

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_LONGEST_STATE = 512
NO_TRACE: dict[str, str] = {}

TRACE_CONTEXT: ContextVar[dict[str, str]] = ContextVar("trace_context", default=NO_TRACE)
"""Headers for engines. Tasks that the request's handler starts inherit them."""


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the trace context among a request's headers; none without a traceparent in its form."""
    parent, state = headers.get(TRACEPARENT, ""), headers.get(TRACESTATE, "")
    if not _TRACEPARENT.fullmatch(parent):
        return NO_TRACE
    is_sent_on = state and len(state) <= _LONGEST_STATE and state.isascii() and state.isprintable()
    return {TRACEPARENT: parent} | ({TRACESTATE: state} if is_sent_on else {})
