"""verl's own main_ppo, as examples/verl_cpu.sh has it, against real vLLM replicas on CPU. One of them is killed."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.client_records import runs_client

pytestmark = pytest.mark.verl

ROOT = Path(__file__).parents[3]
STEPS = 3
RUN_TIMEOUT_S = 480.0
ASK_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
LARGEST_DIFFERENCE = 1e-3
"""Of the probabilities that engines and trainer give a token, in float32."""


@dataclass(frozen=True)
class RealFleet:
    """A gateway in its own environment, and the process ids of the engines behind it."""

    url: str
    pids: list[int]

    def ask(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=ASK_TIMEOUT_S) as response:
            return json.load(response)


@contextmanager
def fleet(folder: Path) -> Iterator[RealFleet]:
    """Two vLLM replicas of the tiny model behind a gateway."""
    command = [
        str(ROOT / ".venv/bin/python"),
        "-m",
        "loadtests.fleet",
        "-c",
        "examples/tiny-cpu.yaml",
        "gateway.port=0",
    ]
    command += [f"engine.log_dir={folder / 'engines'}", f"weights.store={folder / 'store'}", "fleet.lost_after_s=2"]
    with (
        (folder / "gateway.log").open("w") as log,
        subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, stderr=log, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            told = json.loads(process.stdout.readline())
            yield RealFleet(told["gateways"][0]["url"], [engine["pid"] for engine in told["engines"]])
        finally:
            process.stdin.close()
            process.wait(STOP_TIMEOUT_S)


class Run:
    """A training run, whose metrics verl writes down step after step."""

    def __init__(self, folder: Path, url: str) -> None:
        self._steps = folder / "steps.jsonl"
        self._log = folder / "verl.log"
        self._deadline = time.monotonic() + RUN_TIMEOUT_S
        # Without the address of a Ray cluster that may run here, and in a group that ends as one.
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                ["examples/verl_cpu.sh", url, f"trainer.total_training_steps={STEPS}"],
                cwd=ROOT,
                env={**environment, "OUT": str(folder)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def steps(self, count: int) -> list[dict[str, Any]]:
        """The metrics of that many steps, when they are there."""
        while True:
            lines = self._steps.read_text().splitlines(keepends=True) if self._steps.exists() else []
            told = [json.loads(line) for line in lines if line.endswith("\n")]
            if len(told) >= count:
                return [step["data"] for step in told]
            assert self._process.poll() is None, self.last_words()
            assert time.monotonic() < self._deadline, self.last_words()
            time.sleep(0.1)

    def wait(self) -> int:
        return self._process.wait(self._deadline - time.monotonic())

    def last_words(self) -> str:
        return "verl's last words:\n" + "".join(self._log.read_text().splitlines(keepends=True)[-60:])

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def largest_move(update: dict[str, Any]) -> float:
    """How far the canary found an update to move a replica's log-probs, in nats a token."""
    return max(found["canary"].get("to_previous", 0.0) for found in update["replicas"].values() if "canary" in found)


@runs_client(
    "verl main_ppo",
    "verl",
    ran="examples/verl_cpu.sh: GRPO, weights synced after each step, a replica killed",
    against="2 x vLLM, CPU",
)
def test_grpo_steps_through_a_gateway_outlive_a_killed_replica(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with fleet(tmp_path) as served:
        run = Run(tmp_path, served.url)
        try:
            run.steps(1)
            os.kill(served.pids[0], signal.SIGKILL)  # the rollouts of the next step have begun
            steps = run.steps(STEPS)
            assert run.wait() == 0, run.last_words()
        finally:
            run.end()
        for number, step in enumerate(steps, start=1):
            print(
                f"step {number}: rollout/actor probabilities differ by at most "
                f"{step['training/rollout_probs_diff_max']:.1e}, {step['training/rollout_probs_diff_mean']:.1e} on "
                f"average; score {step['critic/score/mean']:.3f}, version {step['gateway/weight_version']}, "
                f"sync {step['gateway/sync_s']:.2f} s"
            )
        furthest = max(step["training/rollout_probs_diff_max"] for step in steps)
        assert furthest < LARGEST_DIFFERENCE
        record_property("fact", f"rollout and actor probabilities within {furthest:.0e}")
        # On-policy, by the bookkeeping of versions: the weights sent at the start are version 1, step 0.
        assert [step["training/off_policy/trajectory_staleness_worst/max"] for step in steps] == [0] * STEPS
        assert [step["gateway/weight_version"] for step in steps] == [2, 3, 4]
        assert served.ask("/weight_info")["weight_version"] == "4"
        left = [(replica["state"], replica["weight_version"]) for replica in served.ask("/status")["replicas"]]
        assert left == [("SERVING", 4)]
        # Every step moved the log-probs of the engines; the weights sent at the start were theirs.
        moved = {
            update["version"]: largest_move(update) for update in served.ask("/v1/weight_updates")["weight_updates"]
        }
        assert moved[1] < LARGEST_DIFFERENCE
        assert all(moved[version] > LARGEST_DIFFERENCE for version in (2, 3, 4)), moved
