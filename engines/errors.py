"""All errors of this product. Catch only errors that you retry, translate or record."""

import reprlib
from typing import Any

_values = reprlib.Repr()
_values.maxstring = _values.maxother = 120
shown = _values.repr
"""A value of any size and depth for a message; Python's own `repr` recurses."""


class RolloutGatewayError(Exception):
    """Base of all errors of this product. `str(error)` is written for the operator."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are pickled between processes: restore the state without calling the constructor again.
        return _restored, (type(self), self.args, self.__dict__)


class ConfigError(RolloutGatewayError):
    """The configuration is wrong."""


class UsageError(ConfigError):
    """The words of a command are wrong."""


class InvalidRequest(RolloutGatewayError):
    """The request is wrong. `param` names the field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(InvalidRequest):
    """No replica serves the requested model."""


class UnknownRoute(InvalidRequest):
    """No replica's engine supports the route."""


class UnknownRequest(InvalidRequest):
    """There is no record of a request of this id."""


class SessionFrozen(InvalidRequest):
    """The session takes no call any more, or is to be frozen before it is acked."""


class BodyTooLarge(InvalidRequest):
    """The body is over `gateway.max_body_bytes`."""


class DeadlyPrompt(InvalidRequest):
    """Engines died under this prompt."""


class NotAllowed(RolloutGatewayError):
    """The key is missing or wrong (`known` False), or not an admin key (`known` True, and `key` is its name)."""

    def __init__(self, message: str, *, known: bool, key: str = "") -> None:
        super().__init__(message)
        self.known = known
        self.key = key


class TooManyRequests(RolloutGatewayError):
    """Sessions are full, or a proxy limits the key, for `retry_after_s` from now."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(RolloutGatewayError):
    """A bounded wait ran out."""


class StoreFailed(RolloutGatewayError):
    """The weight store cannot write or read a version."""


class GatewayUnreachable(RolloutGatewayError):
    """A client's connection to the gateway failed. `arrived` is False if the request cannot have arrived."""

    def __init__(self, message: str, *, arrived: bool = True) -> None:
        super().__init__(message)
        self.arrived = arrived


class EngineError(RolloutGatewayError):
    """An error of one replica's engine."""

    def __init__(self, message: str, *, replica_id: str = "") -> None:
        super().__init__(f"replica {replica_id}: {message}" if replica_id else message)
        self.replica_id = replica_id
        self.retry_after_s: float | None = None
        """The engine's own word about when it will have room."""


class EngineStartFailed(EngineError):
    """The engine process ended, or was not ready in time. The first line gives cause and remedy; `may_pass` is True
    if a retry may succeed."""

    def __init__(self, message: str, *, replica_id: str = "", may_pass: bool = False) -> None:
        super().__init__(message, replica_id=replica_id)
        self.may_pass = may_pass


class EngineUnreachable(EngineError):
    """The connection to the engine failed, broke or went silent."""


class EngineGone(EngineUnreachable):
    """Nothing listens on the engine's port: its process has ended."""


class EngineOverwritten(EngineError):
    """A weight update that failed has overwritten the engine's weights: the rollout is generated again."""


class EngineRefused(EngineError):
    """The engine answered 4xx, with `status` and `body`."""

    def __init__(self, message: str, *, status: int, body: dict[str, Any], replica_id: str = "") -> None:
        super().__init__(message, replica_id=replica_id)
        self.status = status
        self.body = body


class EngineFailed(EngineError):
    """The engine answered 5xx (`status`), or broke its protocol."""

    status: int | None = None


class WeightUpdateConflict(RolloutGatewayError):
    """The call is not allowed in the update's state."""


class WeightUpdateFailed(RolloutGatewayError):
    """Replica `replica_id` did not take the update."""

    def __init__(self, message: str, *, replica_id: str = "") -> None:
        super().__init__(message)
        self.replica_id = replica_id


def _restored(cls: type[RolloutGatewayError], args: tuple[Any, ...], state: dict[str, Any]) -> RolloutGatewayError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error
