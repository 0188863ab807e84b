"""The table of docs/troubleshooting.md, from `engines/process/causes.toml`: what failed starts say, and remedies."""

import re
from collections.abc import Iterator

from engines.process.diagnosis import Cause, causes
from scripts.docs.parts.table import table

BEGIN, END = "<!-- causes: made by python -m scripts.docs -->\n", "<!-- end of causes -->\n"

_KEYS = {
    "engine": "engine",
    "memory": "engine.gpu_memory_utilization",
    "kv_memory": "engine.gpu_memory_utilization",
    "key": "KEY",
}


def causes_table() -> str:
    """Return the table, in the order in which a log is searched; causes of one meaning share a row."""
    rows = dict.fromkeys((_worded(cause.meaning), _worded(cause.remedy), _retried(cause)) for cause in causes())
    return "\n".join(["", *table(["a start fails since", "do", "retried by itself"], list(rows)), "", ""])


def _retried(cause: Cause) -> str:
    return "yes" if cause.may_pass else "no"


def _worded(words: str) -> str:
    """Return words with our keys in place, and capital letters where a failure has a value."""
    return "".join(_filled(words)).replace("|", "\\|")


def _filled(words: str) -> Iterator[str]:
    for text, name in re.findall(r"([^{]*)(?:\{(\w+)\})?", words):
        yield text + (_KEYS.get(name) or name.upper())
