"""Versions that survive on two real vLLM replicas in one group: kill -9, a trainer that dies, what is served then."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("trl")

from examples.tiny_model import task
from tests.rigs.engines.real_trainer import RealTrainer, trained
from tests.rigs.engines.real_vllm import fleet
from trainer_client import BlockingRolloutClient, WeightSender

pytestmark = pytest.mark.vllm


@dataclass
class Kept:
    """A fleet that was brought to version 1, its trainer, and what version 1 says."""

    trainer: RealTrainer
    expected: list[list[int]]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    folder = tmp_path_factory.mktemp("trained")
    with fleet(task.COMMITTED, folder, weights={"relay": "never"}) as real, trained(real, folder / "model") as trainer:
        checkpoint = trainer.expected()
        trainer.learn(seed=7)
        trainer.client.update_model_params(trainer.model)
        assert trainer.client.weight_version == 1
        yield Kept(trainer, trainer.expected())
        assert checkpoint != trainer.expected()


def test_the_successor_of_a_killed_replica_serves_the_current_version(kept: Kept) -> None:
    trainer, real = kept.trainer, kept.trainer.real
    assert trainer.all_say(kept.expected)
    real.kill(0)
    real.restart(0)
    began = time.monotonic()
    status = real.until_serving(1)
    print(f"caught up {time.monotonic() - began:.2f} s after its engine was ready")
    assert status["weight_store"]["versions"] == [1]
    assert trainer.all_say(kept.expected)


def test_a_trainer_that_dies_in_the_transfer_leaves_the_version_before(kept: Kept) -> None:
    trainer = kept.trainer
    trainer.client.init_communicator("cpu")
    trainer.broken_off(trainer.client.close_communicator)
    began = time.monotonic()
    trainer.real.until_serving(1)
    print(f"the version before serves {time.monotonic() - began:.2f} s after the error")
    assert trainer.all_say(kept.expected)


def test_a_replica_killed_in_the_transfer_is_named_and_its_peer_serves_on(kept: Kept) -> None:
    trainer, real = kept.trainer, kept.trainer.real
    trainer.client.init_communicator("cpu")
    assert real.replicas[1].replica_id in trainer.broken_off(lambda: real.kill(1))
    trainer.client.close_communicator()  # as TRL's client does when the call fails
    real.restart(1)
    real.until_serving(1)
    assert trainer.all_say(kept.expected)


def test_the_next_trainer_finds_a_whole_fleet(kept: Kept) -> None:
    trainer = kept.trainer
    trainer.client.init_communicator("cpu")
    trainer.client.update_model_params(trainer.model)
    trainer.client.reset_prefix_cache()
    trainer.real.until_serving(2)
    assert trainer.all_say(kept.expected)  # the same weights under the next number


def test_a_version_pushed_through_the_store_reaches_a_successor_too(kept: Kept) -> None:
    trainer, real = kept.trainer, kept.trainer.real
    trainer.learn(seed=11)
    began = time.monotonic()
    with BlockingRolloutClient(real.url) as rollouts, WeightSender(rollouts, transport="store") as sender:
        assert sender.push(trainer.model) == 3
    print(f"pushed in {time.monotonic() - began:.2f} s")
    expected = trainer.expected()
    assert expected != kept.expected
    assert trainer.all_say(expected)
    real.kill(0)
    real.restart(0)
    real.until_serving(3)
    assert trainer.said_by(0) == expected
