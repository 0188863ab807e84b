"""CPU of a placement: a rollout's way through the scheduler, before replicas whose engines do nothing.

    python -m loadtests.studies.gateway_cost.placement_cpu [--replicas 2 64 256 1024] [--placements 2000]

A figure is CPU time in microseconds for a rollout, from its arrival at the scheduler to its end, with its task and its
records: the least of three rounds.

| state | replicas |
| --- | --- |
| `idle` | idle: each rollout ends before the next comes |
| `at work` | with half of the samples that they take; each rollout ends before the next comes |
| `wait for room` | full, and 1,000 rollouts wait: each that ends lets one in, and another comes |
| `wait for KV` | with half of the samples, and no KV for 1,000 more sessions, which wait: each turn is a last one |

`sessions` are turns of sessions, with `gateway.session_kv_share` of 1.
"""

import argparse
import asyncio
import gc
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from engines.process.log_lines import write_log_lines
from gateway.config.schema import Config
from gateway.fleet.metrics import Metrics
from gateway.fleet.placement.routing import Rollout
from gateway.fleet.placement.scheduler import Scheduler
from gateway.fleet.replica import Replica
from tuning.simulate.modelled_fleet import ModelledFleet
from tuning.simulate.speed import SetSpeed

_ROUNDS = 3
_WAITING = 1000
_MAX_NUM_SEQS = 4
_PLACES, _HALF = 2 * _MAX_NUM_SEQS, _MAX_NUM_SEQS
_PROMPT, _REPLY = 1000, 100
_LENGTHS = 97
_ROOMY = 1_000_000
_AT_ONCE = 8
"""Rollouts that end together where others wait."""
_STEPS = 10
"""Steps of the loop in which a rollout that ends lets the next one in."""


class State(StrEnum):
    IDLE = "idle"
    AT_WORK = "at work"
    NO_ROOM = "wait for room"
    NO_KV = "wait for KV"


@dataclass(frozen=True, slots=True)
class Case:
    state: State
    has_sessions: bool

    def running(self, replicas: int) -> int:
        """Return the rollouts that run meanwhile."""
        return {State.IDLE: 0, State.NO_ROOM: _PLACES}.get(self.state, _HALF) * replicas

    @property
    def waiting(self) -> int:
        return _WAITING if self.state in (State.NO_ROOM, State.NO_KV) else 0

    @property
    def kv_tokens(self) -> int:
        return _PROMPT * _HALF if self.state is State.NO_KV else _ROOMY


CASES = [Case(state, has) for has in (False, True) for state in State if has or state is not State.NO_KV]


class _Bench:
    """Rollouts of one fleet in one state."""

    def __init__(self, case: Case, scheduler: Scheduler, model: str, replicas: int) -> None:
        self._case = case
        self._scheduler = scheduler
        self._model = model
        self._running = case.running(replicas)
        self._sessions = 2 * (self._running + case.waiting) + replicas
        self._numbers = count()
        self._ends: deque[asyncio.Future[None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        for _ in range(self._running + self._case.waiting):
            self._ask(self._rollout())
        await self._settled()

    async def place(self, placements: int) -> float:
        """Return the seconds of CPU for each of so many placements."""
        rollouts = [self._rollout() for _ in range(placements)]
        began = time.process_time()
        for first in range(0, placements, _AT_ONCE):
            some = rollouts[first : first + _AT_ONCE]
            await (self._replace(some) if self._case.waiting else self._run_some(some))
        seconds = (time.process_time() - began) / placements
        waiting = self._scheduler.queue_length(self._model)
        if (len(self._ends), waiting) != (self._running, self._case.waiting):
            raise RuntimeError(f"{self._case}: {len(self._ends)} rollouts run and {waiting} wait")
        return seconds

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run_some(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            await self._run(rollout, self._answered)

    async def _replace(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            self._ends.popleft().set_result(None)
            self._ask(rollout)
        await self._settled()

    async def _settled(self) -> None:
        for _ in range(_STEPS):
            await asyncio.sleep(0)

    def _ask(self, rollout: Rollout) -> None:
        task = asyncio.create_task(self._run(rollout, self._until_ended))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _rollout(self) -> Rollout:
        number = next(self._numbers)
        session = f"{number % self._sessions}" if self._case.has_sessions else ""
        return Rollout(
            request_id=f"{number}", request=f"{number}", model=self._model, n=1, tokens=_PROMPT + number % _LENGTHS,
            prompt_tokens=_PROMPT, session=session,
        )  # fmt: skip

    async def _run(self, rollout: Rollout, call: Callable[[Replica], Awaitable[None]]) -> None:
        await self._scheduler.run(rollout, call)
        self._scheduler.delivered(rollout, _PROMPT, _REPLY)
        if self._case.state is State.NO_KV:
            self._scheduler.finish_session(rollout.session)

    async def _answered(self, replica: Replica) -> None:
        return

    async def _until_ended(self, replica: Replica) -> None:
        self._ends.append(asyncio.get_running_loop().create_future())
        await self._ends[-1]


async def _measured(case: Case, replicas: int, placements: int) -> float:
    """Return the seconds of CPU of a placement."""
    engine = {"kind": "sim", "num_replicas": replicas, "max_num_seqs": _MAX_NUM_SEQS}
    config = Config.model_validate({"engine": engine, "gateway": {"session_kv_share": 1.0}})
    speed = SetSpeed(
        max_num_seqs=_MAX_NUM_SEQS, kv_tokens=case.kv_tokens, base_s=1.0, sequence_s=0.0, context_s=0.0,
        prefill_token_s=1.0,
    )  # fmt: skip
    modelled = ModelledFleet(config, {"engine": speed})
    async with modelled.running() as fleet:
        for replica in fleet.replicas:
            replica.residents.pace.step_tokens = 0.0  # reading is dear
        bench = _Bench(case, Scheduler(config.gateway, fleet, Metrics()), modelled.model, replicas)
        await bench.start()
        gc.collect()
        gc.freeze()  # as a gateway does
        seconds = min([await bench.place(placements) for _ in range(_ROUNDS)])
        gc.unfreeze()
        await bench.stop()
    return seconds


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.studies.gateway_cost.placement_cpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 64, 256, 1024])
    parser.add_argument("--placements", type=int, default=2000, help="of each round")
    args = parser.parse_args(argv)
    write_log_lines(sys.stderr, least="warning")
    print(f"{'microseconds of CPU':22}", *(f"{replicas:>8}" for replicas in args.replicas))
    for case in CASES:
        print(f"{case.state:14}{'sessions' if case.has_sessions else '':8}", end="", flush=True)
        for replicas in args.replicas:
            seconds = asyncio.run(_measured(case, replicas, args.placements))
            print(f" {seconds * 1e6:8.1f}", end="", flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
