"""docs/configuration.md has every key of the schema, with type, default and meaning."""

import re
from collections.abc import Iterator

from pydantic import BaseModel

from gateway.config.schema import Config
from scripts.docs.parts.configuration_page import keys_tables


def _keys(model: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{path}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{path}{name}.")


def _row(key: str) -> list[str]:
    (row,) = [line for line in keys_tables().splitlines() if line.startswith(f"| `{key}` |")]
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def test_every_key_has_a_row_with_a_meaning() -> None:
    for key in _keys(Config):
        assert _row(key)[3], f"{key} has no docstring in the schema"
