"""Everything that can go wrong, on one screen. Raise these; catch what you can retry, translate or record.

RolloutGatewayError
├── ConfigError               the configuration is wrong; names file, line, key and remedy
├── InvalidRequest            the client's request is wrong; names the field
│   ├── UnknownModel          no such model here
│   ├── UnknownRoute          no replica's engine has what the route needs
│   ├── BodyTooLarge          over the limit in bytes
│   └── DeadlyPrompt          engines die under it
├── Withdrawn                 its client aborted the rollout before a replica had it
├── NotAllowed                the key is missing, wrong, or not an admin key
├── StoreFailed               the weight store cannot keep or give a version: disk full, folder gone
├── DeadlineExceeded          a bounded wait ran out; says for what
├── GatewayUnreachable        no gateway answers at the rollout URL, or the connection broke before the reply
├── EngineError               one replica's engine misbehaved; names the replica
│   ├── EngineStartFailed     it never came up; says why, and carries its last words
│   ├── EngineUnreachable     the connection failed or broke: the work may be done elsewhere
│   │   └── EngineGone        nobody listens there any more
│   ├── NoDescriptors         this process has no file descriptor left for a connection to it
│   ├── EngineRefused         it answered 4xx; `status` says whose fault that is
│   └── EngineFailed          it answered 5xx or nonsense
└── WeightUpdateError         a weight call failed
    ├── WeightUpdateConflict  out of order, a second trainer, or another model's tensors
    └── WeightUpdateFailed    a replica did not take the update
"""

from typing import Any


class RolloutGatewayError(Exception):
    """Base of all errors of this product. `str(error)` is fit for the person on call."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Processes hand errors on pickled; what a constructor made of its arguments is not made once more.
        return _restored, (type(self), self.args, self.__dict__)


class ConfigError(RolloutGatewayError):
    """The configuration is wrong."""


class InvalidRequest(RolloutGatewayError):
    """The request is wrong. `param` names the field at fault."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(InvalidRequest):
    """No replica serves the model asked for."""


class UnknownRoute(InvalidRequest):
    """No replica's engine has what the route needs."""


class BodyTooLarge(InvalidRequest):
    """The body is over `gateway.max_body_bytes`."""


class DeadlyPrompt(InvalidRequest):
    """Engines died under this prompt."""


class Withdrawn(RolloutGatewayError):
    """The client aborted the rollout while it waited for a replica."""


class NotAllowed(RolloutGatewayError):
    """The key is missing or wrong (`known` False), or is no admin key (`known` True)."""

    def __init__(self, message: str, *, known: bool) -> None:
        super().__init__(message)
        self.known = known


class DeadlineExceeded(RolloutGatewayError):
    """A bounded wait ran out."""


class StoreFailed(RolloutGatewayError):
    """The weight store cannot keep or give a version."""


class GatewayUnreachable(RolloutGatewayError):
    """A client's connection to the gateway failed or broke. `arrived` False where the request cannot have got there."""

    def __init__(self, message: str, *, arrived: bool = True) -> None:
        super().__init__(message)
        self.arrived = arrived


class EngineError(RolloutGatewayError):
    """One replica's engine misbehaved."""

    def __init__(self, message: str, *, replica_id: str = "") -> None:
        super().__init__(f"replica {replica_id}: {message}" if replica_id else message)
        self.replica_id = replica_id
        self.retry_after_s: float | None = None
        """The engine's own word about when it will have room."""


class EngineStartFailed(EngineError):
    """The engine process ended or stayed silent before it was ready. Its first line says what happened and what to
    change; `may_pass` where a second start may go well."""

    def __init__(self, message: str, *, replica_id: str = "", may_pass: bool = False) -> None:
        super().__init__(message, replica_id=replica_id)
        self.may_pass = may_pass


class EngineUnreachable(EngineError):
    """The connection to the engine failed, broke or went silent."""


class EngineGone(EngineUnreachable):
    """Nobody listens where the engine was: its process has ended."""


class NoDescriptors(EngineError):
    """This process has no file descriptor left; the engine is not at fault."""


class EngineRefused(EngineError):
    """The engine answered 4xx. `status` and `body` are the engine's own."""

    def __init__(self, message: str, *, status: int, body: dict[str, Any], replica_id: str = "") -> None:
        super().__init__(message, replica_id=replica_id)
        self.status = status
        self.body = body


class EngineFailed(EngineError):
    """The engine answered 5xx, or something that is not its protocol."""


class WeightUpdateError(RolloutGatewayError):
    """A weight call failed."""


class WeightUpdateConflict(WeightUpdateError):
    """The call does not fit the state of the update."""


class WeightUpdateFailed(WeightUpdateError):
    """A replica did not take the update; `replica_id` names it."""

    def __init__(self, message: str, *, replica_id: str = "") -> None:
        super().__init__(message)
        self.replica_id = replica_id


def _restored(cls: type[RolloutGatewayError], args: tuple[Any, ...], state: dict[str, Any]) -> RolloutGatewayError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error
