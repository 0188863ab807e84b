"""Old and new placement before the same engines, run after run: agents whose KV does not fit, and long-tailed batches.

    python -m loadtests.studies.scheduling.placement -c FILE --workload agents --sessions 96 --json out.json
    python -m loadtests.studies.scheduling.placement -c FILE --workload batch --prompts 256 --samples 4

| workload | old | new |
| --- | --- | --- |
| `agents` | `gateway.session_kv_share=null`: all sessions are admitted | `--share` of a replica's KV |
| `batch` | requests without a length | `expected_tokens` in each request: the longest begins first |
| `groups` | all samples of a prompt on one replica | at most `--together` of them in a piece |

Starts the engines without Ray, and a gateway of its own for each run, which has learned nothing. A pair is one run of
either side, with the same lengths and times of tools, drawn by the number of the pair; its order alternates. Prompts
are new in each run. The work of a run is fixed: `--sessions` users for each replica with `--rounds` sessions each,
which report their ends, or one request for each prompt, all at once. Its figure is the time until the last token.

The effect is there where the fleet is short: of KV for `agents`, of places for a `batch` with more samples than twice
`engine.max_num_seqs` of all replicas, of `groups` for its replicas, where steps of more samples are longer. KV is made
short with `engine.kv_cache_memory_bytes` or `engine.extra.num_gpu_blocks_override` (vLLM),
`engine.extra.max_total_tokens` (SGLang) or `engine.sim.kv_tokens`.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from engines.errors import ConfigError, EngineStartFailed
from engines.types import ReplicaInfo
from gateway.config.load import load as load_config
from gateway.fleet.watch.engine_page import read_kv_tokens
from loadtests.fleet import LocalFleet
from loadtests.studies.engine_counts import EngineCounts, pages_of
from loadtests.studies.ratios import median_lower_bound, pair_ratios
from loadtests.studies.scheduling.player import Player, p99, with_equal_samples
from tuning.plan.workload import Lengths
from tuning.simulate.runs import Source
from tuning.simulate.workloads.agents import Agents
from tuning.simulate.workloads.grpo import Grpo
from tuning.simulate.workloads.lengths import LogNormal
from tuning.simulate.workloads.workload import Stream

# A ledger for each gateway of the study would stay behind.
_SETTINGS = ("gateway.port=0", "gateway.ledger=null")
_READY_S = 60.0
_LOOK_S = 0.1
_WARM_UP = -1
_WARM_UP_CHAINS, _WARM_UP_ASKS = 8, 2
_ERRORS_SHOWN = 3


class Side(StrEnum):
    OLD = "old"
    NEW = "new"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the workload; `cached` is the share of prompt tokens found in prefix caches, None where unknown."""

    pair: int
    side: Side
    wall_s: float
    tokens: int
    p99_s: float
    cached: float | None
    preempted: float
    errors: list[str]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


class Study:
    """Runs a workload on engines that stay, behind a gateway of its own for each run."""

    def __init__(self, args: argparse.Namespace, source: Source, fleet: LocalFleet, infos: list[ReplicaInfo]) -> None:
        self._args = args
        self._source = source
        self._fleet = fleet
        self._infos = infos
        self.runs: list[Run] = []

    async def warm_up(self) -> None:
        """Run the beginnings of the shortest chains, which is no result."""
        await self._run(_WARM_UP, Side.OLD, _beginnings(self._source.stream(_WARM_UP), len(self._infos)))

    async def measure_pair(self, pair: int) -> None:
        stream = self._source.stream(pair)
        for side in list(Side)[:: -1 if pair % 2 else 1]:
            self.runs.append(await self._run(pair, side, stream))

    async def _run(self, pair: int, side: Side, stream: Stream) -> Run:
        args, urls = self._args, [info.url for info in self._infos]
        settings = load_config(args.config, [*_SETTINGS, *args.overrides, *_placement(args, side)])
        async with self._fleet.gateway(settings, self._infos) as gateway, self._http() as http:
            await _ready(http, gateway.url)
            hints = args.workload == "batch" and side is Side.NEW
            player = Player(gateway.url, http, salt=f"{pair} {side}", hints=hints)
            before, began = EngineCounts.of(await pages_of(http, urls)), time.monotonic()
            await player.play(with_equal_samples(stream), args.timeout_s)
            wall_s = time.monotonic() - began
            counts = EngineCounts.of(await pages_of(http, urls)).since(before)
        run = Run(
            pair=pair, side=side, wall_s=wall_s, tokens=player.tokens, p99_s=p99(player.latencies),
            cached=counts.cached, preempted=counts.preempted, errors=player.errors,
        )  # fmt: skip
        _say(run)
        return run

    def _http(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self._args.timeout_s)
        return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


def _placement(args: argparse.Namespace, side: Side) -> list[str]:
    """Return the settings of a side's gateway."""
    is_old = side is Side.OLD
    if args.workload == "groups":
        return [f"gateway.samples_together={'null' if is_old else args.together}"]
    if args.workload == "batch":
        return []
    return [f"gateway.session_kv_share={'null' if is_old else args.share}"]


def _source(args: argparse.Namespace, replicas: int) -> Source:
    """Return the workload. Raise `ConfigError` for lengths that are none."""

    def lengths(option: str) -> LogNormal:
        return LogNormal(Lengths.parse(vars(args)[option.strip("-")], option), args.sigma)

    if args.workload != "agents":
        return Grpo(
            prompts=args.prompts, samples=args.samples, batches=1, epochs=1, prompt=lengths("--prompt"),
            response=lengths("--response"),
        )  # fmt: skip
    return Agents(
        users=args.sessions * replicas, rounds=args.rounds, turns=args.turns, first=lengths("--first"),
        response=lengths("--turn"), tool=lengths("--tool"), tool_s=args.tool_s, max_context=args.max_context,
        reports_ends=True,
    )  # fmt: skip


def _beginnings(stream: Stream, replicas: int) -> Stream:
    ranked = [sorted(phase, key=lambda chain: chain[0].longest) for phase in stream]
    return [[chain[:_WARM_UP_ASKS] for chain in phase[: _WARM_UP_CHAINS * replicas]] for phase in ranked]


async def _ready(http: aiohttp.ClientSession, url: str) -> None:
    """Wait until a gateway has all replicas, and let it read their pages, as it does by itself every few seconds."""
    async with asyncio.timeout(_READY_S):
        while (await http.head(f"{url}/health")).status != 200:  # noqa: ASYNC110 it is another process
            await asyncio.sleep(_LOOK_S)
    await pages_of(http, [url])


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """Return medians of both sides, and the ratios of new to old; those of speed have a lower bound. No ratios where a
    run delivered nothing."""
    sides = {side: [run for run in runs if run.side is side] for side in Side}
    rows = {side.value: _medians(ours) for side, ours in sides.items()}
    if not all(run.tokens for run in runs):
        return {**rows, "ratio": None}
    by_pair = [sorted(ours, key=lambda run: run.pair) for ours in sides.values()]
    old, new = ([run.tokens_per_s for run in ours] for ours in by_pair)
    speeds = pair_ratios(new, old)
    times = pair_ratios(*([run.wall_s for run in ours] for ours in reversed(by_pair)))
    return {
        **rows,
        "ratio": {
            "tokens_per_s": statistics.median(speeds),
            "lower_bound_95": median_lower_bound(speeds),
            "pairs": speeds,
            "time": statistics.median(times),
        },
    }


def _medians(runs: Sequence[Run]) -> dict[str, Any]:
    cached = [run.cached for run in runs if run.cached is not None]
    return {
        "runs": len(runs),
        "wall_s": statistics.median(run.wall_s for run in runs),
        "tokens_per_s": statistics.median(run.tokens_per_s for run in runs),
        "p99_s": statistics.median(run.p99_s for run in runs),
        "cached": statistics.median(cached) if cached else None,
        "preempted": statistics.median(run.preempted for run in runs),
        "errors": sum(len(run.errors) for run in runs),
    }


def table(summary: dict[str, Any]) -> str:
    """Return the summary as text."""
    line = "{:>9} {:>5} {:>9} {:>9} {:>8} {:>7} {:>10} {:>7}".format
    lines = [line("placement", "runs", "time s", "tokens/s", "p99 s", "cached", "preempted", "errors")]
    for side in Side:
        row = summary[side]
        lines.append(
            line(side, row["runs"], f"{row['wall_s']:.2f}", f"{row['tokens_per_s']:.0f}", f"{row['p99_s']:.2f}",
                 _share(row["cached"]), f"{row['preempted']:.0f}", row["errors"])
        )  # fmt: skip
    if ratio := summary["ratio"]:
        pairs = ", ".join(f"{value:.3f}" for value in ratio["pairs"])
        lines.append(
            f"new over old: tokens/s {ratio['tokens_per_s']:.3f} >= {ratio['lower_bound_95']:.3f} (pairs {pairs}), "
            f"time {ratio['time']:.3f}"
        )
    return "\n".join(lines)


async def _kv_tokens(infos: Sequence[ReplicaInfo]) -> list[int]:
    """Return the size of each engine's KV cache, read as a gateway does. Raise `ConfigError` where one lacks it."""
    async with aiohttp.ClientSession() as http:
        found = [read_kv_tokens(page) for page in await pages_of(http, [info.url for info in infos])]
    known = [tokens for tokens in found if tokens is not None]
    if len(known) < len(found):
        raise ConfigError("/metrics of an engine names no size of its KV cache, so that no session would wait")
    return known


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _say(run: Run) -> None:
    name = f"pair {run.pair + 1}" if run.pair >= 0 else "warm-up"
    text = (
        f"{name} {run.side} {run.wall_s:8.2f} s {run.tokens_per_s:8.0f} tok/s, cached {_share(run.cached)}, preempted"
    )
    print(text, f"{run.preempted:.0f},", f"{len(run.errors)} errors", file=sys.stderr, flush=True)
    for error in run.errors[:_ERRORS_SHOWN]:
        print("   ", error[:500], file=sys.stderr)


async def _measured(args: argparse.Namespace) -> dict[str, Any]:
    config = load_config(args.config, [*_SETTINGS, *args.overrides])
    source = _source(args, sum(group.num_replicas for group in config.groups.values()))
    fleet, began = LocalFleet(config, []), time.monotonic()
    try:
        infos = await fleet.start_engines()
        study = Study(args, source, fleet, infos)
        report: dict[str, Any] = {
            "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "engine": f"{infos[0].kind} {infos[0].engine_version}",
            "kv_tokens": await _kv_tokens(infos),
            "cpus": os.cpu_count(),
            "options": {name: str(value) for name, value in vars(args).items()},
        }
        print(f"{len(infos)} replicas of {report['engine']}, KV for {report['kv_tokens']} tokens", file=sys.stderr)
        await study.warm_up()
        for pair in range(args.pairs):
            if time.monotonic() - began > args.budget_s:
                print(f"stopped after {pair} pairs: {args.budget_s:g} s are over", file=sys.stderr)
                break
            await study.measure_pair(pair)
            report |= {"summary": summarise(study.runs), "runs": [asdict(run) for run in study.runs]}
            # After each pair, so that an interrupted run keeps its results.
            if args.json:
                args.json.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    finally:
        await fleet.stop()
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study. The exit status is 1 if a request failed, or if no pair was run."""
    args = _parse_arguments(argv)
    try:
        report = asyncio.run(_measured(args))
    except (ConfigError, EngineStartFailed) as error:
        print(error, file=sys.stderr)
        return 2
    summary = report.get("summary")
    if summary is None:
        print("no pair was run: give --budget-s more seconds", file=sys.stderr)
        return 1
    print(table(summary))
    return 1 if any(summary[side]["errors"] for side in Side) else 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.scheduling.placement", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("-c", "--config", type=Path, metavar="FILE")
    add("--workload", choices=("agents", "batch", "groups"), required=True)
    add("--pairs", type=int, default=3)
    add("--share", type=float, default=0.8, help="agents: gateway.session_kv_share of the new placement")
    add("--together", type=int, default=1, help="groups: gateway.samples_together of the new placement")
    add("--sessions", type=int, default=64, help="agents: live sessions for each replica")
    add("--rounds", type=int, default=2, help="agents: sessions of a user, in turn")
    add("--turns", type=int, default=6, help="agents: mean turns of a session")
    add("--first", default="512:2048", metavar="MEAN[:MAX]", help="agents: tokens of a first prompt")
    add("--turn", default="128:512", metavar="MEAN[:MAX]", help="agents: tokens of a turn's completion")
    add("--tool", default="256:1024", metavar="MEAN[:MAX]", help="agents: tokens that a tool adds")
    add("--tool-s", type=float, default=1.0, help="agents: mean seconds of a tool")
    add("--max-context", type=int, default=8192, help="agents: tokens at which a session ends")
    add("--prompts", type=int, default=128, help="batch and groups: prompts, a request each")
    add("--samples", type=int, default=4, help="batch and groups: samples of a prompt")
    add("--prompt", default="256", metavar="MEAN[:MAX]", help="batch and groups: tokens of a prompt")
    add("--response", default="512:4096", metavar="MEAN[:MAX]", help="batch and groups: tokens of a completion")
    add("--sigma", type=float, default=1.0, help="deviation of the logarithm of lengths")
    add("--timeout-s", type=float, default=300.0, help="limit on a run")
    add("--budget-s", type=float, default=float("inf"), help="start no further pair after this many seconds")
    add("--json", type=Path, metavar="FILE", help="write every run and the summary")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings that override the file's")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(main())
