"""The log lines of a process of ours. Their tracebacks show no values of variables: these are keys and prompts."""

from typing import TextIO

import structlog
from structlog.dev import ConsoleRenderer, plain_traceback


def write_log_lines(to: TextIO, least: str = "debug") -> None:
    """Write the log lines of this process to a file, from the level `least` on.

    structlog's own default shows all local variables of each frame where rich is installed, as it is beside vLLM.
    """
    *processors, _ = structlog.get_config()["processors"]
    structlog.configure(
        processors=[*processors, ConsoleRenderer(colors=to.isatty(), exception_formatter=plain_traceback)],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.PrintLoggerFactory(to),
    )
