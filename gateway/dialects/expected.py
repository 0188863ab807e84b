"""`expected_tokens`: the client's own estimate of a sample's length, which orders rollouts that wait."""

from collections.abc import Sequence
from typing import Any

from engines.engine import Json
from engines.errors import InvalidRequest, shown
from gateway.dialects.freshness import FIELDS

FIELD = "expected_tokens"
_OF_ENGINES = "vllm_xargs"
_OURS = (*FIELDS, FIELD)


def read_expected(body: Json, num_prompts: int = 1) -> Sequence[int | None]:
    """Return the estimate for each prompt, from a number for all or a list. Raise `InvalidRequest`."""
    xargs = body.get(_OF_ENGINES)
    given = body.get(FIELD)
    if given is None and isinstance(xargs, dict):
        given = xargs.get(FIELD)
    if given is None:
        return [None] * num_prompts
    if not isinstance(given, list):
        return [_checked(FIELD, given)] * num_prompts
    if len(given) != num_prompts:
        raise InvalidRequest(f"{FIELD} has {len(given)} entries for {num_prompts} prompts", param=FIELD)
    return [value if value is None else _checked(f"{FIELD}[{index}]", value) for index, value in enumerate(given)]


def without_own_fields(body: Json) -> Json:
    """The body for an engine, which knows nothing of the fields that this gateway reads."""
    kept = {key: value for key, value in body.items() if key not in _OURS}
    xargs = kept.get(_OF_ENGINES)
    if isinstance(xargs, dict) and FIELD in xargs:
        kept[_OF_ENGINES] = {key: value for key, value in xargs.items() if key != FIELD} or None
    return kept


def _checked(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise InvalidRequest(f"{name} = {shown(value)} must be a whole number of at least 1", param=FIELD)
    return value
