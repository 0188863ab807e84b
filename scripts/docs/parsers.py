"""The real parsers of our commands, asked about a command line. Nothing behind a parser runs."""

import argparse
import runpy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import NoReturn
from unittest import mock

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from gateway.cli.main import app


class Refusal(Exception):
    """A parser's own words about a command line that it does not take."""


class _Made(Exception):
    """Carries a module's parser out of it, with the name of the method that the module parses with."""

    def __init__(self, parser: argparse.ArgumentParser, method: str) -> None:
        super().__init__()
        self.parser = parser
        self.method = method


def parse_verb(words: Sequence[str]) -> list[str]:
    """Return the words that `rollout-gateway` leaves to the verb. Raises `Refusal`."""
    with (
        mock.patch.object(TyperCommand, "invoke", lambda command, context: list(context.args)),
        redirect_stdout(StringIO()),  # --version and --help print
    ):
        try:
            return app(list(words), standalone_mode=False) or []
        except TyperException as error:
            raise Refusal(getattr(error, "format_message", error.__str__)()) from error


def check_verb(verbs: Sequence[str]) -> None:
    """Raise `Refusal` unless `rollout-gateway` has the verb, such as `config show`."""
    command = typer.main.get_command(app)
    for verb in verbs:
        if isinstance(command, TyperGroup):
            if verb not in command.commands:
                raise Refusal(f"No such command '{verb}'.")
            command = command.commands[verb]


def parse_module(path: Path, words: Sequence[str]) -> None:
    """Parse as `python -m` of the module at `path` would. Raises `Refusal`. A module without a parser takes all."""
    if made := _parser(path):
        getattr(made.parser, made.method)(list(words))


@cache
def _parser(path: Path) -> _Made | None:
    """The parser that the module makes when it is run; the run ends where it would parse."""
    if "ArgumentParser(" not in path.read_text(encoding="utf-8"):
        return None
    with _ends_at_the_parser():
        try:
            runpy.run_path(str(path), run_name="__main__")
        except _Made as made:
            made.parser.error = _refuse  # type: ignore[method-assign]  # it would print and exit
            return made
    raise ValueError(f"{path} makes a parser and does not parse with it")


def _refuse(message: str) -> NoReturn:
    raise Refusal(message)


@contextmanager
def _ends_at_the_parser() -> Iterator[None]:
    with ExitStack() as patches:
        for method in ("parse_args", "parse_known_args", "parse_intermixed_args"):
            patches.enter_context(mock.patch.object(argparse.ArgumentParser, method, _carry_out(method)))
        yield


def _carry_out(method: str) -> Callable[..., NoReturn]:
    def parse(parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        raise _Made(parser, method)

    return parse
