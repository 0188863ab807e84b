"""Causes of failed engine starts: a line of the log, its meaning and the lever to change, from `causes.toml`."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engines.levers import LEVERS
from engines.process.engine_log import lines_of, shortened
from engines.types import EngineKind

_WORDS_LENGTH = 300
_SIGKILL_EXIT = 137
# Longest traceback between a function that shows the stage of a start and the error.
_TRACEBACK_LINES = 160

_OUT_OF_MEMORY = r"CUDA out of memory|CUDA error: out of memory|out of memory occurred|cudaErrorMemoryAllocation"


@dataclass(frozen=True, slots=True)
class Cause:
    """A row of `causes.toml`, which explains its fields."""

    meaning: str
    remedy: str
    says: str | Sequence[str] = _OUT_OF_MEMORY
    inside: str = ""
    may_pass: bool = False

    def search(self, line: str) -> "re.Match[str] | None":
        return re.search(self.says if isinstance(self.says, str) else "|".join(self.says), line)


_KILLED = (
    "the engine was killed with SIGKILL (exit code 137), as the OOM killer does when the host runs out of memory; "
    "see `dmesg -T | grep -i oom`; give the host more memory or start fewer replicas on it"
)

_ERROR = re.compile(r"^\s*(?:[\w.]*(?:Error|Exception)|Value error|[\w ./-]+: error)\b.{0,3}[:,] \S")
# Errors about another process, which has logged its own.
_ECHO = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|Initialization failed\. Please see"
    r"|scheduler died during|validation errors? for|CancelledError|BrokenPipeError|EngineDeadError"
)


@cache
def causes() -> Sequence[Cause]:
    """Return all known causes; the first that matches counts."""
    table = tomllib.loads(Path(__file__).with_name("causes.toml").read_text(encoding="utf-8"))
    return [Cause(**row) for row in table["cause"]]


def diagnose(kind: EngineKind, log: str, exit_code: int | None, section: str = "engine") -> tuple[str, bool] | None:
    """Return one line on a failed engine's log, of meaning, the engine's words and the remedy, and True if a retry may
    succeed; None without a known line.

    `exit_code` is None if the engine still runs; `section` is the configuration key of its group.
    """
    lines = lines_of(log)
    for cause in causes():
        for index, line in enumerate(lines):
            if (found := cause.search(line)) and _is_inside(cause, lines, index):
                return _found(cause, kind, found, line, section)
    # SGLang ends itself with SIGKILL when a worker fails, and logs it.
    if exit_code == _SIGKILL_EXIT and not any("kill_process_tree called" in line for line in lines):
        return _KILLED, False
    return None


def last_error(log: str) -> str:
    """Return the engine's last error line, preferably its own and not an echo; "" without one."""
    errors = [line for line in lines_of(log) if _ERROR.match(line)]
    own = [line for line in errors if not _ECHO.search(line)] or errors
    return _words(own[-1]) if own else ""


def _is_inside(cause: Cause, lines: list[str], index: int) -> bool:
    above = lines[max(0, index - _TRACEBACK_LINES) : index]
    return not cause.inside or any(re.search(cause.inside, line) for line in above)


def _found(cause: Cause, kind: EngineKind, found: "re.Match[str]", line: str, section: str) -> tuple[str, bool]:
    memory = kv_memory = f"{section}.extra.mem_fraction_static"
    if kind is not EngineKind.SGLANG:
        memory = f"{section}.gpu_memory_utilization"
        kv_memory = f"{section}.kv_cache_memory_bytes where it is given, else {memory}"
    facts = {**found.groupdict(), "engine": section, "memory": memory, "kv_memory": kv_memory}
    if "flag" in facts:
        facts["key"] = _key_of(facts["flag"])
    said = f'the engine says: "{_words(line)}"'
    return f"{cause.meaning.format(**facts)}; {said}; {cause.remedy.format(**facts)}", cause.may_pass


def _words(line: str) -> str:
    """Return the line shortened, without the frames of pydantic and argparse."""
    frame = r"^Value error, | \[type=value_error, input_value=.*|^[\w ./-]+: error: (?=argument |unrecognized )"
    return shortened(re.sub(frame, "", line.strip()), _WORDS_LENGTH)


def _key_of(flag: str) -> str:
    """Return our key of an engine's argument; an argument without a lever came from `extra`."""
    name = flag.removeprefix("--").replace("-", "_")
    ours = next((lever.name for lever in LEVERS if name in (lever.name, lever.sglang)), None)
    return ours or f"extra.{name}"
