"""The HTTP contract that server and clients share: error <-> status, and the shape of an error body."""

from collections.abc import Iterator
from typing import Any

from engines import errors

# Trainers replay 500, 502 and 503 without looking (facts of TRL 1.16), and a replayed weight call meets a broadcast
# that is over. So no weight error, and no wait that ran out, has one of these.
_STATUS: dict[type[errors.RolloutGatewayError], int] = {
    errors.BodyTooLarge: 413,
    errors.UnknownModel: 404,
    errors.UnknownRoute: 404,
    errors.InvalidRequest: 400,
    errors.DeadlineExceeded: 504,
    errors.StoreFailed: 409,
    errors.WeightUpdateConflict: 409,
    errors.WeightUpdateFailed: 424,
    errors.GatewayUnreachable: 503,
    errors.EngineError: 502,
    errors.RolloutGatewayError: 500,
}


def status_of(error: errors.RolloutGatewayError) -> int:
    """HTTP status of an error: that of the nearest class in the table."""
    if isinstance(error, errors.EngineRefused):
        return error.status
    if isinstance(error, errors.NotAllowed):
        return 403 if error.known else 401
    return next(_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)


def body_of(error: errors.RolloutGatewayError) -> dict[str, Any]:
    """The body that tells of an error: an engine's own where it refused, vLLM's name of it where it has one."""
    if isinstance(error, errors.EngineRefused) and error.body:
        return error.body
    kind = None if isinstance(error, errors.InvalidRequest | errors.NotAllowed) else type(error).__name__
    body = error_body(str(error), status_of(error), param=getattr(error, "param", None), kind=kind)
    if replica_id := getattr(error, "replica_id", ""):
        body["error"]["replica_id"] = replica_id
    return body


def error_of(status: int, body: Any) -> errors.RolloutGatewayError:
    """The error that a reply tells of, in the same class as where it was raised; `body` as `body_of` makes it.

    An engine's refusal comes back as what it is to the client: `InvalidRequest`. What no gateway wrote is judged by its
    status.
    """
    told = body.get("error", body) if isinstance(body, dict) else {"message": body}
    told = told if isinstance(told, dict) else {"message": told}
    message = str(told.get("message") or told.get("detail") or f"the answer was HTTP {status} without a reason")
    param = told.get("param")
    cls = _NAMED.get(str(told.get("type"))) or _class_of(status, param)
    if issubclass(cls, errors.NotAllowed):
        return cls(message, known=status == 403)
    if issubclass(cls, errors.InvalidRequest):
        return cls(message, param=param if isinstance(param, str) else None)
    error = cls(message)
    if isinstance(error, errors.EngineError | errors.WeightUpdateFailed):
        # Set afterwards: the message has it in words already.
        error.replica_id = str(told.get("replica_id", ""))
    return error


def error_body(message: str, status: int, *, param: str | None = None, kind: str | None = None) -> dict[str, Any]:
    """OpenAI's and vLLM's form of an error."""
    kinds = {400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError"}
    return {
        "error": {
            "message": message,
            "type": kind or kinds.get(status, "RolloutGatewayError"),
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
