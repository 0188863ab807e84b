"""A judge of sessions: agents work while engines and the gateway are killed, and each recorded token is computed again.

    python -m loadtests.sessions.judge [--tokens 1000000] [--agents 24] [--replicas 3] [--update-every 10]
                                       [--kill-every 30] [--kill-gateway-every 120]

It shares no code with the gateway: `agents.py` speaks plain HTTP, `oracle.py` knows prompts and versions alone. Records
are read by the trainer's client, whose counts of rows are compared. The exit status is 1 if anything differs, or if
less than 99.9 % of the tokens come as trainable rows.
"""

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from engines.config import SimConfig
from loadtests.chaos.faults import CallFailed, Newest, Trainer
from loadtests.chaos.process_fleet import ProcessFleet, fleet_config, healthy_within, running
from loadtests.sessions.agents import Agent, Gone
from loadtests.sessions.oracle import Json, Verdict, judge
from sim.model import SimModel
from trainer_client import RolloutClient, Sessions
from trainer_client.sessions.trajectories import counts_of, trajectories_of

_SIM = SimConfig(load_s=0.1, decode_step_s=0.004, mean_tokens=64, kv_tokens=4_000_000)
_KEY, _ADMIN = "judge-inference", "judge-admin"
_UP_S, _CALL_S = 120.0, 120.0
_LEAST = 0.999
ARRAYS = {"prompt_token_ids": "i", "token_ids": "i", "logprobs": "f"}
"""Fields of a call that come as bytes, and the type of their numbers."""


@dataclass
class Trial:
    """One run. `lost` are sessions whose agents gave up."""

    tokens: int
    verdict: Verdict = field(default_factory=Verdict)
    faults: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    lost: list[str] = field(default_factory=list)
    made: float = 0.0
    seconds: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.verdict.tokens >= self.tokens

    @property
    def delivered(self) -> float:
        """The share of recorded tokens in trainable rows."""
        return self.verdict.trainable / max(1, self.verdict.tokens)

    @property
    def is_right(self) -> bool:
        return not (self.verdict.differences or self.lost) and self.delivered >= _LEAST


async def tried(args: argparse.Namespace) -> Trial:
    """Run agents against a fleet of its own until so many tokens are judged."""
    trial, began = Trial(args.tokens), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sessions-") as folder:
        keys = {"inference_keys": [_KEY], "admin_keys": [_ADMIN], "trusted_networks": []}
        fleet = ProcessFleet(fleet_config("sessions", args.replicas, _SIM, Path(folder), **keys), Path(folder))
        admin = {"Authorization": f"Bearer {_ADMIN}"}
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=_CALL_S)
        async with (
            running(fleet),
            aiohttp.ClientSession(fleet.url, connector=connector, timeout=timeout) as http,
            aiohttp.ClientSession(fleet.url, timeout=timeout, headers=admin) as control,
            RolloutClient(fleet.url, api_key=_KEY) as client,
        ):
            await healthy_within(fleet.url, _UP_S)
            trainer = Trainer(fleet.url, Newest(), control)
            numbers = itertools.count()
            workers = [
                asyncio.create_task(_worker(args.seed, numbers, http, Sessions(client), trial))
                for _ in range(args.agents)
            ]
            faults = [
                asyncio.create_task(_updates(trainer, trial, args.update_every)),
                asyncio.create_task(_kills(fleet, trial, args.kill_every)),
                asyncio.create_task(_gateway_kills(fleet, trial, args.kill_gateway_every)),
            ]
            try:
                await asyncio.gather(*workers)
            finally:
                for task in (*workers, *faults):
                    task.cancel()
                await asyncio.gather(*workers, *faults, return_exceptions=True)
            await fleet.complete()
            trial.made = await fleet.made()
    trial.seconds = time.monotonic() - began
    return trial


async def _worker(
    seed: int, numbers: "itertools.count[int]", http: aiohttp.ClientSession, sessions: Sessions, trial: Trial
) -> None:
    while not trial.is_over:
        number = next(numbers)
        await _session(random.Random(f"{seed} {number}"), f"s{seed}-{number}", http, sessions, trial)


async def _session(
    draw: random.Random, name: str, http: aiohttp.ClientSession, sessions: Sessions, trial: Trial
) -> None:
    """Run one session to its end, judge its record, and let the gateway forget it."""
    opened = await sessions.begin(name, {"seed": name})
    path = f"/sessions/{name}" if draw.random() < 0.5 else ""
    dialect = draw.choice(("messages", "messages", "responses", "chat"))
    agent = Agent(http, path, opened.key, dialect, draw)
    try:
        await agent.work(draw.randint(4, 24), f"Task {name}\n")
    except Gone as error:
        trial.lost.append(f"{name}: {error}")
    trial.retried += agent.retried
    await sessions.freeze(name, draw.random(), wait_s=5.0)
    records = await records_of(sessions, name)
    judge(SimModel.of(_SIM), name, records, agent.answered, trial.verdict)
    session = await sessions.read(name)
    counts, rows = counts_of(session), trajectories_of(session)
    if counts.sampled != sum(len(call["token_ids"]) for call in records[1:-1]):
        trial.verdict.differ("rows", f"{name}: {counts} by the client")
    if sum(row.trainable for row in rows) != counts.trainable:
        trial.verdict.differ("rows", f"{name}: {[row.trainable for row in rows]} of {counts}")
    trial.verdict.trainable += counts.trainable
    trial.verdict.masked.update(counts.masked)
    await sessions.ack(name)


async def records_of(sessions: Sessions, name: str) -> list[Json]:
    """Return a session's record, with ids and log-probs as numbers."""
    records = await sessions.records(name)
    for record in records:
        given = {field: (kind, record.get(field)) for field, kind in ARRAYS.items()}
        record.update({field: array(kind, held).tolist() for field, (kind, held) in given.items() if held is not None})
    return records


async def _updates(trainer: Trainer, trial: Trial, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            await trainer.push()
            trial.faults["updates"] += 1
        except CallFailed as error:
            trial.faults["updates refused"] += 1
            print(f"update refused: {error}", flush=True)


async def _kills(fleet: ProcessFleet, trial: Trial, every_s: float) -> None:
    while every_s:
        await asyncio.sleep(every_s)
        await fleet.complete()
        with suppress(aiohttp.ClientError):
            await fleet.kill(trial.faults["engines killed"] % fleet.size)
            trial.faults["engines killed"] += 1


async def _gateway_kills(fleet: ProcessFleet, trial: Trial, every_s: float) -> None:
    while every_s:
        await asyncio.sleep(every_s)
        fleet.kill_gateway()
        trial.faults["gateways killed"] += 1


def rows_of(trial: Trial) -> list[tuple[str, str]]:
    """Return the table's rows."""
    verdict = trial.verdict
    return [
        ("sessions, calls, answers", f"{verdict.sessions}, {verdict.calls}, {verdict.answers}"),
        ("tokens recorded (made by engines)", f"{verdict.tokens} ({trial.made:.0f})"),
        ("differences", str(dict(verdict.differences) or 0)),
        ("tokens in trainable rows", f"{verdict.trainable} ({trial.delivered:.4%})"),
        ("masked, by reason", str(dict(verdict.masked))),
        ("roots, by reason", str(dict(verdict.roots))),
        ("faults", str(dict(trial.faults))),
        ("requests made again, sessions given up", f"{trial.retried}, {len(trial.lost)}"),
        ("seconds", f"{trial.seconds:.0f}"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.sessions.judge", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens to judge")
    parser.add_argument("--agents", type=int, default=24, help="sessions at the same time")
    parser.add_argument("--replicas", type=int, default=3)
    for name, seconds in (("update", 10.0), ("kill", 30.0), ("kill-gateway", 120.0)):
        parser.add_argument(f"--{name}-every", type=float, default=seconds, metavar="SECONDS", help="0 for never")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    trial = asyncio.run(tried(args))
    for name, value in rows_of(trial):
        print(f"{name:<40} {value}")
    for line in (*trial.verdict.examples, *trial.lost[:5]):
        print(line)
    return 0 if trial.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
