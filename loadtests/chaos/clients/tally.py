"""Counts of a chaos run."""

from dataclasses import dataclass, field, fields

_REASONS_KEPT = 5


@dataclass(slots=True)
class Tally:
    """Counts of submitted rollouts by result. `failed` ones got an error; `stale` ones have tokens of older weights
    than the fleet's at the request; `wrong` ones have other content than the weights that they name make of their
    prompt. `retried` counts requests that a plain client sent again."""

    submitted: int = 0
    delivered: int = 0
    failed: int = 0
    lost: int = 0
    duplicated: int = 0
    stale: int = 0
    wrong: int = 0
    hung: int = 0
    retried: int = 0
    reasons: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.duplicated or self.stale or self.wrong or self.hung)

    def note(self, reason: str) -> None:
        if len(self.reasons) < _REASONS_KEPT:
            self.reasons.append(reason)

    def add(self, other: "Tally") -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))
