"""Finds engines whose tokens stand still although they answer /health.

Evidence, in this order: chunks and replies that arrive here, then signs of tokens on the engine's own metrics page. An
engine without those signs is not judged: a long whole reply looks the same as a standstill.
"""

from weakref import WeakKeyDictionary

from engines.errors import DeadlineExceeded, EngineError, EngineFailed
from gateway.config.schema import FleetConfig
from gateway.fleet.engine_page import read_total
from gateway.fleet.replica import Replica

_SIGNS = (
    "vllm:generation_tokens_total", "vllm:prompt_tokens_total", "sglang:generation_tokens_total",
    "sglang:prompt_tokens_total", "sglang:realtime_tokens_total",
)  # fmt: skip
"""Their sum grows while tokens are made. SGLang counts a request's tokens in its first two when the request ends, and
the tokens of steps in the third."""
# A reader slower than this would not be used; tokens may stand still while a prompt is read.
_PREFILL_TOKENS_PER_S = 1000.0
_PROBE = {"prompt": [1], "max_tokens": 1, "temperature": 0.0}


class Standstill:
    """Looks at one replica after each of its probes that went well."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._sums: WeakKeyDictionary[Replica, float] = WeakKeyDictionary()

    async def look(self, replica: Replica) -> EngineError | DeadlineExceeded | None:
        """The failure if tokens stand still while nobody holds the engine, else None."""
        if replica.is_stalled:
            return await self._asked_for_a_token(replica)
        if replica.brake.holders or not (replica.can_serve and replica.load_samples):
            replica.excuse()
        longest_s = self._config.stalled_after_s + replica.longest_prompt / _PREFILL_TOKENS_PER_S
        if replica.quiet_s < self._config.stalled_after_s / 2:
            self._sums.pop(replica, None)
            return None
        before, total = self._sums.get(replica), await self._sum_of_signs(replica)
        if total is None or before not in (None, total):
            replica.saw_progress()
        elif before is not None and replica.quiet_s >= longest_s:
            replica.is_stalled = True
            self._sums.pop(replica)
            return EngineFailed(
                f"its tokens stand still for {replica.quiet_s:.1f} s (fleet.stalled_after_s), with "
                f"{replica.load_samples} samples in flight",
                replica_id=replica.replica_id,
            )
        if total is not None:
            self._sums[replica] = total
        return None

    async def _asked_for_a_token(self, replica: Replica) -> EngineError | DeadlineExceeded | None:
        """A stalled replica serves again after it has made one token."""
        try:
            await replica.engine.generate("/v1/completions", dict(_PROBE), self._config.probe_timeout_s)
        except (EngineError, DeadlineExceeded) as error:
            return error
        replica.is_stalled = False
        replica.saw_progress()
        return None

    async def _sum_of_signs(self, replica: Replica) -> float | None:
        """The sum of the signs that tokens are made; None if the engine reports none of them."""
        try:
            page = await replica.engine.metrics(self._config.probe_timeout_s)
        except (EngineError, DeadlineExceeded):
            return None
        return read_total(page, _SIGNS)
