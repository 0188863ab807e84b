"""Workloads on simulated engines over HTTP, beside the same workloads in virtual time.

    python -m loadtests.studies.scheduling.simulated [KEY=VALUE ...]

Both sides have the engines' speeds. Engines are slow here, so that the machine's own speed is no part of the figures;
the samples of a group are equally long, since a request has one limit.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence

import aiohttp

from gateway.config.load import load
from gateway.config.schema import Config
from loadtests.fleet import LocalFleet
from loadtests.studies.engine_counts import EngineCounts, pages_of
from loadtests.studies.scheduling.player import Player, p99, with_equal_samples
from tuning.plan.gpu import GPUS
from tuning.plan.workload import Lengths
from tuning.simulate.placements import by_the_gateway
from tuning.simulate.runs import Source
from tuning.simulate.simulation import simulated
from tuning.simulate.speed import speed_of
from tuning.simulate.workloads.agents import Agents
from tuning.simulate.workloads.grpo import Grpo
from tuning.simulate.workloads.lengths import LogNormal
from tuning.simulate.workloads.workload import Stream, Workload

_ENGINES = (
    "engine.kind=sim", "engine.num_replicas=4", "engine.max_num_seqs=8", "engine.sim.decode_step_s=0.02",
    "engine.sim.decode_step_per_seq_s=0.0005", "engine.sim.prefill_tokens_per_s=4000", "engine.sim.kv_tokens=20000",
    "gateway.ledger=null", "gateway.port=0",
)  # fmt: skip
_TIMEOUT_S = 600.0


def _log_normal(mean: float, longest: int) -> LogNormal:
    return LogNormal(Lengths(mean, longest), 1.0)


_WORKLOADS: dict[str, Source] = {
    "grpo": Grpo(
        prompts=32, samples=4, batches=2, epochs=1, prompt=_log_normal(100, 400), response=_log_normal(100, 600)
    ),
    "agents": Agents(
        users=32, rounds=2, turns=4, first=_log_normal(300, 1000), response=_log_normal(40, 200),
        tool=_log_normal(200, 800), tool_s=1.0, max_context=4000,
    ),
}  # fmt: skip


async def _over_http(config: Config, stream: Stream) -> dict[str, float]:
    fleet = LocalFleet(config, ())
    infos, (gateway,) = await fleet.start()
    try:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            player, began = Player(gateway.url, http), time.monotonic()
            await player.play(stream, _TIMEOUT_S)
            seconds = time.monotonic() - began
            if player.errors:
                raise RuntimeError(f"{len(player.errors)} requests failed, the first: {player.errors[0]}")
            counts = EngineCounts.of(await pages_of(http, [info.url for info in infos]))
            return {"time": seconds, "p99": p99(player.latencies), "cached": counts.found / counts.looked_up}
    finally:
        await fleet.stop()


def _in_virtual_time(config: Config, stream: Stream) -> dict[str, float]:
    speed = speed_of("engine", config.engine, GPUS["H200"], None, 0.0)
    found = simulated(config, {"engine": speed}, Workload([stream]), by_the_gateway)
    return {"time": found.makespan_s, "p99": found.p99_s, "cached": found.found}


def main(argv: Sequence[str]) -> int:
    config = load(None, [*_ENGINES, *argv])
    line: Callable[..., str] = "{:8} {:8} {:>10} {:>10} {:>8}".format
    print(line("workload", "figure", "over HTTP", "simulated", "ratio"))
    for name, source in _WORKLOADS.items():
        stream = with_equal_samples(source.stream(0))
        expected, found = _in_virtual_time(config, stream), asyncio.run(_over_http(config, stream))
        for figure, value in found.items():
            print(line(name, figure, f"{value:.2f}", f"{expected[figure]:.2f}", f"{expected[figure] / value:.3f}"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
