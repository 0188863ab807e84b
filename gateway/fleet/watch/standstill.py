"""Finds engines whose tokens stand still although they answer /health.

Evidence, in this order: chunks and replies that arrive here, then signs of tokens on the engine's own metrics page. An
engine without those signs is not judged: a long whole reply looks the same as a standstill. Time counts under load
alone, and clients that give up do not set it back.

A page that fails or does not come is no evidence, for or against: the sum before it is kept. A page that the engine
refuses (4xx) is a page without signs.
"""

from weakref import WeakKeyDictionary

from engines.errors import DeadlineExceeded, EngineError, EngineFailed, EngineRefused
from gateway.config.schema import FleetConfig
from gateway.fleet.replica import Replica
from gateway.fleet.watch.engine_page import read_total
from gateway.fleet.watch.evidence import Failure

_SIGNS = (
    "vllm:generation_tokens_total", "vllm:prompt_tokens_total", "sglang:generation_tokens_total",
    "sglang:prompt_tokens_total", "sglang:realtime_tokens_total",
)  # fmt: skip
"""Their sum grows while tokens are made. SGLang counts a request's tokens in its first two when the request ends, and
the tokens of steps in the third."""
# A reader slower than this would not be used; tokens may stand still while a prompt is read.
_PREFILL_TOKENS_PER_S = 1000.0
_PROBE = {"prompt": [1], "max_tokens": 1, "temperature": 0.0}
# Pages that are compared lie so much of `fleet.stalled_after_s` apart, under load.
_APART = 0.25
_Reading = tuple[float, float]
"""The sum of the signs, and for how many seconds the replica had been quiet."""


class Standstill:
    """Looks at one replica after each of its probes that went well."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._readings: WeakKeyDictionary[Replica, _Reading] = WeakKeyDictionary()

    async def look(self, replica: Replica) -> Failure | None:
        """Return the failure where tokens stand still while nobody holds the engine."""
        evidence = replica.evidence
        if evidence.is_stalled:
            return await self._asked_for_a_token(replica)
        if replica.brake.holders or not replica.can_serve:
            evidence.excuse()
        if evidence.quiet_s < self._config.stalled_after_s / 2:
            self._readings.pop(replica, None)
        elif replica.load_samples and await self._read(replica) and self._stands_still(replica):
            return self._stalled(replica)
        return None

    async def _read(self, replica: Replica) -> bool:
        """Compare the engine's page with the reading before it. Return False where there is no page with signs."""
        evidence = replica.evidence
        try:
            total = await self._sum_of_signs(replica)
        except (EngineError, DeadlineExceeded):
            return False
        before, quiet_before_s = self._readings.pop(replica, (total, evidence.quiet_s))
        if total is None:
            evidence.excuse()
            return False
        if before != total:
            evidence.saw_progress()
        self._readings[replica] = total, min(quiet_before_s, evidence.quiet_s)
        return True

    def _stands_still(self, replica: Replica) -> bool:
        """Return True where looks far enough apart saw no token, for as long as the longest prompt needs and more."""
        bound_s, quiet_s = self._config.stalled_after_s, replica.evidence.quiet_s
        if replica.brake.holders or not replica.load_samples:
            return False
        longest_s = bound_s + replica.longest_prompt / _PREFILL_TOKENS_PER_S
        return quiet_s >= longest_s and quiet_s - self._readings[replica][1] >= _APART * bound_s

    def _stalled(self, replica: Replica) -> EngineFailed:
        replica.evidence.is_stalled = True
        self._readings.pop(replica, None)
        return EngineFailed(
            f"its tokens stand still for {replica.evidence.quiet_s:.1f} s (fleet.stalled_after_s), with "
            f"{replica.load_samples} samples in flight",
            replica_id=replica.replica_id,
        )

    async def _asked_for_a_token(self, replica: Replica) -> Failure | None:
        """A stalled replica serves again after it has made one token."""
        try:
            await replica.engine.generate("/v1/completions", dict(_PROBE), self._config.probe_timeout_s)
        except (EngineError, DeadlineExceeded) as error:
            return error
        replica.evidence.is_stalled = False
        replica.evidence.saw_progress()
        replica.backoff.succeeded()  # its rollouts have all failed at once
        return None

    async def _sum_of_signs(self, replica: Replica) -> float | None:
        """The sum of the signs that tokens are made; None if the engine reports none of them."""
        try:
            page = await replica.engine.metrics(self._config.probe_timeout_s)
        except EngineRefused:
            return None
        return read_total(page, _SIGNS)
