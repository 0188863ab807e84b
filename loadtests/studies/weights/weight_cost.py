"""The cost of weight updates for rollouts: the same load with and without updates, in alternating runs.

    python -m loadtests.studies.weights.weight_cost -c FILE.yaml --transport nccl --device cuda:0 --json out.json
    python -m loadtests.studies.weights.weight_cost -c FILE.yaml --transport store weights.in_flight=drain
    python -m loadtests.studies.weights.weight_cost -c FILE.yaml \
        --variant "staged: transport=nccl weights.relay=never" \
        --variant "flat: transport=nccl weights.relay=never weights.stage=never" \
        --variant "relay: transport=nccl weights.relay=always weights.relay_device=cuda:1" --restores 2

Starts the engines, a gateway over them, without Ray, and a trainer's process that pushes weights of the served model's
shapes. Variants are settings of the gateway over the file's: one after the other has the same engines. A pair is one
run of the load alone and one with up to `--updates` spread over it, whose extra time, by update, is the work that an
update costs. The updates' own records have the time for which generation stood still, and the time of each step. An
update that ends after the load of its run, as where it waited for the copy of the version before, is counted as late,
and is in no figure. `--restores` are updates refused by the canary, and, of more than 2 GiB, updates that their trainer
gives up half sent, all beside the load: their figures are the time for which they stopped generation, and the times
from the refusal until all serve the version before, and to its first completion, which waits behind the load's prompts.
TRL's client sends no log-probs, so the canary refuses NaN of it.
"""

import argparse
import asyncio
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import aiohttp
import orjson

from engines.errors import ConfigError, EngineStartFailed
from engines.types import ReplicaInfo
from gateway.config.load import load as load_config
from gateway.weights.updates.record import num_bytes as bytes_of
from loadtests.fleet import LocalFleet
from loadtests.studies.clients import ClientPool, Stream, Totals, total
from loadtests.studies.weights.pusher import Flaw, Pushed, Pusher, Way
from loadtests.workloads import LengthMix, Workload
from trainer_client.transports.sender import TransportName

_WAYS: tuple[Way, ...] = (*get_args(TransportName), "trl")
_COPY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the load; a quiet one has no updates. `updates` are the gateway's records. `ended` is the Unix time of
    the last reply."""

    pair: int
    is_quiet: bool
    wall_s: float
    ended: float
    tokens: int
    errors: list[str]
    pushed: list[Pushed]
    updates: list[dict[str, Any]]

    @property
    def beside(self) -> list[dict[str, Any]]:
        """The records of the updates that ended before the load did."""
        return [record for record in self.updates if _ended(record) <= self.ended]


@dataclass(frozen=True, slots=True)
class Restore:
    """A refused update. `seconds` from its end to the first completion, made by `version`, and `serving_s` until the
    last replica served that version again; 0 where none was overwritten. `stopped_s` is the time for which the update
    itself stopped generation. `source` is where replicas had that version from by then, "" where a replica served it
    that was not overwritten. `beside` is False where the load had ended before that completion."""

    flaw: Flaw
    seconds: float
    serving_s: float
    version: int
    staged: bool
    beside: bool
    stopped_s: float
    error: str
    source: str

    def told(self) -> str:
        way = ("staged, " if self.staged else "") + ("" if self.beside else "after the load, ")
        source = f" from {self.source}" if self.source else ""
        return (
            f"refused ({way}{self.flaw}): generation stopped for {self.stopped_s:.3f} s, and back at version "
            f"{self.version}{source} after {self.serving_s:.3f} s, with its first completion after {self.seconds:.3f} s"
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings of the gateway and the trainer's transport."""

    name: str
    transport: Way
    overrides: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, transport: Way | None) -> "Variant":
        """Parse `NAME: transport=nccl KEY=VALUE`. Raise `ConfigError` without a transport."""
        name, _, settings = text.partition(":")
        told = dict(word.partition("=")[::2] for word in shlex.split(settings))
        asked = told.pop("transport", transport)
        chosen = next((known for known in _WAYS if known == asked), None)
        if chosen is None:
            raise ConfigError(f"variant {name!r} names no transport: say transport=store, gloo, nccl or trl")
        return cls(name.strip(), chosen, tuple(f"{key}={value}" for key, value in told.items()))


class Bench:
    """One gateway, its clients and a trainer."""

    def __init__(
        self, url: str, pool: ClientPool, pusher: Pusher, args: argparse.Namespace, *, replicas: int, restores: int
    ) -> None:
        self._url = url
        self._pool = pool
        self._pusher = pusher
        self._args = args
        self._replicas = replicas
        self._num_restores = restores
        self.runs: list[Run] = []
        self.restores: list[Restore] = []
        self.restore_errors: list[str] = []

    async def measure(self) -> None:
        """Run all pairs, after an unrecorded run of one round. The order alternates between pairs."""
        expected_s = (await self._run(-1, 0.0, is_quiet=True, rounds=1)).wall_s * self._args.rounds
        opened = await asyncio.to_thread(self._pusher.push)  # opens the group
        await self._until_kept(opened)
        for pair in range(self._args.pairs):
            both = [False] if self._args.no_quiet_runs else [True, False]
            for is_quiet in both[:: -1 if pair % 2 else 1]:
                run = await self._run(pair, expected_s, is_quiet=is_quiet, rounds=self._args.rounds)
                self.runs.append(run)
                if is_quiet == both[0]:
                    expected_s = run.wall_s
                if run.pushed:
                    await self._until_kept(run.pushed[-1])
        await self._refuse()

    async def _refuse(self) -> None:
        """Have updates refused beside the load, which begins anew where it ends before them."""
        loads: list[asyncio.Task[tuple[Totals, float]]] = []
        for number, flaw in enumerate(self._pusher.flaws() * self._num_restores):
            if not loads or loads[-1].done():
                loads.append(self._loaded(f"refused {number}", self._args.rounds))
            self.restores.append(await self._restore(flaw, loads[-1]))
        self.restore_errors = [error for load in loads for error in (await load)[0].errors]

    async def _until_kept(self, pushed: Pushed) -> None:
        """Wait for the copy of a version in the store, which would slow the next run. A version may have none."""
        deadline = time.monotonic() + _COPY_S
        while pushed.version and time.monotonic() < deadline:
            store = (await self._ask("GET", "/status"))["weight_store"]
            if store["reason"] or pushed.version in store["versions"]:
                return
            await asyncio.sleep(0.1)

    async def _restore(self, flaw: Flaw, load: asyncio.Task[Any]) -> Restore:
        pushing = asyncio.create_task(asyncio.to_thread(self._pusher.push_in_vain, flaw))
        answers = []
        while not pushing.done():  # the trainer's own end of a refused push takes longer than a replica's
            answers.append(await self._answered())
        pushed = await pushing
        if not pushed.error:
            raise ConfigError("the canary let pass what it should not: weights.canary.enabled must be true")
        answers.append(await self._answered())
        refused, before = await self._records(2)
        if before["end"] != "committed":
            raise ConfigError(f"the update before the one to be refused failed: {pushed.error}")
        ended = _ended(refused)
        served, version = next((at, version) for at, version in answers if at > ended)
        sources = {one["taken_back"]["source"] for one in refused["replicas"].values() if "taken_back" in one}
        return Restore(
            flaw, served - ended, refused["seconds"].get("undo", 0.0), version, staged=refused["staged"],
            beside=not load.done(), stopped_s=refused["stopped_s"], error=pushed.error,
            source=", ".join(sorted(sources)),
        )  # fmt: skip

    async def _answered(self) -> tuple[float, int]:
        """Ask for one token; return the time of the reply and the version that made it."""
        reply = await self._ask("POST", "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1})
        return time.time(), reply["choices"][0]["weight_versions"][-1]["version"]

    async def _run(self, pair: int, expected_s: float, *, is_quiet: bool, rounds: int) -> Run:
        count = 0 if is_quiet else self._args.updates
        loaded = self._loaded(f"{pair}/{is_quiet}", rounds)
        began, pushed = time.monotonic(), []
        for update in range(count):
            due = began + expected_s * (update + 0.5) / count
            await asyncio.wait([loaded], timeout=max(0.0, due - time.monotonic()))
            if loaded.done():  # a push waits for the copy of the version before, and none may be beside no load
                break
            pushed.append(await asyncio.to_thread(self._pusher.push))
        totals, ended = await loaded
        errors = totals.errors + [push.error for push in pushed if push.error]
        run = Run(
            pair=pair, is_quiet=is_quiet, wall_s=totals.wall_s, ended=ended, tokens=totals.tokens, errors=errors,
            pushed=pushed, updates=await self._records(len(pushed)),
        )  # fmt: skip
        name = f"pair {pair + 1}" if pair >= 0 else "warm-up"
        print(f"{name} {len(pushed)} updates {run.wall_s:8.2f} s {len(errors)} errors", *errors[:2], file=sys.stderr)
        return run

    def _loaded(self, name: str, rounds: int) -> "asyncio.Task[tuple[Totals, float]]":
        return asyncio.create_task(asyncio.to_thread(self._load, name, rounds))

    def _load(self, name: str, rounds: int) -> tuple[Totals, float]:
        """Run the load with prompts of this name, which no other run has. Return its totals and the Unix time of its
        end."""
        args = self._args
        workload = Workload(prompts=1, samples=1, prompt_tokens=args.prompt_tokens, max_tokens=args.max_tokens)
        callers = range(args.streams * self._replicas)
        seeds = [tuple(f"{name}/{caller}/{turn}" for turn in range(rounds)) for caller in callers]
        streams = [Stream(url=self._url, workload=workload, seeds=own, stream=False) for own in seeds]
        outcomes = self._pool.run(streams)
        return total(outcomes), time.time()

    async def _records(self, count: int) -> list[dict[str, Any]]:
        """Return the gateway's records of the last `count` updates."""
        records: list[dict[str, Any]] = (await self._ask("GET", "/v1/weight_updates"))["weight_updates"]
        return records[:count]

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=self._args.timeout_s)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, f"{self._url}{path}", json=body) as reply,
        ):
            reply.raise_for_status()
            answer: dict[str, Any] = await reply.json()
        return answer


def summarise(name: str, runs: Sequence[Run], num_bytes: int) -> dict[str, Any]:
    """Return the row of a variant. Seconds are medians of the updates beside the load; `lost_s` is lost work per such
    update, and `late` counts the others."""
    quiet, ours = {run.pair: run for run in runs if run.is_quiet}, [run for run in runs if not run.is_quiet]
    records = [record for run in ours for record in run.beside]
    pairs = [(run, quiet[run.pair]) for run in ours if run.beside and run.pair in quiet]
    lost = [(run.wall_s - alone.wall_s) / len(run.beside) for run, alone in pairs]
    speed = _median(run.tokens / run.wall_s for run in quiet.values()) or 0.0
    names = dict.fromkeys(step for record in records for step in record["seconds"])
    steps = {step: _median(record["seconds"].get(step) for record in records) for step in names}
    moved = steps.get("transfer") or steps.get("load")
    return {
        "variant": name,
        "updates": len(records),
        "late": sum(len(run.updates) for run in ours) - len(records),
        "failed": sum(bool(push.error) for run in ours for push in run.pushed),
        "lost_s": statistics.median(lost) if lost else None,
        "lost_s_of_pairs": lost,
        "lost_tokens": statistics.median(lost) * speed if lost else None,
        "stopped_s": _median(record["stopped_s"] for record in records),
        "stopped_s_max": max((record["stopped_s"] for record in records), default=None),
        "push_s": _median(push.seconds for run in ours for push in run.pushed),
        "moved_gb_per_s": num_bytes / moved / 1e9 if moved else None,
        "staged": sum(record["staged"] for record in records),
        "seconds": steps,
        "errors": sum(len(run.errors) for run in ours),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text."""
    head = ["variant", "updates", "late", "work lost s", "tokens lost", "stopped s", "at most", "push s", "GB/s"]
    keys = ("variant", "updates", "late", "lost_s", "lost_tokens", "stopped_s", "stopped_s_max", "push_s")
    cells = [[*head, "errors"], *([_cell(row[key]) for key in (*keys, "moved_gb_per_s", "errors")] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def steps_of(row: dict[str, Any]) -> str:
    """Return the medians of the steps as text. A staged transfer takes place while rollouts go on."""
    steps = ", ".join(f"{step} {seconds:.3f}" for step, seconds in row["seconds"].items())
    return f"{row['variant']}: {row['staged']} of {row['updates']} staged; {steps} s"


def _ended(record: dict[str, Any]) -> float:
    began: float = datetime.fromisoformat(record["started"]).timestamp()
    return began + float(record["age_s"])


def _median(values: Iterator[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _write(report: dict[str, Any], file: Path | None) -> None:
    """Write the results so far, so that an interrupted run keeps them."""
    if file:
        file.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))


async def _measured(args: argparse.Namespace) -> dict[str, Any]:
    config = load_config(args.config, args.overrides)
    variants = [Variant.parse(text, args.transport) for text in args.variant or [args.transport or "as it is"]]
    fleet = LocalFleet(config)
    try:
        infos = await fleet.start_engines()
        size = _checkpoint_bytes(infos[0])
        report: dict[str, Any] = {
            "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "cpus": os.cpu_count(),
            "streams": args.streams, "prompt_tokens": str(args.prompt_tokens), "max_tokens": args.max_tokens,
            "replicas": len(infos), "engine": f"{infos[0].kind} {infos[0].engine_version}", "bytes": size,
            "variants": [],
        }  # fmt: skip
        with ClientPool(args.clients, args.timeout_s) as pool:
            for variant in variants:
                print(f"{variant.name}:", file=sys.stderr)
                settings = load_config(args.config, [*args.overrides, *variant.overrides])
                async with fleet.gateway(settings, infos) as gateway:
                    restores = args.restores if settings.weights.store else 0  # without a store there is no rollback
                    await _measure(variant, gateway.url, pool, args, restores, report)
    finally:
        await fleet.stop()
    return report


def _checkpoint_bytes(info: ReplicaInfo) -> int:
    tensors = info.tensors or ()
    return bytes_of({"dtype_names": [one.dtype for one in tensors], "shapes": [one.shape for one in tensors]})


async def _measure(
    variant: Variant, url: str, pool: ClientPool, args: argparse.Namespace, restores: int, report: dict[str, Any]
) -> None:
    """Measure one variant. The report has the results so far also where it fails."""
    with await asyncio.to_thread(Pusher, url, variant.transport, args.device, args.timeout_s) as pusher:
        bench = Bench(url, pool, pusher, args, replicas=report["replicas"], restores=restores)
        report["bytes"] = pusher.num_bytes
        try:
            await bench.measure()
        finally:
            report["variants"].append(
                {
                    "name": variant.name,
                    "transport": variant.transport,
                    "settings": variant.overrides,
                    "summary": summarise(variant.name, bench.runs, report["bytes"]),
                    "restore_errors": bench.restore_errors,
                    "restores": [asdict(restore) for restore in bench.restores],
                    "runs": [asdict(run) for run in bench.runs],
                }
            )
            _write(report, args.json)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study. The exit status is 1 if an update failed or a rollout was not delivered."""
    args = _parse_arguments(argv)
    try:
        report = asyncio.run(_measured(args))
    except (ConfigError, EngineStartFailed) as error:
        print(error, file=sys.stderr)
        return 2
    rows = [variant["summary"] for variant in report["variants"]]
    print(table(rows), *map(steps_of, rows), sep="\n")
    for variant in report["variants"]:
        print(*(f"{variant['name']}: {Restore(**restore).told()}" for restore in variant["restores"]), sep="\n")
    print(f"{report['bytes'] / 1e9:.3f} GB to {report['replicas']} replicas")
    return 1 if any(one["restore_errors"] or one["summary"]["errors"] for one in report["variants"]) else 0


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.weights.weight_cost", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("-c", "--config", type=Path, metavar="FILE")
    add("--transport", choices=_WAYS, help="of variants without their own; trl: TRL's own client")
    add("--variant", action="append", metavar="NAME: KEY=VALUE ...", help="a variant; repeatable")
    add("--device", default="cpu", help="device of the trainer's tensors, such as cuda:1")
    add("--updates", type=int, default=2, help="updates in each run")
    add("--restores", type=int, default=0, help="refused updates per variant")
    add("--pairs", type=int, default=5)
    add("--no-quiet-runs", action="store_true", help="leave out the runs without updates; work lost is unknown then")
    add("--streams", type=int, default=64, help="callers per replica")
    add("--rounds", type=int, default=2, help="sequential requests of each caller in a run")
    add("--prompt-tokens", type=LengthMix.parse, default=LengthMix.parse("256"))
    add("--max-tokens", type=int, default=512)
    add("--clients", type=int, default=2, metavar="N", help="client processes")
    add("--timeout-s", type=float, default=300.0, help="limit on a run, and on each wait of a push")
    add("--json", type=Path, metavar="FILE", help="write every run and the summary")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings that override the file's")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(main())
