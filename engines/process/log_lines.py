"""The log lines of a process of ours. Their tracebacks show no values of variables: these are keys and prompts."""

import io
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog
from structlog.dev import ConsoleRenderer, plain_traceback

# structlog itself shows a value with white space as Python writes it.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in b"\t\n\r"}

_TIME = "%Y-%m-%d %H:%M:%S.%f"  # the steps of an update are milliseconds apart


def write_log_lines(to: TextIO, least: str = "debug") -> None:
    """Write the log lines of this process to a file, from the level `least` on.

    structlog's own default shows all local variables of each frame where rich is installed, as it is beside vLLM.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.StackInfoRenderer(),
            structlog.dev.set_exc_info,
            structlog.processors.TimeStamper(fmt=_TIME, utc=False),
            _without_controls,
            ConsoleRenderer(colors=to.isatty(), exception_formatter=_write_traceback),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.PrintLoggerFactory(to),
    )


def _without_controls(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Show control characters, such as those in a path that a stranger asks for: a terminal would obey them."""
    for name, value in line.items():
        if isinstance(value, str) and not value.isprintable():
            line[name] = value.translate(_CONTROLS)
    return line


def _write_traceback(to: TextIO, error: structlog.typing.ExcInfo) -> None:
    """Write a traceback. The error's own text may repeat what a client has sent."""
    text = io.StringIO()
    plain_traceback(text, error)
    to.write(text.getvalue().translate(_CONTROLS))
