"""The tables of keys in docs/configuration.md, made from the configuration's schema."""

import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from gateway.config.schema import Config

BEGIN, END = "<!-- keys: made by python -m scripts.docs -->\n", "<!-- end of keys -->\n"
_HEAD = "| key | type | default | meaning |\n| --- | --- | --- | --- |\n"


@dataclass(frozen=True, slots=True)
class Section:
    """A table of keys: those of one class of the schema."""

    path: str
    intro: str
    model: type[BaseModel]


def keys_tables() -> str:
    """A heading, the class's own words and a table for each section of the schema."""
    return "\n" + "\n".join(_section(section) for section in sections())


def sections() -> Iterator[Section]:
    """The sections in the order of the schema, each before those inside it."""
    yield Section("", _words(Config.__doc__), Config)
    yield from _below("", Config)


def _below(path: str, model: type[BaseModel]) -> Iterator[Section]:
    for name, field in model.model_fields.items():
        if inner := _model(field):
            below = f"{path}{name}"
            yield Section(below, _words(inner.__doc__), inner)
            yield from _below(f"{below}.", inner)


def _section(section: Section) -> str:
    head = f"### `{section.path}`" if section.path else "### Top level"
    rows = "".join(_row(section.path, name, field) for name, field in section.model.model_fields.items())
    return f"{head}\n\n{section.intro}\n\n{_HEAD}{rows}"


def _row(path: str, name: str, field: FieldInfo) -> str:
    key = f"{path}.{name}" if path else name
    if inner := _model(field):
        return f"| `{key}` | section | | [below](#{key.replace('.', '')}): {_words(inner.__doc__)} |\n"
    cells = [f"`{key}`", _type(field), _default(field), _words(field.description)]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _model(field: FieldInfo) -> type[BaseModel] | None:
    found = field.annotation
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def _type(field: FieldInfo) -> str:
    limits = [text for piece in field.metadata if (text := _limit(piece))]
    return ", ".join([_type_words(field.annotation), *limits])


def _type_words(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_type_words(one) for one in inner)
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in inner)
    if origin is Annotated:
        return _type_words(inner[0])
    if origin is list:
        return f"list of {_type_words(inner[0])}s"
    if origin is dict:
        return "map"
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return ", ".join(f"`{one.value}`" for one in annotation)
    if annotation is SecretStr:
        return "key"
    simple = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any"}
    return simple.get(annotation, "network")


def _limit(piece: Any) -> str:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    return ", ".join(f"{word} {getattr(piece, sign):,}" for sign, word in words.items() if hasattr(piece, sign))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, list):
        value = [str(one) for one in value]
    if isinstance(value, enum.Enum):
        value = value.value
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value)}`"


def _words(text: str | None) -> str:
    """A docstring as one line."""
    return " ".join((text or "").split())
