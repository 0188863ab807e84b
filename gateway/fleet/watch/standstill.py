"""Finds engines whose tokens stand still although they answer /health.

Evidence, in this order: chunks and replies that arrive here, then signs of tokens on the engine's own metrics page. An
engine without those signs is not judged: a long whole reply looks the same as a standstill. Time counts under load
alone, and clients that give up do not set it back.

A page that fails or does not come is no evidence, for or against: the sum before it is kept. While pages fail, the
replica is judged by chunks alone, after three times the time, and only if each of its rollouts waits for a chunk: an
engine too busy for its page streams on, and a rollout that is read whole, or whose client does not read, would look the
same as a standstill, and so do SGLang's long samples, whose chunks come at growing distances. A page that the engine
refuses (4xx) is a page without signs.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from engines.errors import DeadlineExceeded, EngineError, EngineFailed, EngineRefused
from gateway.config.schema import FleetConfig
from gateway.fleet.replica import Replica
from gateway.fleet.watch.engine_page import read_total

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
# Without pages, chunks have to be absent for so many times `fleet.stalled_after_s`.
_BLIND = 3.0


@dataclass(frozen=True, slots=True)
class _Reading:
    """The sum of the signs when the replica had been quiet for `quiet_s`; None where its page has failed since."""

    total: float | None
    quiet_s: float


class Standstill:
    """Looks at one replica after each of its probes that went well."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._readings: WeakKeyDictionary[Replica, _Reading] = WeakKeyDictionary()

    async def look(self, replica: Replica) -> EngineError | DeadlineExceeded | None:
        """The failure if tokens stand still while nobody holds the engine, else None."""
        if replica.is_stalled:
            return await self._asked_for_a_token(replica)
        if replica.brake.holders or not replica.can_serve:
            replica.excuse()
        if replica.quiet_s < self._config.stalled_after_s / 2:
            self._readings.pop(replica, None)
        elif replica.load_samples:
            is_blind = not await self._read(replica)
            if self._stands_still(replica, is_blind=is_blind):
                return self._stalled(replica, is_blind=is_blind)
        return None

    async def _read(self, replica: Replica) -> bool:
        """Compare the engine's page with the reading before it. False if the page failed."""
        try:
            total = await self._sum_of_signs(replica)
        except (EngineError, DeadlineExceeded):
            self._readings.setdefault(replica, _Reading(None, replica.quiet_s))
            return False
        before = self._readings.pop(replica, None)
        if total is None:
            replica.excuse()
            return True
        if before is not None and before.total not in (None, total):
            replica.saw_progress()
        since_s = replica.quiet_s if before is None or before.total != total else min(before.quiet_s, replica.quiet_s)
        self._readings[replica] = _Reading(total, since_s)
        return True

    def _stands_still(self, replica: Replica, *, is_blind: bool) -> bool:
        """True where looks far enough apart saw no token, for as long as the longest prompt needs and more."""
        reading, bound_s = self._readings.get(replica), self._config.stalled_after_s
        if reading is None or replica.brake.holders or not replica.load_samples:
            return False
        if is_blind and not (replica.awaits_chunks and replica.engine.passes_every_chunk):
            return False
        longest_s = bound_s * (_BLIND if is_blind else 1.0) + replica.longest_prompt / _PREFILL_TOKENS_PER_S
        return replica.quiet_s >= longest_s and replica.quiet_s - reading.quiet_s >= _APART * bound_s

    def _stalled(self, replica: Replica, *, is_blind: bool) -> EngineFailed:
        replica.is_stalled = True
        self._readings.pop(replica, None)
        return EngineFailed(
            f"its tokens stand still for {replica.quiet_s:.1f} s (fleet.stalled_after_s), with "
            f"{replica.load_samples} samples in flight{' and no answer to /metrics' if is_blind else ''}",
            replica_id=replica.replica_id,
        )

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
        except EngineRefused:
            return None
        return read_total(page, _SIGNS)
