"""Admission of sessions by KV beside none, in virtual time, on fleets and agents drawn out of a grid.

    python -m loadtests.studies.scheduling.admission [--cases 300] [--draw 1] [--share 1.0] [--json out.json]

A case is four replicas and their agents, with a trainer's batches beside them or without; the grid has 1,920. Each runs
once with `gateway.session_kv_share` and once without, on the same drawn workload. A case that takes longer with it than
`SUSPECT` runs on four more workloads: the ratio is the mean, as single workloads differ by some percent.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean

import orjson

from gateway.config.schema import Config
from tuning.plan.workload import Lengths
from tuning.simulate.placements import by_the_gateway
from tuning.simulate.runs import Source
from tuning.simulate.simulation import simulated
from tuning.simulate.speed import SetSpeed
from tuning.simulate.workloads.agents import Agents
from tuning.simulate.workloads.grpo import Grpo
from tuning.simulate.workloads.lengths import LogNormal
from tuning.simulate.workloads.workload import Workload

SUSPECT = 1.02
_REPLICAS = 4
_SESSIONS = (8, 32, 64, 128, 192)
_TOOL_S = (0.2, 1.0, 5.0, 30.0)
_PREFILL_TOKENS_PER_S = (5_000, 40_000, 200_000, 1_000_000)
_KV_TOKENS = (60_000, 200_000, 600_000, 3_000_000)
_MAX_NUM_SEQS = (16, 64, 256)
_BOUNDS = (0.8, 0.97, 1.0, 1.03)


@dataclass(frozen=True, slots=True)
class Case:
    """Live sessions of a replica, seconds of a tool, the engine, and True for a trainer's batches beside the agents."""

    sessions: int
    tool_s: float
    prefill_tokens_per_s: int
    kv_tokens: int
    max_num_seqs: int
    has_batches: bool

    def sources(self) -> Iterator[Source]:
        yield Agents(
            users=_REPLICAS * self.sessions, rounds=3, turns=10, first=_log_normal(2000, 8000),
            response=_log_normal(300, 2000), tool=_log_normal(1500, 8000), tool_s=self.tool_s, max_context=32_768,
        )  # fmt: skip
        if self.has_batches:
            yield Grpo(
                prompts=64, samples=8, batches=4, epochs=1, prompt=_log_normal(512, 1024),
                response=_log_normal(1024, 8192),
            )  # fmt: skip

    def time_s(self, share: float | None, seed: int) -> float:
        """Return the virtual seconds of the workload of a seed."""
        engine = {"kind": "sim", "num_replicas": _REPLICAS, "max_num_seqs": self.max_num_seqs}
        config = Config.model_validate({"engine": engine, "gateway": {"session_kv_share": share}})
        speed = SetSpeed(
            max_num_seqs=self.max_num_seqs, kv_tokens=self.kv_tokens, base_s=0.007, sequence_s=0.00003, context_s=0.0,
            prefill_token_s=1 / self.prefill_tokens_per_s,
        )  # fmt: skip
        workload = Workload([source.stream(seed) for source in self.sources()])
        return simulated(config, {"engine": speed}, workload, by_the_gateway).makespan_s


def _log_normal(mean: float, longest: int) -> LogNormal:
    return LogNormal(Lengths(mean, longest), 1.0)


def grid() -> list[Case]:
    axes = _SESSIONS, _TOOL_S, _PREFILL_TOKENS_PER_S, _KV_TOKENS, _MAX_NUM_SEQS, (False, True)
    return [Case(*values) for values in itertools.product(*axes)]


def ratios_of(case: Case, share: float, seeds: Iterable[int]) -> list[float]:
    """Return the time with admission over that without, for each workload."""
    return [case.time_s(share, seed) / case.time_s(None, seed) for seed in seeds]


def _measured(case: Case, share: float) -> list[float]:
    ratios = ratios_of(case, share, range(1))
    return ratios + ratios_of(case, share, range(1, 5)) if ratios[0] > SUSPECT else ratios


def _print_bands(ratios: Sequence[float]) -> None:
    for low, high in itertools.pairwise((0.0, *_BOUNDS, float("inf"))):
        count = sum(low < ratio <= high for ratio in ratios)
        print(f"above {low:4.2f}, at most {high:4.2f}: {count} of {len(ratios)}")
    print(f"mean {fmean(ratios):.3f}, least {min(ratios):.3f}, most {max(ratios):.3f}")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.scheduling.admission", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--cases", type=int, default=300, help="drawn out of the 1,920")
    parser.add_argument("--draw", type=int, default=1, help="seed of the draw")
    parser.add_argument("--share", type=float, default=1.0, help="gateway.session_kv_share")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    found = []
    for number, case in enumerate(Random(args.draw).sample(grid(), args.cases), start=1):
        ratios = _measured(case, args.share)
        found.append({**asdict(case), "ratios": ratios})
        print(f"{number:4} {fmean(ratios):.3f} of {len(ratios)} {case}", flush=True)
    _print_bands([fmean(one["ratios"]) for one in found])
    if args.json:
        args.json.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
