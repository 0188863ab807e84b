"""One override of Hydra's command line: `key=value`, with a plus, two or a tilde before it."""

import re
from dataclasses import dataclass
from typing import Any

_OVERRIDE = re.compile(r"(\+{1,2}|~)?([A-Za-z_][\w@/.-]*)(?:=(.*))?", re.DOTALL)
_WHOLE = re.compile(r"[+-]?(0|[1-9]\d*(_\d+)*)")
_FLOAT = re.compile(
    r"[+-]?(\d+(_\d+)*\.(\d+(_\d+)*)?|\.?\d+(_\d+)*(?=[eE])|\.\d+(_\d+)*)([eE][+-]?\d+(_\d+)*)?|[+-]?(inf|nan)"
)
_WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class HydraOverride:
    """`is_group` is True where it chooses a group of keys and sets no value, as far as its form shows."""

    plus: str
    key: str
    value: Any

    @property
    def is_group(self) -> bool:
        return "/" in self.key or "@" in self.key


def parsed_override(word: str) -> HydraOverride | None:
    """Return the override in a word; None for a word that is no override."""
    found = _OVERRIDE.fullmatch(word)
    if found is None or (found[3] is None and found[1] != "~"):
        return None
    text = (found[3] or "").strip()
    return HydraOverride(found[1] or "", found[2], hydra_value(text))


def hydra_value(text: str) -> Any:
    """Return a value as Hydra's grammar reads it. Text that the grammar refuses stays text."""
    text = text.strip()
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    if text[:1] == "[" and text[-1:] == "]":
        return [hydra_value(part) for part in _parts(text[1:-1])]
    if text[:1] == "{" and text[-1:] == "}" and all(":" in part for part in _parts(text[1:-1])):
        pairs = (part.partition(":") for part in _parts(text[1:-1]))
        return {str(hydra_value(key)): hydra_value(value) for key, _, value in pairs}
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _parts(text: str) -> list[str]:
    """Yield the text between commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        else:
            depth += (char in "[{(") - (char in "]})")
        if char == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part.strip()]
