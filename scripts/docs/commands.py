"""Compares commands and keys in the documentation with the parsers, modules, targets and keys that exist.

Commands are those of README.md, SECURITY.md and docs/, of the docstrings of modules, and of the first comments of
scripts and configurations.
"""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

from pydantic import BaseModel

from gateway.config.schema import Config
from scripts.docs.pages import ROOT, Page, Place, doc_paths, heads, read_page
from scripts.docs.parsers import Refusal, check_verb, parse_module, parse_verb

_STARTS = ("python", "rollout-gateway", "make", "locust", "pytest")
_ASSIGNMENT = re.compile(r"^[A-Z_]+=")
_OPTIONAL = re.compile(r"^\[|\]$")
"""Brackets around words that may be left out."""
_EXAMPLES = {"N": "1", "{pid}": "1", "GATEWAY_PID": "1", "X.Y.Z": "0.9.1"}
"""Numbers for placeholders that stand where a parser wants one."""
_KEY = re.compile(r"^(?:--)?((?:gateway|engine|engines|fleet|weights|serve)(?:\.(?!py\b)\w+)+)(?:=.*)?$")
_VERB = re.compile(r"[a-z][a-z-]*")


@dataclass(frozen=True, slots=True)
class Command:
    """A command of ours in a page."""

    place: Place
    words: tuple[str, ...]
    is_whole: bool = True
    """False for a name in the middle of a sentence, such as `rollout-gateway fetch`, whose arguments are left out."""

    def __str__(self) -> str:
        return f"{self.place}: {shlex.join(self.words)}"


def wrong_commands(root: Path = ROOT) -> Iterator[str]:
    """A line for each command, and each key in backticks, that names something which does not exist."""
    for command in commands(root):
        for reason in _wrong(command, root):
            yield f"{command.place}: {reason}"
    for path in doc_paths(root):
        for place, code in read_page(path, root).inline_code:
            if (key := _KEY.match(code)) and not (_is_key(key[1]) or _is_module(key[1], root)):
                yield f"{place}: no key {key[1]}"


def commands(root: Path = ROOT) -> Iterator[Command]:
    """The commands of ours in blocks and in backticks; a command behind `--` is one of its own."""
    for page in [*(read_page(path, root) for path in doc_paths(root)), *heads(root)]:
        for place, text, is_inline in _spans(page):
            for line in re.split(r"[;&|]{1,2} ", text):
                yield from _commands_in(place, line, is_inline=is_inline)


def _spans(page: Page) -> Iterator[tuple[Place, str, bool]]:
    yield from ((place, place.text, False) for place in page.shell)
    yield from ((place, code, True) for place, code in page.inline_code)


def _commands_in(place: Place, line: str, *, is_inline: bool) -> Iterator[Command]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # an apostrophe in a comment's place, or Python
        return
    words = [_OPTIONAL.sub("", word) for word in words]
    while words and _ASSIGNMENT.match(words[0]):
        words = words[1:]
    for part in _split(words, "--"):
        named = [_EXAMPLES.get(word, word) for word in part if word != "..."]
        is_whole = not is_inline or any(word.startswith("-") for word in named)
        if named and (_is_script(named[0]) or Path(named[0]).name in _STARTS):
            start = named[0] if _is_script(named[0]) else Path(named[0]).name
            yield Command(place, (start, *named[1:]), is_whole)


def _is_script(word: str) -> bool:
    return word.startswith("examples/") and word.endswith(".sh")


def _split(words: Sequence[str], mark: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == mark:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _wrong(command: Command, root: Path) -> Iterator[str]:
    start, *rest = command.words
    if start == "make":
        yield from _wrong_make(rest, root)
    elif start == "rollout-gateway":
        yield from _wrong_verb(rest, is_whole=command.is_whole)
    elif start == "locust":
        yield from _wrong_locust(rest, root)
    elif start == "python" and rest[:1] == ["-m"] and rest[1:]:
        yield from _wrong_module(rest[1], rest[2:], root, is_whole=command.is_whole)
    elif _is_script(start) and not (root / start).is_file():
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


def _wrong_verb(words: Sequence[str], *, is_whole: bool) -> Iterator[str]:
    verbs = list(takewhile(_VERB.fullmatch, words))
    try:
        check_verb(verbs)
        rest = parse_verb(words) if is_whole else []
    except Refusal as refusal:
        yield f"{shlex.join(['rollout-gateway', *words])}: {refusal}"
        return
    yield from _wrong_options(rest, set(), " ".join(verbs))


def _wrong_locust(words: Sequence[str], root: Path) -> Iterator[str]:
    known = _strings(root / "loadtests", "**/*.py") | _locust_strings()
    yield from _wrong_options(words, known, "locust")
    yield from (f"no scenario {word}" for word in words if word.endswith(".py") and not (root / word).is_file())


_PACKAGES = ("engines", "examples", "gateway", "loadtests", "scripts", "sim", "trainer_client", "tuning")


def _wrong_module(name: str, words: Sequence[str], root: Path, *, is_whole: bool) -> Iterator[str]:
    if name.partition(".")[0] not in _PACKAGES:
        return
    folder = root.joinpath(*name.split("."))
    path = next((path for path in (folder.with_suffix(".py"), folder / "__main__.py") if path.is_file()), None)
    if path is None:
        yield f"no module {name}"
        return
    try:
        if is_whole:
            parse_module(path, words)
    except Refusal as refusal:
        yield f"{name}: {refusal}"
    yield from _wrong_keys(words)


def _wrong_options(words: Sequence[str], known: set[str], name: str) -> Iterator[str]:
    for word in words:
        option = word.partition("=")[0]
        if not _KEY.match(word) and re.fullmatch(r"--?[A-Za-z][\w-]*", option) and option not in known:
            yield f"{name} has no option {option}"
    yield from _wrong_keys(words)


def _wrong_keys(words: Sequence[str]) -> Iterator[str]:
    yield from (f"no key {key[1]}" for word in words if (key := _KEY.match(word)) and not _is_key(key[1]))


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
