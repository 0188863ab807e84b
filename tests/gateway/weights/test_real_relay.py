"""TRL's client and the relay before two real vLLM replicas: kill -9, a trainer that dies, and the one after it."""

import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("trl")

from examples.tiny_model import task
from tests.rigs.engines import real_trainer
from tests.rigs.engines.real_trainer import TIMEOUT_S, RealTrainer
from tests.rigs.engines.real_vllm import fleet

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealTrainer]:
    """A fleet and a trainer in a group with its relay."""
    folder = tmp_path_factory.mktemp("trained")
    with fleet(task.COMMITTED, folder) as real, real_trainer.trained(real, folder / "model") as one:
        yield one


def test_the_group_of_trls_client_is_itself_and_the_relay(trained: RealTrainer) -> None:
    assert trained.real.call("/get_world_size") == (200, {"world_size": 1})
    assert trained.real.call("/status")[1]["weight_relay"]["in_group"]
    assert trained.client.communicator is not None
    assert trained.client.communicator.world_size == 2


def test_both_replicas_hold_what_trls_client_sent(trained: RealTrainer) -> None:
    before = trained.expected()
    trained.learn(seed=1)
    began = time.monotonic()
    trained.client.update_model_params(trained.model)
    print(f"synced in {time.monotonic() - began:.2f} s")
    print(trained.real.call("/v1/weight_updates")[1]["weight_updates"][0]["seconds"])
    assert trained.client.weight_version == 1
    expected = trained.expected()
    assert expected != before
    assert trained.all_say(expected)


@pytest.mark.parametrize("moment", ["transfer", "load"])
def test_a_replica_killed_in_an_update_does_not_touch_the_trainer(trained: RealTrainer, moment: str) -> None:
    version = trained.client.weight_version or 0
    trained.learn(seed=2)
    wanted = {"transfer": "RECEIVING", "load": "UPDATING"}[moment]

    def kill_in_time() -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            status = trained.real.call("/status")[1]
            phase = (status["weight_update"] or {}).get("phase")
            if wanted in (phase, status["replicas"][0]["state"]):
                trained.real.kill(0)
                return
            time.sleep(0.002)

    killer = threading.Thread(target=kill_in_time)
    killer.start()
    trained.client.update_model_params(trained.model)
    killer.join(TIMEOUT_S)
    assert trained.client.weight_version == version + 1
    assert trained.said_by(1) == trained.expected()
    trained.real.restart(0)
    trained.real.until_serving(version + 1)
    assert trained.said_by(0) == trained.expected()


def test_a_replica_that_is_dead_before_an_update_is_done_without(trained: RealTrainer) -> None:
    version = trained.client.weight_version or 0
    trained.real.kill(1)
    trained.learn(seed=3)
    trained.client.update_model_params(trained.model)
    assert trained.client.weight_version == version + 1
    assert trained.said_by(0) == trained.expected()
    trained.real.restart(1)
    trained.real.until_serving(version + 1)
    assert trained.said_by(1) == trained.expected()


def test_a_trainer_that_dies_in_the_transfer_leaves_a_fleet_for_the_next(trained: RealTrainer) -> None:
    version, said = trained.client.weight_version or 0, trained.said_by(0)
    trained.broken_off(trained.client.close_communicator)
    trained.real.until_serving(version)
    assert trained.all_say(said)
    trained.client.init_communicator("cpu")
    trained.learn(seed=4)
    trained.client.update_model_params(trained.model)
    assert trained.client.weight_version == version + 1
    assert trained.all_say(trained.expected())
