"""Facts of TRL's examples: the fields of their GRPOConfig, and the commands in their docstrings, without their text.

    .venv/bin/python -m tests.tuning.doctor.trl_trial.trl_facts FOLDER

FOLDER holds a checkout of each release, such as FOLDER/v1.9.0. It writes trl_facts.json, from which `written` makes
programs and scripts that the doctor reads as it reads TRL's own. A field that only a run has is `null` in `fields`.
"""

import ast
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from engines.errors import ConfigError
from tuning.doctor.files.trl import read_trl
from tuning.doctor.files.trl_call import calls_of, names_config, parsed, read_assignments, read_call

FILE = Path(__file__).parent / "trl_facts.json"
RELEASES = ("0.24.0", "1.0.0", "1.9.0", "July 2026")
_FOLDERS = {"July 2026": "main"}
_COMMAND = re.compile(
    r"\s*((?:[A-Z_]+=\S+ )*(?:accelerate launch|trl vllm-serve|trl grpo|torchrun|python3? \S+\.py).*)"
)
_CALL, _PARSER, _OTHER = "call", "parser", "other"


def facts(checkouts: Path) -> dict[str, Any]:
    """Return for each release its programs, commands, configurations and the processes of accelerate's files."""
    return {release: _facts_of(checkouts / _FOLDERS.get(release, f"v{release}")) for release in RELEASES}


def _facts_of(folder: Path) -> dict[str, Any]:
    programs, commands, configs, processes = {}, [], {}, {}
    for path in sorted((folder / "examples").rglob("*.py")):
        name, tree = str(path.relative_to(folder)), parsed(path)
        programs[name] = _program(path, tree)
        lines = (ast.get_docstring(tree) or "").replace("\\\n", " ").splitlines()
        found = [_COMMAND.fullmatch(line) for line in lines]
        words = [shlex.split(line[1]) for line in found if line]
        # A call has the same fields whatever its command.
        commands += [[name, *given] for given in words if programs[name]["is"] != _CALL or "vllm-serve" in given]
    for path in sorted((folder / "examples").rglob("*.yaml")):
        name, tree = str(path.relative_to(folder)), yaml.safe_load(path.read_text(encoding="utf-8"))
        if "num_processes" in tree:
            processes[name] = tree["num_processes"]
        elif _is_read(path):
            configs[name] = tree
    used = {word for _, *words in commands for word in words}
    programs = {name: fact for name, fact in programs.items() if fact["is"] == _CALL or name in used}
    return {"programs": programs, "commands": commands, "configs": configs, "processes": processes}


def _program(path: Path, tree: ast.Module) -> dict[str, Any]:
    if not names_config(tree):
        return {"is": _OTHER}
    is_call = len(calls_of(tree)) == 1
    found = read_call(path, tree) if is_call else read_assignments(path, tree)
    hidden = {name for name in found.fields if any(f": {name}=" in text for text in found.unread)}
    values = {name: [] if name in hidden else [setting.value] for name, setting in found.fields.items()}
    return {"is": _CALL if is_call else _PARSER, "fields": values}


def _is_read(path: Path) -> bool:
    try:
        return bool(read_trl(path))
    except ConfigError:
        return False


def written(folder: Path, release: str) -> Iterator[tuple[str, Path]]:
    """Write the files of a release into `folder`, and yield those that a user would give to the doctor."""
    kept = json.loads(FILE.read_text(encoding="utf-8"))[release]
    for name, number in kept["processes"].items():
        _write(folder / name, f"num_processes: {number}\n")
    for name, tree in kept["configs"].items():
        yield name, _write(folder / name, yaml.safe_dump(tree))
    for name, fact in kept["programs"].items():
        path = _write(folder / name, _text(fact))
        if fact["is"] == _CALL:
            yield name, path
    for number, (name, *words) in enumerate(kept["commands"]):
        yield f"{name}, command {number}", _write(folder / f"{number}.sh", f"{shlex.join(words)}\n")


def _text(fact: dict[str, Any]) -> str:
    if fact["is"] == _OTHER:
        return "train()\n"
    values = {name: repr(known[0]) if known else f"run.{name}" for name, known in fact["fields"].items()}
    if fact["is"] == _CALL:
        return "GRPOConfig(\n" + "".join(f"    {name}={value},\n" for name, value in values.items()) + ")\n"
    assigned = "".join(f"args.{name} = {value}\n" for name, value in values.items())
    return f"args = TrlParser(GRPOConfig).parse_args_and_config()\n{assigned}"


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def dumped(kept: dict[str, Any]) -> str:
    """Return the facts as JSON with a line for each program and command."""
    releases = []
    for release, parts in kept.items():
        lines = [
            f"{json.dumps(part)}: {{\n"
            + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in rows.items())
            + "\n}"
            if isinstance(rows, dict)
            else f"{json.dumps(part)}: [\n" + ",\n".join(map(json.dumps, rows)) + "\n]"
            for part, rows in parts.items()
        ]
        releases.append(f"{json.dumps(release)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(releases) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(dumped(facts(Path(sys.argv[1]))), encoding="utf-8")
