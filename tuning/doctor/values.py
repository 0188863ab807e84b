"""The values of one file by dotted key, over the defaults of the software that reads it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gateway.config.load import Setting

_SELECT = re.compile(r"\$\{oc\.select:\s*([\w.]+)\s*(?:,\s*(.*))?\}", re.DOTALL)
_REFERENCE = re.compile(r"\$\{\s*([\w.]+)\s*\}")
_WHOLE = re.compile(r"[+-]?(0|[1-9]\d*)")
_FLOAT = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?|[+-]?(inf|nan)")
_WORDS = {"true": True, "false": False, "null": None}
_MOST_HOPS = 8
_MOST = 1e18  # no setting is larger


class Values:
    """Given settings over defaults. Interpolations of OmegaConf are followed; a value of another key has that key's
    origin and place. `prefix` is left out of the keys that are shown."""

    def __init__(self, given: Mapping[str, Setting], defaults: Mapping[str, Any], prefix: str = "") -> None:
        self._given = given
        self._defaults = defaults
        self._prefix = prefix

    def __iter__(self) -> Iterator[Setting]:
        """The settings of the file, in its order."""
        return iter(self._given.values())

    def shown(self, key: str) -> str:
        return key.removeprefix(self._prefix)

    def at(self, key: str) -> Setting:
        """Return the value at `key` with its origin; its value is None for an unknown key."""
        return self._at(key, _MOST_HOPS)

    def number(self, key: str) -> float | None:
        return as_number(self.at(key).value)

    def whole(self, key: str) -> int | None:
        number = self.number(key)
        return None if number is None else int(number)

    def is_true(self, key: str) -> bool:
        return self.at(key).value is True

    def text(self, key: str) -> str:
        value = self.at(key).value
        return value if isinstance(value, str) else ""

    def _at(self, key: str, hops: int) -> Setting:
        found = self._given.get(key) or Setting(
            key=self.shown(key), value=self._defaults.get(key), origin="default", place=""
        )
        if not isinstance(found.value, str) or "${" not in found.value or not hops:
            return found
        if select := _SELECT.fullmatch(found.value):
            target = _absolute(select[1], key)
            if target in self._given or target in self._defaults:
                return replace(self._at(target, hops - 1), key=self.shown(key))
            rest = select[2] or "null"
            if "${" not in rest:
                return replace(found, value=hydra_value(rest))
            without = Values({**self._given, key: replace(found, value=rest)}, self._defaults, self._prefix)
            return without._at(key, hops - 1)
        if reference := _REFERENCE.fullmatch(found.value):
            return replace(self._at(_absolute(reference[1], key), hops - 1), key=self.shown(key))
        return found


def hydra_value(text: str) -> Any:
    """Return the value of an override: a word, a number or a flat list. Anything else stays text."""
    text = text.strip()
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1]
    if text[:1] == "[" and text[-1:] == "]" and not set(text[1:-1]) & set("[]{}"):
        return [hydra_value(part) for part in text[1:-1].split(",") if part.strip()]
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def as_number(value: Any) -> float | None:
    """Return a value as a finite number; None for anything else, such as an unknown shell variable."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not -_MOST < value < _MOST:
        return None
    return float(value)


def _absolute(target: str, key: str) -> str:
    """OmegaConf's relative keys begin with a dot, at the section of the key that refers."""
    return f"{key.rpartition('.')[0]}{target}" if target.startswith(".") else target
