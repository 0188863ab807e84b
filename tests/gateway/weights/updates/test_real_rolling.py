"""Rolling updates of two real vLLM replicas under load: tokens are of the weights they name, also when one dies."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from examples.tiny_model import task
from tests.rigs.engines.real_trainer import TIMEOUT_S, answers, checkpoint, learn, prompts
from tests.rigs.engines.real_vllm import RealFleet, fleet
from trainer_client import BlockingRolloutClient, WeightSender

pytestmark = pytest.mark.vllm


@dataclass
class Policy:
    """A fleet, its trainer, and what each version has to say."""

    real: RealFleet
    client: BlockingRolloutClient
    folder: Path
    prompts: list[list[int]]
    says: dict[int, list[list[int]]] = field(default_factory=dict)

    def push(self, seed: int, version: int) -> int:
        """Other weights, in a rolling update."""
        model = learn(checkpoint(), seed)
        self.says[version] = answers(model, self.folder / f"version-{version}")
        with WeightSender(self.client, transport="store", timeout_s=TIMEOUT_S) as sender:
            # What is kept over a load goes on over KV of the old weights, and says what neither version would.
            return sender.push(model, version, rolling=True, in_flight="drain")

    def ask(self) -> set[int]:
        """Versions of what the fleet answers, each of which has to say what its weights say."""
        sampling = {"max_tokens": task.MAX_ANSWER_TOKENS, "temperature": 0, "return_token_ids": True}
        status, reply = self.real.call("/v1/completions", {"prompt": self.prompts, **sampling})
        assert status == 200, reply
        versions = set()
        for choice in reply["choices"]:
            (span,) = choice["weight_versions"]
            assert choice["token_ids"] == self.says[span["version"]][choice["index"]]
            versions.add(span["version"])
        return versions

    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.real.call("/status")[1]["replicas"]
        return found

    def until_serving(self, version: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while [(r["state"], r["weight_version"]) for r in self.replicas()] != [("SERVING", version)] * 2:
            assert time.monotonic() < deadline, self.replicas()
            time.sleep(0.05)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    folder = tmp_path_factory.mktemp("rolling")
    with fleet(task.COMMITTED, folder) as real, BlockingRolloutClient(real.url) as client:
        client.wait_ready(TIMEOUT_S)
        yield Policy(real, client, folder, prompts(), {0: answers(checkpoint(), folder / "version-0")})


@dataclass
class Load:
    """A caller that never stops, and what it was given while `watched` was under way."""

    policy: Policy
    seen: list[set[int]] = field(default_factory=list)

    def during(self, watched: "Future[int]") -> int:
        """The version that the push has brought."""
        stop = threading.Event()
        watched.add_done_callback(lambda _: stop.set())
        while not stop.is_set():
            self.seen.append(self.policy.ask())
        return watched.result()


def test_tokens_go_on_and_are_of_the_weights_they_name(policy: Policy) -> None:
    assert policy.ask() == {0}
    load = Load(policy)
    with ThreadPoolExecutor(1) as beside:
        assert load.during(beside.submit(policy.push, 7, 1)) == 1
    assert policy.ask() == {1}
    assert set().union(*load.seen) == {0, 1}
    (record,) = policy.real.call("/v1/weight_updates")[1]["weight_updates"]
    assert (record["rolling"], record["end"]) == (True, "committed")
    away = {name: replica["away_s"] for name, replica in record["replicas"].items()}
    print(f"{len(load.seen)} batches of 8 meanwhile; away {away}, of {record['age_s']:.2f} s; {record['seconds']}")
    assert [replica["canary"]["result"] for replica in record["replicas"].values()] == ["no peer", "verified"]


def test_a_replica_killed_in_its_turn_is_left_out_and_its_successor_gets_the_version(policy: Policy) -> None:
    load = Load(policy)
    with ThreadPoolExecutor(2) as beside:
        for version in range(2, 7):
            pushing = beside.submit(policy.push, version, version)
            killing = beside.submit(kill_who_is_away, policy, version, pushing)
            assert load.during(pushing) == version
            if (killed := killing.result()) is not None:
                break  # otherwise its turn was over before it was seen
        assert killed is not None
    assert policy.ask() == {version}
    policy.real.restart([info.replica_id for info in policy.real.replicas].index(killed))
    policy.until_serving(version)
    assert policy.ask() == {version}


def kill_who_is_away(policy: Policy, version: int, pushing: "Future[int]") -> str | None:
    """kill -9 of the second replica to take the version, in its turn. Its id; None where the update was over before."""
    while not pushing.done():
        replicas = policy.replicas()
        away = [replica for replica in replicas if replica["state"] == "UPDATING"]
        if away and any(replica["weight_version"] == version for replica in replicas if replica not in away):
            os.kill(away[0]["pid"], signal.SIGKILL)
            return str(away[0]["replica_id"])
    return None
