"""Facts of verl's example scripts: the words of their commands as bash expands them, without the scripts' text.

    .venv/bin/python -m tests.gateway.tuning.doctor.verl_trial.example_facts FOLDER

FOLDER holds a checkout of each release, such as FOLDER/v0.7.0. It writes example_facts.json, from which `written` makes
scripts that the doctor reads as it reads verl's own.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from engines.errors import ConfigError
from gateway.tuning.doctor.files.shell_script import Command, read_script

FILE = Path(__file__).parent / "example_facts.json"
RELEASES = ("0.6.1", "0.7.0")
_OVERRIDE = re.compile(r"[+~]*[a-z_]+(\.\w+)+=")
_NPU = re.compile(r"npu|ascend|hccl", re.IGNORECASE)


def facts(checkouts: Path) -> dict[str, Any]:
    """Return the words, each once; for each script its commands by the numbers of their words; configuration files."""
    words: dict[str, int] = {}
    scripts, configs = {}, {}
    for release in RELEASES:
        folder = checkouts / f"v{release}"
        for path in sorted((folder / "examples").rglob("*.sh")):
            name = f"{release}/{path.relative_to(folder)}"
            commands = [
                [words.setdefault(word.replace(f"{folder}/", ""), len(words)) for word in command.words]
                for command in _commands(path)
            ]
            text = path.read_text(encoding="utf-8")
            if commands:
                scripts[name] = {"commands": commands, "npu": bool(_NPU.search(path.name + text))}
        for path in sorted((folder / "examples").rglob("*.yaml")):
            tree = yaml.safe_load(path.read_text(encoding="utf-8"))
            if isinstance(tree, dict) and "defaults" in tree:
                configs[f"{release}/{path.relative_to(folder)}"] = tree
    return {"words": list(words), "scripts": scripts, "configs": configs}


def _commands(path: Path) -> list[Command]:
    for with_arguments in (False, True):
        try:
            found = read_script(path, with_arguments=with_arguments).commands
        except ConfigError:
            return []
        if kept := [command for command in found if any(map(_OVERRIDE.match, command.words))]:
            return kept
    return []


def written(folder: Path, release: str) -> Iterator[Path]:
    """Write the scripts of a release into `folder`, one command a line, and yield them."""
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    for name, tree in kept["configs"].items():
        _write(folder, name, json.dumps(tree))
    for name, script in kept["scripts"].items():
        if name.startswith(f"{release}/"):
            lines = [shlex.join(kept["words"][number] for number in command) for command in script["commands"]]
            yield _write(folder, name, "\n".join([*lines, "# npu" if script["npu"] else "", ""]))


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def dumped(kept: dict[str, Any]) -> str:
    """Return the facts as JSON with a line for each word and script."""
    words = ",\n".join(map(json.dumps, kept["words"]))
    scripts, configs = (
        ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in kept[part].items())
        for part in ("scripts", "configs")
    )
    return f'{{"words": [\n{words}\n],\n"scripts": {{\n{scripts}\n}},\n"configs": {{\n{configs}\n}}}}\n'


if __name__ == "__main__":
    FILE.write_text(dumped(facts(Path(sys.argv[1]))), encoding="utf-8")
