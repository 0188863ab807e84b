"""A rule's finding about one value."""

from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from gateway.config.load import Setting


class Severity(StrEnum):
    """`hurts` sets the exit status; `consider` may pay; `fine` is right, though a common belief says otherwise."""

    HURTS = "hurts"
    CONSIDER = "consider"
    FINE = "fine"


@dataclass(frozen=True, slots=True)
class Found:
    """One value, judged. `message` holds this file's own numbers; `setting` is None where nothing was given to name."""

    severity: Severity
    setting: Setting | None
    message: str
    suggestion: str = ""
    effect: str = ""
    _: KW_ONLY
    corrects: bool = False
    """True if a common belief about this value is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A `Found` with its rule's fixed texts. All values are plain, for JSON."""

    rule: str
    severity: Severity
    where: str
    """The part that was read: `gateway engine`, `verl`, ..."""
    key: str
    value: Any
    origin: str
    """default, file, env or cli; "" where no value stands behind it."""
    place: str
    """File and line, variable or argument; "" for defaults."""
    message: str
    why: str
    suggestion: str
    effect: str
    corrects: str
    """A common belief that does not hold here; "" where the rule knows none."""
    source: str
    gain: float
    """Share of a step that following it may save, roughly; it ranks."""


hurts = partial(Found, Severity.HURTS)
consider = partial(Found, Severity.CONSIDER)
fine = partial(Found, Severity.FINE, corrects=True)
