"""How new the weights must be that make a rollout: `min_version` and `max_staleness`, fields that every dialect has."""

from dataclasses import dataclass

from engines.engine import Json
from engines.errors import InvalidRequest, shown
from gateway.fleet.fleet import Fleet

FIELDS = ("min_version", "max_staleness")


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """`min_version` is the least weight version, `max_staleness` how far it may be behind the newest; None for any."""

    min_version: int = 0
    max_staleness: int | None = None


def read_freshness(body: Json, fleet: Fleet, model: str) -> Freshness:
    """Return a request's demand. Raise `InvalidRequest` where it is no number, or can never be met."""
    asked = {field: body[field] for field in FIELDS if body.get(field) is not None}
    for field, value in asked.items():
        if type(value) is not int or value < 0:
            raise InvalidRequest(f"{field} = {shown(value)} is no whole number of at least 0", param=field)
    least = asked.get("min_version", 0)
    if least > fleet.version_of(model) and (reason := fleet.why_fixed(model)):
        raise InvalidRequest(
            f"min_version = {least} can never be met: {reason}; ask for {fleet.version_of(model)} or leave it out",
            param="min_version",
        )
    return Freshness(**asked)
