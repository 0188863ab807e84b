"""verl's V1 trainer with rollouts from a gateway: `trainer.v1.trainer_mode=gateway`."""

import logging
import time
from typing import Any

import msgspec
import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.debug import marked_timer
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from engines.errors import ConfigError, DeadlineExceeded, EngineError, GatewayUnreachable, WeightUpdateFailed
from trainer_client.verl.checkpoint_engine import WEIGHT_VERSION
from trainer_client.verl.llm_client import GatewayLLMClient
from trainer_client.verl.settings import Settings, check_gateway, read_settings

logger = logging.getLogger(__name__)

MODE = "gateway"
_PASSING = (WeightUpdateFailed, EngineError, DeadlineExceeded, GatewayUnreachable)
"""Errors after which a sync is retried: a replica that died has then left the fleet."""
_PAUSE_S = 2.0


@register_trainer(MODE)
class PPOTrainerGateway(PPOTrainer):
    """Trains on all of verl's GPUs; the gateway's engines generate.

    Weights are sent after the start and after each step. Without `num_warmup_batches` a step waits for its rollouts and
    is on-policy. With warm-up batches, rollouts go on during training and syncs, and verl's sampler limits their
    staleness (`trainer.v1.sampler.max_off_policy_threshold`).
    """

    _enable_hybrid_replicas = False

    def __init__(self, config: DictConfig) -> None:
        self._settings = prepare(config)
        self._max_model_len = check_gateway(self._settings, config.actor_rollout_ref.rollout)
        self._version_of_step_0 = 0
        super().__init__(config)

    def get_llm_client(self) -> GatewayLLMClient:
        return GatewayLLMClient(
            self.config, self._settings, version_of_step_0=self._version_of_step_0, max_model_len=self._max_model_len
        )

    def on_init_end(self) -> None:
        """Send the first weights: the trainer may have loaded a checkpoint, and the gateway may serve an earlier
        run's."""
        self._version_of_step_0 = self._sync() - self.global_steps

    def on_train_begin(self) -> None:
        self._add_async_warmup_batches(self._settings.num_warmup_batches)

    def on_step_end(self) -> None:
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self._sync()

    def on_sample_end(self) -> None:
        pass

    def _sync(self) -> int:
        """Send the trainer's weights to all replicas. Return their version."""
        for attempt in range(1, self._settings.sync_attempts + 1):
            try:
                reports = ray.get(self.actor_rollout_wg.update_weights(global_steps=self.global_steps, mode=MODE))
            except _PASSING as error:
                if attempt == self._settings.sync_attempts:
                    raise
                reason = getattr(error, "cause", error)  # without the worker's stack
                logger.warning("weight sync of step %d, attempt %d: %s", self.global_steps, attempt, reason)
                time.sleep(_PAUSE_S * attempt)
            else:
                self._pending_sync_metrics = next(metrics for metrics in reports if WEIGHT_VERSION in metrics)
                return int(self._pending_sync_metrics[WEIGHT_VERSION])
        raise AssertionError("the loop returns or raises")


class NoReplica(RolloutReplica):
    """What verl finds by `rollout.name=gateway`; no trainer of this mode makes one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ConfigError(f"rollout.name={MODE} goes with trainer.v1.trainer_mode={MODE} alone: set that")

    async def launch_servers(self) -> None: ...


RolloutReplicaRegistry.register(MODE, lambda: NoReplica)


def prepare(config: DictConfig) -> Settings:
    """Set the keys that this mode needs. Raise `ConfigError`, which names the key, for a conflicting setting.

    Keys for verl's own engines are kept, without effect.
    """
    settings = read_settings(OmegaConf.to_container(config.trainer.v1.get(MODE) or DictConfig({}), resolve=True))
    _refuse(config)
    role = config.actor_rollout_ref
    with open_dict(config):
        role.hybrid_engine = False  # no engine on the training GPUs
        role.rollout.name = MODE
        role.rollout.nnodes = max(1, role.rollout.nnodes)  # verl requires at least 1 with remote engines
        role.rollout.checkpoint_engine.backend = MODE
        role.rollout.checkpoint_engine.engine_kwargs = {MODE: msgspec.structs.asdict(settings)}
    logger.warning("rollouts come from %s: engine keys in rollout.* have no effect", settings.url)
    return settings


def _refuse(config: DictConfig) -> None:
    model, reward = config.actor_rollout_ref.model, config.reward.reward_model
    lora = model.get("lora") or {}
    rank = lora.get("rank", 0) or model.get("lora_rank", 0)
    if rank > 0 and not lora.get("merge", False):
        raise ConfigError(
            f"actor_rollout_ref.model has LoRA rank {rank}, and {MODE} mode sends whole weights: set "
            "actor_rollout_ref.model.lora.merge=True"
        )
    if config.actor_rollout_ref.rollout.get("enable_rollout_routing_replay", False):
        raise ConfigError(
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True needs verl's own vLLM: a gateway does not "
            "report expert routing; set it to False"
        )
    if reward.enable and not reward.enable_resource_pool:
        raise ConfigError(
            "reward.reward_model.enable_resource_pool=False places the reward model with verl's rollout engines, and "
            f"{MODE} mode has none: set it to True"
        )
