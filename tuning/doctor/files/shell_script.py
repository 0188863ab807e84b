"""The commands of a shell script, with their words as bash expands them.

A restricted bash (`bash -r`) that finds no program, may write no file and leave no folder, traces each command that it
would start (`set -x`), and starts none.
"""

import contextlib
import os
import re
import resource
import secrets
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.errors import ConfigError

_TIMEOUT_S = 5.0
_FILE_BYTES = 1 << 24  # of a trace
_INSTEAD = "give the YAML that `--cfg job` prints"
# Stands for the output of a command, `$(nproc)`, or for an argument, `$1`.
_OUTPUT = re.compile(r"\$\(.*\)|\$\d", re.DOTALL)
# Restricted bash refuses every file to write to, this one too, and the command would count as failed.
_TO_NOWHERE = re.compile(r"[&\d]?>>?[ \t]*/dev/null")
# Read by bash before the script. `kill`, `history` and `exec` reach outside of the shell, and restricted bash cannot
# enable them again. A failed command ends nothing, since each program fails here, and nor does `exit`, which scripts
# call where a path or an argument is missing. `cd` goes nowhere; a command that does not exist prints its name where
# its output would be used.
_PRELUDE = r"""
PS4='+@MARK@|$LINENO|'
basename() { local name=${1%/}; name=${name##*/}; printf '%s\n' "${name%"$2"}"; }
dirname() { case $1 in */*) printf '%s\n' "${1%/*}";; *) printf '.\n';; esac; }
cd() { return 0; }
exit() { return 0; }
command_not_found_handle() { [[ $BASH_SUBSHELL -gt 0 ]] && printf '$(%s)' "$1"; return 0; }
enable -n kill history exec enable
set -T
trap 'set +eu -x' DEBUG
"""
_OWN_COMMANDS = (["set", "+eu", "-x"], ["set", "-T"], ["trap", "set +eu -x", "DEBUG"])
# Programs that start the program behind their own options.
_STARTERS = ("nohup", "env", "srun", "time", "nice")
_OPTION = re.compile(r"-.*|\w+=.*|\d+", re.DOTALL)
_GPUS = re.compile(r"CUDA_VISIBLE_DEVICES=([\d,]+)")
_QUOTED = re.compile(r"\\.|'[^']*'|\$'((?:\\.|[^'\\])*)'", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    """The words of one command, and its line. `gpus` are those of CUDA_VISIBLE_DEVICES; empty where it is not set."""

    words: tuple[str, ...]
    line: int
    gpus: frozenset[str] = frozenset()


def read_script(path: Path, *arguments: str) -> list[Command]:
    """Return the commands that the script would start with these arguments, in order.

    Raises `ConfigError` where there is no bash, or the script opens network connections.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    if re.search(r"/dev/(tcp|udp)/", text):
        raise ConfigError(f"{path}: it opens network connections (/dev/tcp); {_INSTEAD}")
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as folder:
        prelude, script, trace = (Path(folder) / name for name in ("prelude", path.name, "trace"))
        prelude.write_text(_PRELUDE.replace("@MARK@", mark), encoding="utf-8")
        script.write_text(_TO_NOWHERE.sub("", text.replace("\r\n", "\n")), encoding="utf-8")
        with trace.open("wb") as sink:
            _run_bash(script, arguments, prelude, sink.fileno(), path.parent)
        # The script sees itself in the folder that it was read from.
        traced = trace.read_text(encoding="utf-8", errors="replace").replace(folder, str(path.parent))
    return list(_commands(traced, mark))


def is_known(value: object) -> bool:
    """False for a value with the output of a command or an argument, which only a run has."""
    return not isinstance(value, str) or not _OUTPUT.search(value)


def _run_bash(script: Path, arguments: Sequence[str], prelude: Path, trace: int, folder: Path) -> None:
    """Run bash. After a time limit the shell and all its children are killed: the script is read up to there."""
    environ = {"PATH": "/nonexistent", "HOME": "$HOME", "LC_ALL": "C.UTF-8", "BASH_ENV": str(prelude)}
    try:
        bash = subprocess.Popen(
            ["/bin/bash", "-r", script, *arguments],
            env=environ | {"BASH_XTRACEFD": str(trace)},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(trace,),
            start_new_session=True,
            preexec_fn=_limit,
        )
    except OSError as error:
        raise ConfigError(f"{script.name}: /bin/bash cannot be started: {error.strerror}; {_INSTEAD}") from error
    with contextlib.suppress(subprocess.TimeoutExpired):
        bash.communicate(timeout=_TIMEOUT_S)  # until all that it started in the background have ended
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(bash.pid, signal.SIGKILL)
    bash.communicate()


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(_TIMEOUT_S) + 1, int(_TIMEOUT_S) + 1))


def _commands(trace: str, mark: str) -> Iterator[Command]:
    exported = before = ""
    line_before = 0
    for record in re.split(rf"^\++{mark}\|", trace, flags=re.MULTILINE)[1:]:
        number, _, text = record.partition("|")
        words, line = split_words(text), int(number)
        if not words or words in _OWN_COMMANDS:
            continue
        named = next((found[1] for word in words if (found := _GPUS.fullmatch(word))), "")
        if named and words[0] == "export":
            exported = named
        elif named and len(words) == 1:  # bash prints the variables of a command before it
            before, line_before = named, line
        gpus = named or (before if line == line_before else exported)
        yield Command(_started(words), line, frozenset(filter(None, gpus.split(","))))


def _started(words: list[str]) -> tuple[str, ...]:
    """The words from the started program on."""
    while len(words) > 1 and words[0].rpartition("/")[2] in _STARTERS:
        words = words[1:]
        while len(words) > 1 and _OPTION.fullmatch(words[0]):
            words = words[1:]
    return tuple(words)


def split_words(text: str) -> list[str]:
    """Words as `set -x` quotes them; none of a line that is torn."""

    def plain(found: re.Match[str]) -> str:
        """$'...' has the escapes of C."""
        if found[1] is None:
            return found[0]
        return shlex.quote(found[1].encode().decode("unicode_escape").encode("latin-1").decode(errors="replace"))

    try:
        return shlex.split(_QUOTED.sub(plain, text))
    except ValueError:
        return []
