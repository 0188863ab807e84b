"""The log of a starting engine: plain lines and the current stage of the start.

Known lines are those of vLLM 0.32 and SGLang 0.5.23.
"""

import contextlib
import re
import tempfile
import time
from pathlib import Path

from engines.config import EngineConfig
from engines.errors import ConfigError
from engines.types import Phase

_TAIL_BYTES = 1 << 20
_LOGS_KEPT = 200
_SHORT = 100
_PAGE = bytes(4096)

# Colours; `(EngineCore pid=12)`; `ERROR 11-21 15:00:26 [core.py:1510]`; SGLang's `[2026-11-21 15:02:41 TP0]`.
_PREFIX = re.compile(
    r"\x1b\[[\d;]*m"
    r"|^\([\w-]+ pid=\d+\) ?"
    r"|^(?:\([\w-]+ pid=\d+\) )?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?"
    r"|^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] ?"
)

# In order of the start; the first match counts.
_STAGES = tuple(
    (re.compile(pattern), doing)
    for pattern, doing in (
        (r"(?:checkpoint shards|loading (?:\w+ )?shards):.* (?P<done>\d+)/(?P<all>\d+) \[", "loading weights"),
        (r"Capturing CUDA graphs.* (?P<done>\d+)/(?P<all>\d+) \[", "capturing graphs"),
        (r"Capturing batches .* (?P<done>\d+)/(?P<all>\d+) \[", "capturing graphs"),
        (r"Starting to load model|Load weight begin", "loading weights"),
        (
            r"Dynamo bytecode transform|Compiling (a graph|num tokens)|torch\.compile took|Start compiling",
            "compiling",
        ),
        (r"Loading weights took|Model loading took|Load weight end", "profiling memory"),
        (r"(?i)capture .*graph.* begin", "capturing graphs"),
        (r"KV cache size|Available KV cache memory|KV Cache is allocated|Memory pool end", "making the KV cache"),
        (r"(?i)graph capturing finished|init engine \(profile|capture .*graph.* end", "starting the server"),
        (r"Starting vLLM (?:API )?server|Started server process|Application startup complete", "warming up"),
        (r"non-default args: |Resolved architecture: |Using max model len ", "reading the configuration"),
        (r"Initializing a V1 LLM engine|server_args=|Init (?:torch distributed|parallel) begin", "starting workers"),
    )
)

_LINE_END = re.compile(r"[\r\n]+")
_OPTIONAL = re.compile(r"^.*was found but failed to import\n(?:.*\n)*?[\w.]*(?:Error|Exception)\b.*\n?", re.M)
_LEAKS = re.compile(r"^(?:nanobind: | - leaked | - \.\.\. skipped|See https://nanobind).*\n?", re.M)
_DETAIL = re.compile(r" \d+/\d+$|: .*")
_KV_MEMORY = re.compile(r"`--kv-cache-memory=(\d+)` \([^)]*\) to fit into requested memory")


def measured_kv_memory(log: str) -> int | None:
    """Return the bytes of KV cache that fit by vLLM's measurement, those of its worker with the least; None where the
    log does not say."""
    return min(map(int, _KV_MEMORY.findall(log)), default=None)


def check_log_folder(config: EngineConfig, section: str) -> None:
    """Raise `ConfigError` where no log can be written."""
    try:
        config.log_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.log_folder, buffering=0) as page:
            page.write(_PAGE)  # on a full disk a file can be made, and nothing written
    except OSError as error:
        where = f"{section}.log_dir = {config.log_dir!r}: no log can be written there ({error.strerror})"
        raise ConfigError(f"{where}; name a folder that this user may write to, on every node") from error


def read_tail(path: Path) -> str:
    """Return the last 1 MiB of a log, but for what libraries leak at its end. Raise OSError if there is none."""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return _LEAKS.sub("", log.read().decode(errors="replace"))


def lines_of(log: str) -> list[str]:
    """Return the lines without time, process, colour and what vLLM can do without; a progress bar is many lines."""
    return _OPTIONAL.sub("", "\n".join(line for line in map(_bare, _LINE_END.split(log)) if line.strip())).splitlines()


class Phases:
    """The phases of one start up to now."""

    def __init__(self, first: str) -> None:
        self._begun: list[Phase] = [(first, time.time())]

    def enter(self, text: str) -> None:
        """Begin a phase, or tell how far the last one has come: what follows a count or a colon is no other phase."""
        last, since = self._begun[-1]
        if _DETAIL.sub("", text) == _DETAIL.sub("", last):
            self._begun[-1] = text, since
        else:
            self._begun[-1] = _DETAIL.sub("", last), since
            self._begun.append((text, time.time()))

    def told(self) -> tuple[Phase, ...]:
        return tuple(self._begun)


def doing(log: str) -> str:
    """Return the stage at the end of `log`, such as "loading weights 3/8", or the last line if no stage is known."""
    for line in map(_bare, reversed(_LINE_END.split(log))):
        for pattern, what in _STAGES:
            if found := pattern.search(line):
                counts = found.groupdict()
                return f"{what} {counts['done']}/{counts['all']}" if counts else what
    lines = lines_of(log)  # the first is ours: the command
    return f"starting: {shortened(lines[-1])}" if len(lines) > 1 else "starting"


def shortened(line: str, length: int = _SHORT) -> str:
    line = " ".join(line.split())
    return line if len(line) <= length else line[: length - 3] + "..."


def _bare(line: str) -> str:
    while (rest := _PREFIX.sub("", line)) != line:
        line = rest
    return line.rstrip()


def forget_old_logs(folder: Path) -> None:
    """Remove all but the last 200 logs of a folder. An engine that runs writes, so its log is among the last."""
    found: list[tuple[float, Path]] = []
    for log in folder.glob("*.log"):
        with contextlib.suppress(FileNotFoundError):  # another start removes logs too
            found.append((log.stat().st_mtime, log))
    for _, log in sorted(found, reverse=True)[_LOGS_KEPT:]:
        log.unlink(missing_ok=True)
