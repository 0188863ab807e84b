"""Gateways killed under TRL: does its run go on, and does it learn as without?

    python -m loadtests.chaos.trainings [--runs 10] [--steps 12] [--seed 0] [--config examples/tiny-cpu.yaml]

Each run is `examples.train_sort`, TRL's own GRPOTrainer on the tiny model, against real vLLM replicas. The first is
undisturbed. In each other run the gateway's process is killed with SIGKILL once, and started again on its port: in
every second run at a random moment, in the others while a weight update is open. The exit status is 1 if a run ended
early, or the fleet does not serve the trainer's last version.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
import orjson

from engines.process.port import free_port
from gateway.config.load import load
from gateway.config.schema import Config
from loadtests.chaos.processes.process_fleet import ProcessFleet, healthy_within, running

Json = dict[str, Any]

_UP_S = 180.0
_STATUS_S = 2.0
_LOOK_S = 0.01
_FIRST_STEP_S = 300.0
_STEP_S = 180.0
_LAST_STEPS = 4
"""Steps of one round of problems, over which rewards are compared."""
_UPDATE_S = 1.0


@dataclass(slots=True)
class Training:
    """One run. `killed_in` is the phase of the update that was open at the kill, "" where none was."""

    killed_after: int | None = None
    killed_in: str = ""
    steps: list[Json] = field(default_factory=list)
    served: int | None = None
    longest_step_s: float = 0.0
    last_words: str = ""
    code: int | None = None

    @property
    def reward(self) -> float:
        """Mean over the last round of problems."""
        return fmean(step["reward"] for step in self.steps[-_LAST_STEPS:]) if self.steps else 0.0

    def went_on(self, steps: int) -> bool:
        """True where all steps were made, and each weight sync, one before each step and one at the end, has a
        version."""
        return self.code == 0 and len(self.steps) == steps and self.served is not None and self.served > steps


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="runs with a kill, beside the undisturbed one")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=Path("examples/tiny-cpu.yaml"))
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    print("run  killed after step  in update   steps  served  reward  longest step  ends", flush=True)
    good = True
    for run in range(arguments.runs + 1):
        training = await _train(arguments, chance, run)
        went_on = training.went_on(arguments.steps)
        good &= went_on
        after = "-" if training.killed_after is None else training.killed_after
        print(
            f"{run:3}  {after:>17}  {training.killed_in or '-':9}  {len(training.steps):6}  {training.served!s:>6}  "
            f"{training.reward:6.3f}  {training.longest_step_s:10.1f} s  "
            f"{'well' if went_on else f'with {training.code}: {training.last_words}'}",
            flush=True,
        )
    return 0 if good else 1


async def _train(arguments: argparse.Namespace, chance: random.Random, run: int) -> Training:
    with tempfile.TemporaryDirectory(prefix="trainings-") as name:
        folder = Path(name)
        fleet = ProcessFleet(_config(arguments.config, folder), folder)
        async with running(fleet):
            await healthy_within(fleet.url, _UP_S)
            training = Training()
            killing = asyncio.create_task(_kill(fleet, training, arguments.steps, chance, run))
            try:
                await _follow(fleet, training, arguments, folder)
            finally:
                killing.cancel()
                await asyncio.gather(killing, return_exceptions=True)
            with suppress(aiohttp.ClientError, TimeoutError):
                training.served = int((await _get(fleet.url, "/weight_info"))["weight_version"])
            return training


def _config(path: Path, folder: Path) -> Config:
    given = load(path)
    gateway = given.gateway.model_copy(update={"port": free_port(), "ledger": str(folder / "ledger")})
    engine = given.engine.model_copy(update={"log_dir": str(folder)})
    return given.model_copy(update={"name": f"trainings-{folder.name}", "gateway": gateway, "engine": engine})


async def _follow(fleet: ProcessFleet, training: Training, arguments: argparse.Namespace, folder: Path) -> None:
    """Run the trainer to its end, or until it makes no step for too long."""
    words = ["--url", fleet.url, "--out", str(folder / "out"), "--steps", str(arguments.steps)]
    with (folder / "trainer.log").open("wb") as log:
        trainer = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "examples.train_sort", *words, stdout=asyncio.subprocess.PIPE, stderr=log
        )
    assert trainer.stdout is not None
    try:
        while True:
            began = time.monotonic()
            async with asyncio.timeout(_STEP_S if training.steps else _FIRST_STEP_S):
                if not (line := await trainer.stdout.readline()):
                    break
            if line.startswith(b'{"step"'):
                if training.steps:
                    training.longest_step_s = max(training.longest_step_s, time.monotonic() - began)
                training.steps.append(orjson.loads(line))
        async with asyncio.timeout(_STEP_S):
            training.code = await trainer.wait()
    except TimeoutError:
        trainer.kill()
        training.code = await trainer.wait()
    training.last_words = (folder / "trainer.log").read_text(errors="replace").strip().rpartition("\n")[2][-200:]


async def _kill(fleet: ProcessFleet, training: Training, steps: int, chance: random.Random, run: int) -> None:
    if not run:
        return
    after = chance.randrange(1, steps - 1)
    while len(training.steps) < after:  # noqa: ASYNC110 steps come from the trainer's output
        await asyncio.sleep(_LOOK_S)
    if run % 2:
        await asyncio.sleep(chance.uniform(0, training.steps[-1]["step_s"]))
    else:
        while not await _phase(fleet.url):  # noqa: ASYNC110 another process has the update
            await asyncio.sleep(_LOOK_S)
        await asyncio.sleep(chance.uniform(0, chance.choice((0.0, _UPDATE_S))))
    training.killed_after, training.killed_in = len(training.steps), await _phase(fleet.url)
    fleet.kill_gateway()


async def _phase(url: str) -> str:
    """The phase of the open update; "" where none is open."""
    update = (await _get(url, "/status"))["weight_update"]
    return str(update["phase"]) if update else ""


async def _get(url: str, path: str) -> Json:
    timeout = aiohttp.ClientTimeout(total=_STATUS_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url + path) as response:
        return dict(await response.json())


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
