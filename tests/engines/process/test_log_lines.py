"""Log lines: what they show of a failure, and what they keep to themselves."""

import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from engines.process.log_lines import write_log_lines

FAILS = """
import sys
import rich
import structlog
from engines.process.log_lines import write_log_lines

def check(key):
    raise ValueError("no such field")

write_log_lines(sys.stderr, *sys.argv[1:])
try:
    structlog.get_logger().debug("begun")
    check("secret-" + "key")
except ValueError:
    structlog.get_logger().exception("a request failed")
"""


@contextmanager
def patched() -> Iterator[None]:
    """Leave structlog as it was."""
    before = structlog.get_config()
    try:
        yield
    finally:
        structlog.configure(**before)


def lines_of(*words: str) -> str:
    ran = subprocess.run([sys.executable, "-c", FAILS, *words], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == ""
    return ran.stderr


def test_a_traceback_names_the_place_and_the_error_and_no_value_of_a_variable() -> None:
    lines = lines_of()
    assert "a request failed" in lines
    assert "in check" in lines
    assert "ValueError: no such field" in lines
    assert "secret-key" not in lines


def test_a_line_shows_control_characters_that_a_terminal_would_obey() -> None:
    with io.StringIO() as lines, patched():
        write_log_lines(lines)
        structlog.get_logger().info("admin request", path="/traces/\x1b[2J\x9b2J\x7f", error="one\ntwo")
        shown = lines.getvalue()
    assert shown.count("\n") == 1
    assert shown.strip().isprintable()
    assert r"path=/traces/\x1b[2J\x9b2J\x7f" in shown
