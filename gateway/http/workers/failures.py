"""Errors as messages, so that an attempt ends in the owner as it did in its worker, and the other way round."""

from engines import errors
from engines.errors import EngineError, EngineRefused, InvalidRequest, RolloutGatewayError
from gateway.api import shortened
from gateway.http.workers.messages import Failure


def packed(error: BaseException) -> Failure:
    """An error as a message; one that is not this product's by its representation."""
    if not isinstance(error, RolloutGatewayError):
        return Failure(RolloutGatewayError.__name__, shortened(writable(repr(error))))
    failure = Failure(_known_name(type(error)), shortened(writable(str(error))))
    if isinstance(error, InvalidRequest):
        failure.param = error.param
    if isinstance(error, EngineError):
        failure.replica_id, failure.retry_after_s = error.replica_id, error.retry_after_s
    if isinstance(error, EngineRefused):
        failure.status = error.status
    return failure


def unpacked(failure: Failure) -> RolloutGatewayError:
    """The error of a message, without the body of an engine's refusal."""
    kind = getattr(errors, failure.kind, RolloutGatewayError)
    error: RolloutGatewayError = kind.__new__(kind, failure.text)
    error.args = (failure.text,)
    if isinstance(error, InvalidRequest):
        error.param = failure.param
    if isinstance(error, EngineError):
        error.replica_id, error.retry_after_s = failure.replica_id, failure.retry_after_s
    if isinstance(error, EngineRefused):
        error.status, error.body = failure.status, {}
    return error


def writable(text: str) -> str:
    """A text without what UTF-8 cannot write, such as bytes of a header that are no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _known_name(kind: type[BaseException]) -> str:
    """The nearest class that the other process knows by its name."""
    return next(base.__name__ for base in kind.__mro__ if base.__module__ == errors.__name__)
