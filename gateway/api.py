"""The HTTP contract that server and clients share: error <-> status, and the shape of an error body."""

from collections.abc import Iterator
from typing import Any

from engines import errors

# Trainers (TRL 1.16) replay 500, 502 and 503 blindly, and a replayed weight call would join a broadcast that is over.
# So weight errors and timeouts never have these statuses.
_STATUS: dict[type[errors.RolloutGatewayError], int] = {
    errors.BodyTooLarge: 413,
    errors.UnknownModel: 404,
    errors.UnknownRequest: 404,
    errors.UnknownRoute: 404,
    errors.SessionFrozen: 409,
    errors.InvalidRequest: 400,
    errors.DeadlineExceeded: 504,
    errors.TooManyRequests: 429,
    errors.StoreFailed: 409,
    errors.WeightUpdateConflict: 409,
    errors.WeightUpdateFailed: 424,
    errors.GatewayUnreachable: 503,
    errors.EngineError: 502,
    errors.RolloutGatewayError: 500,
}

GONE = 499
"""The status of a request whose client left before there was an answer."""
_LONGEST_MESSAGE, _LEFT_OUT = 4000, " ... "
_OPENAIS = {400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError"}


def status_of(error: errors.RolloutGatewayError) -> int:
    """Return the HTTP status of an error: that of the nearest class in the table."""
    if isinstance(error, errors.EngineRefused):
        return error.status
    if isinstance(error, errors.NotAllowed):
        return 403 if error.known else 401
    return next(_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)


def body_of(error: errors.RolloutGatewayError) -> dict[str, Any]:
    """Build the body of an error reply: the engine's own body where it refused, else OpenAI's form."""
    if isinstance(error, errors.EngineRefused) and error.body:
        return error.body
    is_openais = isinstance(error, errors.InvalidRequest | errors.NotAllowed) and status_of(error) in _OPENAIS
    kind = None if is_openais else type(error).__name__
    body = error_body(str(error), status_of(error), param=getattr(error, "param", None), kind=kind)
    if replica_id := getattr(error, "replica_id", ""):
        body["error"]["replica_id"] = replica_id
    return body


def error_of(status: int, body: Any) -> errors.RolloutGatewayError:
    """Restore the error of a reply, in the class that was raised; `body` is as `body_of` makes it.

    An engine's refusal becomes `InvalidRequest`. A body that no gateway wrote is judged by its status.
    """
    found = body.get("error", body) if isinstance(body, dict) else {"message": body}
    found = found if isinstance(found, dict) else {"message": found}
    message = str(found.get("message") or found.get("detail") or f"the answer was HTTP {status} without a reason")
    param = found.get("param")
    cls = _NAMED.get(str(found.get("type"))) or _class_of(status, param)
    if issubclass(cls, errors.NotAllowed):
        return cls(message, known=status == 403)
    if issubclass(cls, errors.InvalidRequest):
        return cls(message, param=param if isinstance(param, str) else None)
    error = cls(message)
    if isinstance(error, errors.EngineError | errors.WeightUpdateFailed):
        # Set afterwards: the message names it already.
        error.replica_id = str(found.get("replica_id", ""))
    return error


def shortened(message: str) -> str:
    """Return the begin and the end of a long message, as of a large value: the end has the remedy."""
    if len(message) <= _LONGEST_MESSAGE:
        return message
    half = (_LONGEST_MESSAGE - len(_LEFT_OUT)) // 2
    return f"{message[:half]}{_LEFT_OUT}{message[-half:]}"


def error_body(message: str, status: int, *, param: str | None = None, kind: str | None = None) -> dict[str, Any]:
    """Build an error in OpenAI's and vLLM's form."""
    return {
        "error": {
            "message": shortened(message),
            "type": kind or _OPENAIS.get(status, "RolloutGatewayError"),
            "param": param,
            "code": status,
        }
    }


def _class_of(status: int, param: Any) -> type[errors.RolloutGatewayError]:
    if status in (401, 403):
        return errors.NotAllowed
    if status == 404:
        return errors.UnknownModel if param == "model" else errors.UnknownRoute
    by_status = {code: cls for cls, code in _STATUS.items()}
    return by_status.get(status) or (errors.InvalidRequest if 400 <= status < 500 else errors.RolloutGatewayError)


def _descendants(cls: type[errors.RolloutGatewayError]) -> Iterator[type[errors.RolloutGatewayError]]:
    for child in cls.__subclasses__():
        yield child
        yield from _descendants(child)


# EngineRefused is known by its engine's own body, never by its name.
_NAMED = {cls.__name__: cls for cls in _descendants(errors.RolloutGatewayError) if cls is not errors.EngineRefused}
