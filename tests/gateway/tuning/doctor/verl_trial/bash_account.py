"""Bash's own account of a script: the words that each program gets, by an ordinary bash whose programs are stubs.

    python -m tests.gateway.tuning.doctor.verl_trial.bash_account CHECKOUTS > bash_readings.jsonl

reads each example of each release of verl in CHECKOUTS (such as CHECKOUTS/v0.7.0) both ways and prints the facts in
bash_readings.jsonl: the script's digest, the overrides that bash gives the trainer, and whether the doctor read these.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.errors import ConfigError
from gateway.tuning.doctor.files.hydra_override import parsed_override
from gateway.tuning.doctor.files.verl import read_verl

_BOUND_S = 20
_REAL = ("basename", "dirname")
_ROOTS = ("data.", "actor_rollout_ref.", "critic.", "algorithm.", "trainer.", "model.", "optim.", "rollout.")
# A stub: its name and words go to a file of its own, as programs in the background write at the same time; its name
# stands for its output.
_STUB = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" > "$STUB_LOG/$EPOCHREALTIME-$$"
[ -p /dev/stdout ] && printf '$(%s)\\n' "${0##*/}"
exit 0
"""
# Folders, files, limits and commands of another machine are not here, and a script that ends with the first failure
# would end there.
_PRELUDE = """
cd() { builtin cd "$@" 2>/dev/null || return 0; }
source() { [ ! -r "$1" ] || builtin source "$@"; }
ulimit() { :; }
command_not_found_handle() { :; }
"""
_MOST_VARIABLES = 20
_UNSET = re.compile(r"line \d+: (\w+): unbound variable")
_ARGUMENTS = tuple(f"${number}" for number in range(1, 10))


def commands_of(script: Path, arguments: Sequence[str] = ()) -> list[list[str]]:
    """Return the words of each program that the script starts, in order. Variables that its machine has are empty."""
    variables: dict[str, str] = {}
    for _ in range(_MOST_VARIABLES):
        commands, errors = _run(script, arguments, variables)
        unset = _UNSET.search(errors)
        if unset is None:
            break
        variables[unset[1]] = ""
    return commands


def _run(script: Path, arguments: Sequence[str], variables: Mapping[str, str]) -> tuple[list[list[str]], str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs, log = folder / "programs", folder / "log"
        _stub(programs, script.read_text(encoding="utf-8", errors="replace"))
        (folder / "prelude").write_text(_PRELUDE, encoding="utf-8")
        log.mkdir()
        environ = {
            "PATH": str(programs),
            "HOME": "$HOME",
            "LC_ALL": "C.UTF-8",
            "STUB_LOG": str(log),
            "BASH_ENV": str(folder / "prelude"),
            **variables,
        }
        bash = subprocess.Popen(
            ["/bin/bash", script, *arguments],
            cwd=script.parent,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        errors = b""
        with contextlib.suppress(subprocess.TimeoutExpired):  # what was started until then counts
            errors = bash.communicate(timeout=_BOUND_S)[1]
        with contextlib.suppress(ProcessLookupError):  # what a script left in the background
            os.killpg(bash.pid, signal.SIGKILL)
        bash.communicate()
        found = [path.read_bytes().decode("utf-8", errors="replace").split("\0")[:-1] for path in sorted(log.iterdir())]
        return found, errors.decode("utf-8", errors="replace")


def _stub(programs: Path, text: str) -> None:
    """Make a stub of every word that could be a program."""
    programs.mkdir()
    stub = programs / ".stub"
    stub.write_text(_STUB, encoding="utf-8")
    stub.chmod(0o755)
    for word in set(re.findall(r"[A-Za-z][\w.+-]*", text)):
        path = programs / word
        if word in _REAL:
            path.symlink_to(f"/usr/bin/{word}")
        else:
            path.symlink_to(stub)


def overrides_by_bash(script: Path) -> list[tuple[str, Any]] | None:
    """Return the overrides of the first trainer that bash starts, with values as Hydra reads them; None for no
    trainer. Where a script wants arguments they stand for themselves."""
    for arguments in ((), _ARGUMENTS):
        for words in commands_of(script, arguments):
            found = [override for word in words if (override := parsed_override(word))]
            is_of_verl = any(override.key.startswith(_ROOTS) for override in found)
            if _module(words).startswith("verl.trainer.") or (_module(words) and is_of_verl):
                return [(override.plus + override.key, override.value) for override in found]
    return None


def _module(words: Sequence[str]) -> str:
    for index, word in enumerate(words[:-1]):
        if word == "-m":
            return words[index + 1]
    return next((word for word in words if word.endswith(".py") and "=" not in word), "")


def reading(script: Path, expected: list[tuple[str, Any]] | None, release: str) -> str:
    """Return right, listed (what could not be read is named by the doctor), wrong, or refused."""
    try:
        file = read_verl(script, release)
    except ConfigError:
        return "right" if expected is None else "refused"
    if expected is None:
        return "wrong"
    found = [
        (override.plus + override.key, override.setting.value) for override in file.overrides if not override.is_lost
    ]
    wanted = [(key, value) for key, value in expected if not key.lstrip("+~").startswith("hydra.")]
    if found == wanted:
        return "right"
    if [key for key, _ in found] != [key for key, _ in wanted]:
        return "wrong"
    differing = [key for (key, value), (_, own) in zip(wanted, found, strict=True) if value != own]
    return "listed" if all(any(f"{key.lstrip('+')}=" in line for line in file.unread) for key in differing) else "wrong"


def facts(checkouts: Path) -> Iterator[dict[str, Any]]:
    for folder in sorted(path for path in checkouts.iterdir() if path.is_dir()):
        release = folder.name.removeprefix("v")
        with tempfile.TemporaryDirectory() as copy:
            # Scripts write files beside themselves.
            shutil.copytree(folder, Path(copy) / "verl", symlinks=True)
            for script in sorted((Path(copy) / "verl").rglob("*.sh")):
                expected = overrides_by_bash(script)
                yield {
                    "release": release,
                    "script": str(script.relative_to(Path(copy) / "verl")),
                    "sha256": hashlib.sha256(script.read_bytes()).hexdigest()[:16],
                    "overrides": None if expected is None else len(expected),
                    "reading": reading(script, expected, known_release(release)),
                }


def known_release(release: str) -> str:
    """The release whose key tables judge a checkout."""
    tables = Path(__file__).parents[5] / "gateway" / "tuning" / "doctor" / "known"
    return release if (tables / f"verl-{release}.json").is_file() else ""


if __name__ == "__main__":
    for row in facts(Path(sys.argv[1])):
        print(json.dumps(row), flush=True)
