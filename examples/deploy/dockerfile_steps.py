"""Runs the steps of a Dockerfile without a container engine, to see that they work.

    python -m examples.deploy.dockerfile_steps --root /tmp/image --arg EXTRAS=serve

FROM becomes a virtual environment of this Python under --root; WORKDIR and COPY lead there too. Steps that change the
system (apt-get) are printed and left out. At the end the entry point is called with --version.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_CHANGES_THE_SYSTEM = ("apt-get ",)
_SAYS_NOTHING_TO_DO = ("EXPOSE", "CMD", "LABEL")
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")


def steps(text: str) -> Iterator[tuple[str, str]]:
    """Yield instruction and arguments of each step; continued lines are joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        yield instruction.upper(), rest.strip()


@dataclass
class Build:
    """A build under `root`; `context` is the folder that COPY copies from."""

    root: Path
    context: Path
    arguments: Mapping[str, str]
    environ: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)

    def run(self, text: str) -> None:
        """Run all steps. Raise `CalledProcessError` for one that fails, `ValueError` for one that is unknown."""
        for instruction, rest in steps(text):
            print(f"{instruction} {rest}", flush=True)
            if instruction in _SAYS_NOTHING_TO_DO:
                continue
            step = getattr(self, f"_{instruction.lower()}", None)
            if step is None:
                raise ValueError(f"{instruction} is not known here: add it, or leave it out of the Dockerfile")
            step(rest)

    def call_entrypoint(self, *words: str) -> None:
        command = [*self.entrypoint, *words]
        subprocess.run(command, check=True, cwd=self._here(), env=self._environment())

    def _from(self, image: str) -> None:
        if image == "scratch":
            return
        wanted = re.search(r"python:(\d+\.\d+)", image)
        found = f"{sys.version_info.major}.{sys.version_info.minor}"
        if wanted is None or wanted[1] != found:
            print(f"  in place of {image}: Python {found}")
        subprocess.run([sys.executable, "-m", "venv", self.root / "venv"], check=True)

    def _arg(self, rest: str) -> None:
        name, _, default = rest.partition("=")
        self.environ[name] = self.arguments.get(name, default)

    def _env(self, rest: str) -> None:
        for word in shlex.split(rest):
            name, _, value = word.partition("=")
            self.environ[name] = self._filled(value)

    def _workdir(self, rest: str) -> None:
        self.workdir = rest
        self._here().mkdir(parents=True, exist_ok=True)

    def _copy(self, rest: str) -> None:
        *sources, target = shlex.split(rest)
        for source in sources:
            found, place = self.context / source, self._here() / target
            if found.is_dir():
                shutil.copytree(found, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(found, place / found.name if place.is_dir() else place)

    def _run(self, rest: str) -> None:
        if rest.startswith(_CHANGES_THE_SYSTEM):
            print("  left out: it changes the system")
            return
        subprocess.run(["/bin/sh", "-c", rest], check=True, cwd=self._here(), env=self._environment())

    def _entrypoint(self, rest: str) -> None:
        self.entrypoint = json.loads(rest)

    def _here(self) -> Path:
        return self.root / self.workdir.lstrip("/")

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return kept | self.environ | {"PATH": f"{self.root / 'venv' / 'bin'}:{os.environ['PATH']}"}

    def _filled(self, text: str) -> str:
        return _VARIABLE.sub(lambda found: self.environ.get(found[1] or found[2], ""), text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parent
    parser.add_argument("--file", type=Path, default=here / "Dockerfile")
    parser.add_argument("--context", type=Path, default=here.parents[1])
    parser.add_argument("--root", type=Path, required=True, help="folder in which the image is made")
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="a build argument")
    args = parser.parse_args()
    arguments = dict(word.split("=", 1) for word in args.arg)
    build = Build(root=args.root.resolve(), context=args.context.resolve(), arguments=arguments)
    build.run(args.file.read_text(encoding="utf-8"))
    build.call_entrypoint("--version")


if __name__ == "__main__":
    main()
