"""The HTTP contract that server and clients share: error <-> status, and the shape of an error body."""

from typing import Any

from engines import errors

# Trainers replay 500, 502 and 503 without looking (facts of TRL 1.16), and a replayed weight call meets a broadcast
# that is over. So no weight error, and no wait that ran out, has one of these.
_STATUS: dict[type[errors.RolloutGatewayError], int] = {
    errors.BodyTooLarge: 413,
    errors.UnknownModel: 404,
    errors.InvalidRequest: 400,
    errors.DeadlineExceeded: 504,
    errors.WeightUpdateConflict: 409,
    errors.WeightUpdateFailed: 424,
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
