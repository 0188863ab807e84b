"""Times on the command line: 30, 30s, 45m, 2h."""

import re

from engines.errors import UsageError

_UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds_of(text: str, option: str) -> float:
    """Return the seconds. Raise `UsageError` naming the option for anything but a time above 0."""
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())) or float(found[1]) <= 0:
        raise UsageError(f"{option} {text!r}: expected a number of seconds, or such as 90s, 45m or 2h")
    return float(found[1]) * _UNITS[found[2] or "s"]
