"""Options of a weight push."""

from collections.abc import Sequence
from dataclasses import dataclass

from engines.types import InFlight


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """The arguments of `WeightSender.push` beside the tensors; None leaves the choice to the gateway.

    after: id of the update that made the weights to which the tensors are an addition; a conflict where another made
        the served version.
    """

    version: int | None = None
    canary_logprobs: Sequence[float] | None = None
    rolling: bool | None = None
    in_flight: InFlight | None = None
    after: str | None = None
