"""The commands of a shell script, with their words as bash expands them.

Bash itself expands them, since no parser knows its values: a restricted bash (`bash -r`) that finds no program, may
write no file and leave no folder, traces each command that it would start, and starts none. Bash takes what it prints
(`set -x`) from the very words that a program would be given.
"""

import contextlib
import os
import re
import resource
import secrets
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.errors import ConfigError

_TIMEOUT_S = 5.0
_FILE_BYTES = 1 << 24  # of a trace
_TRIES = 5
# Stands for the output of a command: `$(nproc)`.
_OUTPUT = re.compile(r"\$\(.*\)", re.DOTALL)
_ARGUMENTS = tuple(f"${number}" for number in range(1, 10))
# Restricted bash refuses every file to write to, this one too, and the command would count as failed.
_TO_NOWHERE = re.compile(r"[&\d]?>>?[ \t]*/dev/null")
_OPENS_CONNECTIONS = re.compile(r"/dev/(tcp|udp)/")

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
# Programs that start the program behind their own options.
_STARTERS = ("nohup", "env", "srun", "time", "nice")
_OPTION = re.compile(r"-.*|\w+=.*|\d+", re.DOTALL)
_GPUS = re.compile(r"CUDA_VISIBLE_DEVICES=([\d,]+)")
_OWN_COMMANDS = (["set", "+eu", "-x"], ["set", "-T"], ["trap", "set +eu -x", "DEBUG"])

# Complaints of bash that concern no word.
_HARMLESS = re.compile(r"restricted|not found|readonly|No such file|Permission denied|builtin|ulimit")

_QUOTED = re.compile(
    r"""\$'((?:\\.|[^'\\])*)' | '([^']*)' | "((?:\\.|[^"\\])*)" | \\(.) | ([^\s'"\\$]+|\$) | (\s+)""",
    re.DOTALL | re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Command:
    """The words of one command, and its line. `gpus` are those of CUDA_VISIBLE_DEVICES; empty where it is not set."""

    words: tuple[str, ...]
    line: int
    gpus: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Script:
    """`problems` are the places that bash could not expand, with its reason."""

    commands: tuple[Command, ...]
    problems: tuple[str, ...]


def read_script(path: Path, *, with_arguments: bool = False) -> Script:
    """The commands that the script would start, in order. `with_arguments` gives it `$1` to `$9` as arguments, which
    stand for themselves.

    Raises `ConfigError` where there is no bash, or the script opens network connections.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    if _OPENS_CONNECTIONS.search(text):
        raise ConfigError(f"{path}: it opens network connections (/dev/tcp); give the YAML that `--cfg job` prints")
    text = _TO_NOWHERE.sub("", text.replace("\r\n", "\n"))
    # Two commands of a pipeline may print at once. What is torn has the mark inside of a line.
    for _ in range(_TRIES):
        mark = secrets.token_hex(8)
        trace, errors = _traced(path, text, mark, _ARGUMENTS if with_arguments else ())
        if trace.count(mark) == len(re.findall(rf"^\++{mark}\|", trace, re.MULTILINE)):
            return Script(tuple(_commands(trace, mark)), tuple(_problems(errors)))
    raise ConfigError(f"{path}: bash printed torn lines {_TRIES} times; give the YAML that `--cfg job` prints")


def is_known(value: object) -> bool:
    """False for a value with the output of a command or an argument, which only a run has."""
    return not isinstance(value, str) or not (_OUTPUT.search(value) or value in _ARGUMENTS)


def _traced(path: Path, text: str, mark: str, arguments: Sequence[str]) -> tuple[str, str]:
    """Return the trace of bash, and its stderr."""
    with tempfile.TemporaryDirectory() as folder:
        prelude, script, trace = (Path(folder) / name for name in ("prelude", path.name, "trace"))
        prelude.write_text(_PRELUDE.replace("@MARK@", mark), encoding="utf-8")
        script.write_text(text, encoding="utf-8")
        with trace.open("wb") as sink:
            errors = _run_bash(script, arguments, prelude, sink.fileno(), path.parent)
        # The script sees itself in the folder that it was read from.
        return trace.read_text(encoding="utf-8", errors="replace").replace(folder, str(path.parent)), errors


def _run_bash(script: Path, arguments: Sequence[str], prelude: Path, trace: int, folder: Path) -> str:
    """Run bash, and return its stderr. After a time limit the shell and all its children are killed."""
    environ = {
        "PATH": "/nonexistent",
        "HOME": "$HOME",
        "LC_ALL": "C.UTF-8",
        "BASH_ENV": str(prelude),
        "BASH_XTRACEFD": str(trace),
    }
    try:
        bash = subprocess.Popen(
            [_bash(), "-r", script, *arguments],
            env=environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(trace,),
            start_new_session=True,
            preexec_fn=_limit,
        )
    except OSError as error:
        raise ConfigError(f"{script.name}: bash cannot be started: {error.strerror}") from error
    try:
        return bash.communicate(timeout=_TIMEOUT_S)[1].decode("utf-8", errors="replace")
    except subprocess.TimeoutExpired:
        return f"line 0: it did not end within {_TIMEOUT_S:g} s, and is read up to there"
    finally:
        _kill_all(bash)


def _kill_all(bash: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(bash.pid, signal.SIGKILL)
    bash.communicate()


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(_TIMEOUT_S) + 1, int(_TIMEOUT_S) + 1))


def _bash() -> str:
    for bash in ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash", "/opt/homebrew/bin/bash"):
        if os.access(bash, os.X_OK):
            return bash
    raise ConfigError("scripts are expanded by bash, and there is none; give the YAML that `--cfg job` prints")


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


def _problems(errors: str) -> Iterator[str]:
    """Yield lines of stderr about words that were not expanded. Refused programs and files are no problem."""
    for line in errors.splitlines():
        found = re.search(r"line (\d+): (.*)", line)
        if found and not _HARMLESS.search(found[2]):
            yield f"line {found[1]}: {found[2]}"


def split_words(text: str) -> list[str]:
    """Words as `set -x` quotes them."""
    words: list[str] = []
    is_open = False
    for found in _QUOTED.finditer(text):
        ansi, single, double, escaped, plain, blank = found.groups()
        if blank:
            is_open = False
            continue
        part = next(
            piece
            for piece in (
                None if ansi is None else _unescaped(ansi),
                single,
                None if double is None else re.sub(r"\\([$`\"\\])", r"\1", double),
                escaped,
                plain,
            )
            if piece is not None
        )
        if is_open:
            words[-1] += part
        else:
            words.append(part)
        is_open = True
    return words


def _unescaped(text: str) -> str:
    """The text of $'...', which has the escapes of C."""
    return text.encode().decode("unicode_escape").encode("latin-1").decode("utf-8", errors="replace")
