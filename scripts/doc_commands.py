"""Compares commands and keys in README.md and docs/ with the modules, options, targets and keys that exist."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import typer
from pydantic import BaseModel
from typer.core import TyperGroup

from engines.levers import LEVERS
from gateway.cli.main import app
from gateway.cli.vllm_serve import FLAGS
from gateway.config.schema import Config
from scripts.doc_pages import ROOT, Place, doc_paths, read_page
from scripts.rooms_picture import imported_modules

_STARTS = ("python", "rollout-gateway", "make", "locust", "pytest")
_ASSIGNMENT = re.compile(r"^[A-Z_]+=")
_KEY = re.compile(r"^(?:--)?((?:gateway|engine|engines|fleet|weights|serve)(?:\.\w+)+)(?:=.*)?$")
_VLLM_SERVE_OWN = {"replicas", "gpus", "name", "config", "timeout_s", "detach"}


@dataclass(frozen=True, slots=True)
class Command:
    """A command of ours in a page."""

    place: Place
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}: {shlex.join(self.words)}"


def wrong_commands(root: Path = ROOT) -> Iterator[str]:
    """A line for each command, and each key in backticks, that names something which does not exist."""
    for command in commands(root):
        for reason in _wrong(command.words, root):
            yield f"{command.place}: {reason}"
    for path in doc_paths(root):
        for place, code in read_page(path, root).inline_code:
            if (key := _KEY.match(code)) and not (_is_key(key[1]) or _is_module(key[1], root)):
                yield f"{place}: no key {key[1]}"


def commands(root: Path = ROOT) -> Iterator[Command]:
    """The commands of ours in blocks and in backticks; a command behind `--` is one of its own."""
    for path in doc_paths(root):
        page = read_page(path, root)
        spans = [(place, place.text) for place in page.shell] + page.inline_code
        for place, text in spans:
            for line in re.split(r"[;&|]{1,2} ", text):
                yield from _commands_in(place, line)


def _commands_in(place: Place, line: str) -> Iterator[Command]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # an apostrophe in a comment's place, or Python
        return
    while words and _ASSIGNMENT.match(words[0]):
        words = words[1:]
    parts = _split(words, "--")
    for part in parts:
        if part and part[0].startswith("examples/") and part[0].endswith(".sh"):
            yield Command(place, tuple(part))
        elif part and Path(part[0]).name in _STARTS:
            yield Command(place, (Path(part[0]).name, *part[1:]))


def _split(words: Sequence[str], mark: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == mark:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _wrong(words: Sequence[str], root: Path) -> Iterator[str]:
    start, *rest = words
    if start == "make":
        yield from _wrong_make(rest, root)
    elif start == "rollout-gateway":
        yield from _wrong_verb(rest)
    elif start == "locust":
        yield from _wrong_locust(rest, root)
    elif start == "python" and rest[:1] == ["-m"] and rest[1:]:
        yield from _wrong_module(rest[1], rest[2:], root)
    elif start.startswith("examples/") and not (root / start).is_file():
        yield f"no file {start}"


def _wrong_make(words: Sequence[str], root: Path) -> Iterator[str]:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    environment = _strings(root / "loadtests", "**/*.py")
    for word in words:
        name, is_variable, _ = word.partition("=")
        if is_variable and f"$({name})" not in makefile and name not in environment:
            yield f"make knows no {name}"
        elif not is_variable and re.fullmatch(r"[a-z-]+", word) and not re.search(rf"^{word}:", makefile, re.MULTILINE):
            yield f"make has no target {word}"


def _wrong_verb(words: Sequence[str]) -> Iterator[str]:
    command, verb = typer.main.get_command(app), ""
    while words and isinstance(command, TyperGroup):
        verb, words = words[0], words[1:]
        if verb not in command.commands:
            yield f"rollout-gateway has no {verb}"
            return
        command = command.commands[verb]
    known = {option for parameter in command.params for option in parameter.opts}
    if verb == "vllm-serve":
        names = {flag.name for flag in FLAGS} | {lever.name for lever in LEVERS} | _VLLM_SERVE_OWN
        known |= {f"--{spelled}" for name in names for spelled in (name, name.replace("_", "-"))}
    yield from _wrong_options(words, known, f"rollout-gateway {verb}")


def _wrong_locust(words: Sequence[str], root: Path) -> Iterator[str]:
    known = _strings(root / "loadtests", "**/*.py") | _locust_strings()
    yield from _wrong_options(words, known, "locust")
    yield from (f"no scenario {word}" for word in words if word.endswith(".py") and not (root / word).is_file())


def _wrong_module(name: str, words: Sequence[str], root: Path) -> Iterator[str]:
    if name.partition(".")[0] not in ("loadtests", "examples", "scripts", "gateway", "engines", "trainer_client"):
        return
    path = root.joinpath(*name.split(".")).with_suffix(".py")
    if not path.is_file():
        yield f"no module {name}"
        return
    yield from _wrong_options(words, _module_strings(path, root), name)


def _wrong_options(words: Sequence[str], known: set[str], name: str) -> Iterator[str]:
    for word in words:
        option = word.partition("=")[0]
        if key := _KEY.match(word):
            if not _is_key(key[1]):
                yield f"no key {key[1]}"
        elif re.fullmatch(r"--?[A-Za-z][\w-]*", option) and option not in known:
            yield f"{name} has no option {option}"


def _is_key(path: str) -> bool:
    """True for a key of the schema; below `extra`, `env` and other maps every name is one."""
    model: type[BaseModel] = Config
    for name in path.split("."):
        if model is Config and name == "engines":
            return True
        field = model.model_fields.get(name)
        if field is None:
            return False
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return True
        model = field.annotation
    return True


def _is_module(name: str, root: Path) -> bool:
    path = root.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


@cache
def _module_strings(path: Path, root: Path) -> set[str]:
    """The texts in a module and in the modules of ours that it imports directly."""
    return set().union(*(_strings_in(one) for one in (path, *imported_modules(path, root))))


@cache
def _strings(folder: Path, pattern: str) -> set[str]:
    return set().union(*(_strings_in(path) for path in folder.glob(pattern)))


@cache
def _locust_strings() -> set[str]:
    """The texts of Locust's parser, read and not imported: an import of Locust patches the interpreter."""
    found = importlib.util.find_spec("locust")
    folders = (found.submodule_search_locations or []) if found else []
    return set().union(*(_strings(Path(folder), "argument_parser.py") for folder in folders))


@cache
def _strings_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
