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


def test_a_row_has_type_bounds_and_default() -> None:
    assert _row("gateway.port")[1:3] == ["integer, at least 0, at most 65,535", "`8100`"]
    assert _row("weights.relay")[1:3] == ["`auto`, `always`, `never`", "`auto`"]
    assert _row("engine.max_model_len")[1:3] == ["integer or null, above 0", "`null`"]
    assert _row("gateway.inference_keys")[1:3] == ["list of keys", "`[]`"]
