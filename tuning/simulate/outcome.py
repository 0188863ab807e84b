"""The figures of one simulated run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuning.simulate.engine import Counts
from tuning.simulate.pool import PoolRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    makespan_s: float
    bound_s: float
    p99_s: float
    """From the request of a prompt to its last sample, waits in the gateway included."""
    found: float
    """Share of prompt tokens that were in a KV cache, as engines count them."""
    again: float
    """Share of the computed tokens, read and made, that some engine had computed before."""
    busy: float
    """Share of the time that engines were at work."""
    preemptions: int
    tokens: int
    """Of the samples that were delivered."""
    longest_lag: int
    """Out of a pool, the most batches between a group's first and that which took it."""
    late: int
    """Prompts whose work on a replica took longer than gateway.generate_timeout_s, at which a gateway ends it."""

    @property
    def over_bound(self) -> float:
        return self.makespan_s / self.bound_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.makespan_s


def outcome_of(
    makespan_s: float,
    bound_s: float,
    latencies: Sequence[float],
    late: int,
    engines: Sequence[Counts],
    pools: Sequence[PoolRun] = (),
) -> Outcome:
    """Return the figures; all tokens that engines made are delivered, unless `pools` took them."""

    def total(name: str) -> float:
        return sum(float(getattr(counts, name)) for counts in engines)

    return Outcome(
        makespan_s=makespan_s,
        bound_s=bound_s,
        p99_s=sorted(latencies)[math.ceil(0.99 * len(latencies)) - 1],
        found=total("found") / total("queried"),
        again=total("again") / (total("read") + total("made")),
        busy=total("busy_s") / (makespan_s * len(engines)),
        preemptions=int(total("preemptions")),
        tokens=sum(pool.tokens for pool in pools) if pools else int(total("made")),
        longest_lag=max((lag for pool in pools for lag in pool.lags), default=0),
        late=late,
    )
