"""Options of a weight push."""

from collections.abc import Sequence
from dataclasses import dataclass

from engines.types import InFlight


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """The arguments of `WeightSender.push` beside the tensors; None leaves the choice to the gateway."""

    version: int | None = None
    canary_logprobs: Sequence[float] | None = None
    rolling: bool | None = None
    in_flight: InFlight | None = None
