"""The result of a verl configuration in gateway mode. Hydra composes them as it does for main_ppo."""

import asyncio
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

verl = pytest.importorskip("verl")

import torch
from hydra import compose, initialize_config_dir
from ray.exceptions import RayTaskError
from verl.checkpoint_engine.base import CheckpointEngineRegistry
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.rollout.replica import get_rollout_replica_class

from engines.errors import ConfigError, WeightUpdateFailed
from gateway.config.load import load
from tests.rigs.rig import MAX_MODEL_LEN, Rig
from tests.rigs.stories.played_gateway import PlayedGateway
from trainer_client.verl import trainer
from trainer_client.verl.checkpoint_engine import GatewayCheckpointEngine
from trainer_client.verl.settings import Settings, check_gateway
from trainer_client.verl.trainer import PPOTrainerGateway, prepare

pytestmark = pytest.mark.verl

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "examples" / "tiny_model" / "digit-sort")
URL = "http://127.0.0.1:8100"
MODE = ["trainer.v1.trainer_mode=gateway", f"+trainer.v1.gateway.url={URL}"]


def config_of(*overrides: str) -> Any:
    """In gateway mode, with these keys beside."""
    return composed([*MODE, "actor_rollout_ref.rollout.name=vllm", *overrides])


def composed(overrides: list[str]) -> Any:
    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    with initialize_config_dir(config_dir=folder, version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def overrides_of(script: str) -> list[str]:
    """The keys that a shell script of examples/ gives to main_ppo."""
    text = (ROOT / "examples" / script).read_text()
    words = shlex.split(text[text.index("-m verl.trainer.main_ppo") :].replace("\\\n", " "))
    return [word for word in words[2:] if "=" in word]


def test_verl_knows_the_mode_by_its_plugin_entry_point_alone() -> None:
    assert get_trainer_cls("gateway") is PPOTrainerGateway
    assert CheckpointEngineRegistry.get("gateway") is GatewayCheckpointEngine
    with pytest.raises(ConfigError, match=r"set that|trainer_mode=gateway alone"):
        get_rollout_replica_class("gateway")()


def test_two_keys_turn_a_configuration_over_to_a_gateway() -> None:
    config = config_of()
    settings = prepare(config)
    role = config.actor_rollout_ref
    assert (role.hybrid_engine, role.rollout.name, role.rollout.nnodes) == (False, "gateway", 1)
    engine = omega_conf_to_dataclass(role.rollout.checkpoint_engine)
    assert engine.backend == "gateway"
    assert Settings(**engine.engine_kwargs["gateway"]).url == settings.url == URL


@pytest.mark.parametrize(
    ("script", "sizes"), [("verl_qwen2_7b.sh", (4096, 4096, 4096)), ("grpo_verl.sh", (1024, 3072, 128))]
)
def test_the_command_of_an_example_composes_and_is_taken(script: str, sizes: tuple[int, int, int]) -> None:
    config = composed(overrides_of(script))
    model, critic = config.actor_rollout_ref.model, config.critic.model
    model.path = critic.path = critic.tokenizer_path = TINY  # verl reads the model's configuration
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    settings = prepare(config)
    assert settings.url == URL
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.prompt_length, rollout.response_length, config.data.train_batch_size) == sizes


def test_engines_of_the_production_command_are_a_valid_configuration_that_fits_it() -> None:
    engine, command = load(ROOT / "examples" / "verl-qwen2-7b.yaml", []).engine, overrides_of("verl_qwen2_7b.sh")
    asked = dict(word.lstrip("+").split("=", 1) for word in command)
    assert engine.kind == asked["actor_rollout_ref.rollout.name"]
    assert engine.model == asked["actor_rollout_ref.model.path"]
    assert engine.tensor_parallel_size == int(asked["actor_rollout_ref.rollout.tensor_model_parallel_size"])
    assert engine.extra["mem_fraction_static"] == float(asked["actor_rollout_ref.rollout.gpu_memory_utilization"])
    assert engine.max_model_len == int(asked["data.max_prompt_length"]) + int(asked["data.max_response_length"])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["actor_rollout_ref.model.lora_rank=8"], r"LoRA rank 8.*model\.lora\.merge=True"),
        (["actor_rollout_ref.rollout.enable_rollout_routing_replay=True"], r"enable_rollout_routing_replay=True"),
        (["reward.reward_model.enable=True"], r"reward\.reward_model\.enable_resource_pool=False"),
        (["+trainer.v1.gateway.transprot=store"], r"unknown field `transprot`.*settings are url, transport"),
    ],
)
def test_what_does_not_go_with_a_gateway_is_refused_before_anything_starts(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prepare(config_of(*overrides))


def test_a_lora_that_is_merged_is_taken() -> None:
    prepare(config_of("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=True"))


async def test_a_batch_that_does_not_fit_the_engines_is_refused_by_its_keys(rig: Rig) -> None:
    config = config_of("data.max_prompt_length=100", "data.max_response_length=100")
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length \+ data\.max_response_length = 200.*takes 128"):
        await asyncio.to_thread(check_gateway, Settings(url=rig.url), config.actor_rollout_ref.rollout)
    config = config_of("data.max_prompt_length=100", "data.max_response_length=28")
    assert (
        await asyncio.to_thread(check_gateway, Settings(url=rig.url), config.actor_rollout_ref.rollout) == MAX_MODEL_LEN
    )


class Worker:
    """The one training worker, in this process. Ray hands its errors on wrapped, which `get` does in Ray's place."""

    def __init__(self, url: str) -> None:
        self.engine = GatewayCheckpointEngine(bucket_size=1 << 20, is_master=True, url=url)

    def update_weights(self, global_steps: int, mode: str) -> list[Callable[[], Any]]:
        assert mode == "gateway"
        weights = iter([("w", torch.ones(2, 2))])
        return [lambda: asyncio.run(self.engine.send_weights(weights, global_steps))]

    @staticmethod
    def get(references: list[Callable[[], Any]]) -> list[Any]:
        try:
            return [reference() for reference in references]
        except Exception as error:
            raise RayTaskError("update_weights", str(error), error).as_instanceof_cause() from None


@pytest.fixture
def gateway(gateway: PlayedGateway) -> PlayedGateway:
    gateway.answers["/v1/weight_store"] = lambda _: (409, {"error": {"type": "StoreFailed", "message": "none kept"}})
    return gateway


@pytest.fixture
def syncing(gateway: PlayedGateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[PPOTrainerGateway]:
    """A trainer as far as it syncs weights, at step 5."""
    worker, made = Worker(gateway.url), object.__new__(PPOTrainerGateway)
    made.__dict__.update(
        _settings=Settings(url=gateway.url), actor_rollout_wg=worker, global_steps=5, timing_raw={}, config=config_of()
    )
    monkeypatch.setattr(trainer, "ray", SimpleNamespace(get=worker.get))
    monkeypatch.setattr(trainer, "_PAUSE_S", 0.0)
    yield made
    worker.engine.close()


def test_a_sync_that_failed_by_a_replica_is_tried_again(gateway: PlayedGateway, syncing: PPOTrainerGateway) -> None:
    taken, tries = gateway.answers["/start_weight_update"], []

    def failing_first(body: dict[str, Any]) -> Any:
        tries.append(body)
        return taken(body) if len(tries) > 2 else (424, {"error": {"type": "WeightUpdateFailed", "message": "gone"}})

    gateway.answers["/start_weight_update"] = failing_first
    syncing.on_step_end()
    assert len(tries) == 3
    assert syncing._consume_sync_metrics()["gateway/weight_version"] == 7


def test_a_sync_that_goes_on_failing_ends_the_run_with_its_error(
    gateway: PlayedGateway, syncing: PPOTrainerGateway
) -> None:
    gateway.answers["/start_weight_update"] = lambda _: (
        424,
        {"error": {"type": "WeightUpdateFailed", "message": "replica engine-1: gone"}},
    )
    with pytest.raises(WeightUpdateFailed, match="replica engine-1: gone"):
        syncing.on_init_end()


def test_agent_loops_count_versions_from_the_step_of_the_first_sync(syncing: PPOTrainerGateway) -> None:
    syncing._max_model_len = 64
    syncing.on_init_end()
    assert syncing.get_llm_client().version_of_step_0 == 7 - 5
