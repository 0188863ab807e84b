"""How a version is to be taken: what a trainer may say with a push."""

from collections.abc import Sequence
from dataclasses import dataclass

from engines.types import InFlight


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """The arguments of `WeightSender.push` beside the tensors; None where the gateway is to choose."""

    version: int | None = None
    canary_logprobs: Sequence[float] | None = None
    rolling: bool | None = None
    in_flight: InFlight | None = None
