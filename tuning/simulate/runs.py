"""Runs of drawn workloads under several placements."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.config.schema import Config
from tuning.simulate.outcome import Outcome
from tuning.simulate.placements import Placed
from tuning.simulate.pool import Pool
from tuning.simulate.simulation import simulated
from tuning.simulate.speed import Speed
from tuning.simulate.workloads.workload import Stream, Workload


class Source(Protocol):
    """Draws the stream of a seed."""

    def stream(self, seed: int) -> Stream: ...


@dataclass(frozen=True, slots=True)
class Run:
    """A configuration, the speeds of its engine groups, and the placement. Batches come out of `pool`, if given."""

    config: Config
    speeds: Mapping[str, Speed]
    placed: Placed
    pool: Pool | None = None


def outcomes(
    runs: Mapping[str, Run], sources: Sequence[Source], seeds: int, report: Callable[[str], None]
) -> dict[str, list[Outcome]]:
    """Return the outcomes of each run by its name, one for each seed: all run the same workloads."""
    found: dict[str, list[Outcome]] = {name: [] for name in runs}
    for seed in range(seeds):
        workload = Workload([source.stream(seed) for source in sources])
        for name, run in runs.items():
            report(f"seed {seed + 1} of {seeds}: {name}")
            found[name].append(simulated(run.config, run.speeds, workload, run.placed, run.pool))
    return found
