"""The part of the chaos campaign that hurts rollouts: faults, deaths at certain moments, and batches with losses.

Two fleets of simulated engines run beside each other under the same load: one is hurt, its undisturbed twin is the
measure of goodput.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from engines.config import SimConfig
from loadtests.chaos.clients.callers import Callers, Record
from loadtests.chaos.clients.tally import Tally
from loadtests.chaos.faults import CallFailed, Hung, Newest, Trainer, World, until
from loadtests.chaos.process_fleet import ProcessFleet, fleet_config, running
from loadtests.chaos.rollouts.faults import ROLLOUT_FAULTS, Scene
from loadtests.chaos.rollouts.measures import Batches, Goodput, Kept, go_on, kept_at, kill_one, stop_one

SIM = SimConfig(decode_step_s=0.03, load_s=0.1)
KEPT = {
    f"{victim} killed at {share:.0%} of its rollouts": (share, kill)
    for victim, kill in (("replica", ProcessFleet.kill), ("replica's process", ProcessFleet.kill_processes))
    for share in (0.25, 0.5, 0.9)
}
BATCHES = {
    "batches with a replica killed": Batches(kill_one),
    "batches with a replica stopped": Batches(stop_one),
    "20 batches of 2.4 s with four stops": Batches(stop_one, count=20, nth=5, lengths=(80,) * 4),
}
OF_ROLLOUTS = (*ROLLOUT_FAULTS, *KEPT, *BATCHES)
_TOKENS, _WAVE_TOKENS = 96, 2048
_EACH = 3  # clients of each kind for ten replicas
_BOUND_S = 120.0
_WAVE_BOUND_S = 300.0
_UP_S = 180.0
_MEASURED_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one fault. `again` are tokens that were made and not delivered as a share of the delivered ones,
    `goodput` the tokens delivered from the fault on as a share of the undisturbed fleet's, `retries` the errors after
    which plain clients sent a request again."""

    fault: str
    tally: Tally
    again: float | None = None
    goodput: float | None = None
    silence_s: float = 0.0
    whole_again_s: float = 0.0
    kept: Kept | None = None
    batches: tuple[Goodput, ...] = ()
    retries: dict[str, int] = field(default_factory=dict)
    problem: str = ""

    @property
    def is_right(self) -> bool:
        return self.tally.is_clean and not self.tally.failed and not self.problem


class Side:
    """One fleet with its trainer and clients."""

    def __init__(self, fleet: ProcessFleet, session: aiohttp.ClientSession) -> None:
        self.fleet = fleet
        self.newest = Newest()
        self.world = World(fleet.url, Trainer(fleet.url, self.newest, session), fleet.size)
        self.callers = Callers(fleet.url, SIM, self.newest, tokens=_TOKENS, bound_s=_BOUND_S)
        self.newcomers = Callers(fleet.url, SIM, self.newest, tokens=_TOKENS, bound_s=_BOUND_S)
        self.waves = Callers(fleet.url, SIM, self.newest, tokens=_WAVE_TOKENS, bound_s=_WAVE_BOUND_S)

    async def update(self) -> None:
        await self.world.trainer.join()
        await self.world.trainer.update()

    async def whole_again(self) -> None:
        """Return when all replicas have taken a new version."""
        await until(self.world.updated, _UP_S, "an update on all replicas after the fault")

    async def close(self) -> None:
        await self.callers.close()
        await self.newcomers.close()
        await self.waves.close()


async def hurt_rollouts(names: Sequence[str], replicas: int, seconds: float) -> list[Outcome]:
    """Inject every fault in turn into a whole fleet of `replicas`. `seconds` is the least length of each."""
    outcomes: list[Outcome] = []
    async with _sides(replicas) as (hurt, calm):
        for name in names:
            outcomes.append(await _bounded(name, hurt, calm, seconds))
            say(outcomes[-1])
            if outcomes[-1].problem:
                break  # the next fault has to meet a whole fleet
    return outcomes


@asynccontextmanager
async def _sides(replicas: int) -> AsyncIterator[tuple[Side, Side]]:
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        fleets = []
        for name in ("hurt", "calm"):
            (own := Path(folder) / name).mkdir()
            fleets.append(ProcessFleet(fleet_config(name, replicas, SIM, own), own))
        timeout = aiohttp.ClientTimeout(total=_BOUND_S)
        async with running(*fleets), aiohttp.ClientSession(timeout=timeout) as session:
            hurt, calm = (Side(fleet, session) for fleet in fleets)
            try:
                for side in (hurt, calm):
                    await until(side.world.serves, _UP_S, "the fleet to come up")
                yield hurt, calm
            finally:
                await hurt.close()
                await calm.close()


async def _bounded(name: str, hurt: Side, calm: Side, seconds: float) -> Outcome:
    if name in KEPT:
        return await _wave(name, hurt)
    if name in BATCHES:
        return await _batches(name, hurt, calm)
    return await _meet(name, hurt, calm, seconds)


async def _meet(name: str, hurt: Side, calm: Side, seconds: float) -> Outcome:
    """Inject one fault under load."""
    problem, hung = "", 0
    made_before = await hurt.fleet.made()
    hurt.newcomers.record = Record()
    for side in (hurt, calm):
        side.callers.start(max(1, hurt.fleet.size * _EACH // 10))
    began = time.monotonic()
    try:
        await asyncio.gather(hurt.update(), calm.update())
        began = time.monotonic()
        await ROLLOUT_FAULTS[name](Scene(hurt.fleet, hurt.newcomers, seconds / 2))
        await hurt.whole_again()
        whole_again_s = time.monotonic() - began
        await asyncio.sleep(max(_MEASURED_S, seconds - whole_again_s))
    except (Hung, CallFailed) as error:
        problem, hung, whole_again_s = str(error), int(isinstance(error, Hung)), float("nan")
    ended = time.monotonic()
    record, beside = await asyncio.gather(hurt.callers.stop(), calm.callers.stop())
    newcomers = hurt.newcomers.settled()
    record.tally.hung += hung
    record.tally.add(newcomers.tally)
    delivered = sum(tokens for _, tokens in (*record.deliveries, *newcomers.deliveries))
    return Outcome(
        fault=name,
        tally=record.tally,
        retries=dict(record.retries + newcomers.retries),
        again=(await hurt.fleet.made() - made_before) / max(1, delivered) - 1,
        goodput=record.tokens(began, ended) / max(1, beside.tokens(began, ended)),
        silence_s=record.longest_silence_s,
        whole_again_s=whole_again_s,
        problem=problem or _problem_beside(beside),
    )


async def _wave(name: str, hurt: Side) -> Outcome:
    hurt.waves.record = Record()
    kept = await kept_at(*KEPT[name], hurt.fleet, hurt.waves)
    await hurt.whole_again()
    return Outcome(fault=name, tally=hurt.waves.settled().tally, kept=kept)


async def _batches(name: str, hurt: Side, calm: Side) -> Outcome:
    hurt.waves.record, calm.waves.record = Record(), Record()
    run, batches = BATCHES[name], []
    for number in range(1, run.count + 1):
        batches.append(await run.run(number, hurt.fleet, hurt.waves, calm.waves, SIM.decode_step_s))
        if run.hurt is stop_one:
            go_on(hurt.fleet)
        if run.is_hurt(number):
            await hurt.whole_again()
    problem = _problem_beside(calm.waves.settled())
    return Outcome(fault=name, tally=hurt.waves.settled().tally, batches=tuple(batches), problem=problem)


def _problem_beside(record: Record) -> str:
    tally = record.tally
    is_right = tally.is_clean and not tally.failed
    return "" if is_right else f"the undisturbed fleet failed too: {tally.reasons}"


def say(outcome: Outcome) -> None:
    """Print one line for a fault, and the first reasons of what went wrong."""
    tally = outcome.tally
    counts = {
        "rollouts": tally.submitted, "lost": tally.lost, "failed": tally.failed, "duplicated": tally.duplicated,
        "stale": tally.stale, "wrong": tally.wrong, "hung": tally.hung, "retried": tally.retried,
    }  # fmt: skip
    shown = "  ".join(f"{name} {count}" for name, count in counts.items())
    print(f"{outcome.fault:<40} {shown}  {_measured(outcome)} {outcome.problem}", flush=True)
    for reason in tally.reasons:
        print("   ", reason)
    for error, count in outcome.retries.items():
        print(f"    retried {count} times after {error[:200]}")


def _measured(outcome: Outcome) -> str:
    if outcome.kept is not None:
        return f"tokens kept {outcome.kept.kept:.1%}"
    if outcome.batches:
        whole = sum(batch.calm_s for batch in outcome.batches) / sum(batch.hurt_s for batch in outcome.batches)
        return f"goodput {whole:.3f}: " + ", ".join(f"{batch.ratio:.3f}" for batch in outcome.batches)
    return (
        f"goodput {outcome.goodput or 0:.3f}  made again {outcome.again or 0:.2%}  "
        f"silent {outcome.silence_s:.1f} s  whole again {outcome.whole_again_s:.1f} s"
    )


def report(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return what a JSON file keeps of the outcomes."""
    return [
        asdict(outcome)
        | {"kept_share": outcome.kept and outcome.kept.kept, "batch_goodputs": [one.ratio for one in outcome.batches]}
        for outcome in outcomes
    ]
