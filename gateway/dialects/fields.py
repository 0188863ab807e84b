"""Objects in the bodies of our own routes: read as structs, with an error that names the field."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from enum import Enum
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from engines.errors import InvalidRequest, shown

T = TypeVar("T", bound=msgspec.Struct)

_MISSING = re.compile("(unknown|missing required) field `(.*)`")


def read_fields(kind: type[T], given: Any, where: str = "") -> T:
    """Return an object as `kind`; a field that is null is left out. Raise `InvalidRequest` with the field, after
    `where`."""
    try:
        is_object = isinstance(given, dict)
        return msgspec.convert({k: v for k, v in given.items() if v is not None} if is_object else given, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        raise _refusal(kind, given, where, message, path.rstrip("`").removeprefix("$").lstrip(".")) from None


def _refusal(kind: type[T], given: Any, where: str, message: str, path: str) -> InvalidRequest:
    if found := _MISSING.search(message):
        hint = _nearest(found[2], kind.__struct_fields__) if found[1] == "unknown" and not path else ""
        message, path = f"a field that is {found[1]}{hint}", ".".join(filter(None, (path, found[2])))
    elif path in kind.__struct_fields__:
        message += f", it is {shown(given[path])}{_choices(get_type_hints(kind)[path])}"
    place = ".".join(filter(None, (where, path)))
    param = ".".join(filter(None, (where, path.partition("[")[0])))
    return InvalidRequest(f"{place or 'the body'}: {message}", param=param or None)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, 1)
    return f": did you mean {near[0]}?" if near else f": there are {', '.join(known)}"


def _choices(annotation: Any) -> str:
    kinds = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type) and issubclass(one, Enum)]
    return f": there are {', '.join(kinds[0])}" if kinds else ""
