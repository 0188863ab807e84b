"""Makes `rollout.name=gateway` a name that verl knows. It starts no servers: the gateway's are there already."""

from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from engines.errors import ConfigError

NAME = "gateway"


class GatewayReplica(RolloutReplica):
    """Stands where verl wants a class of replicas; `PPOTrainerGateway` makes none."""

    async def launch_servers(self) -> None:
        raise ConfigError(
            "rollout.name=gateway has no servers to launch: it goes with trainer.v1.trainer_mode=gateway, which asks "
            "those behind a gateway"
        )


RolloutReplicaRegistry.register(NAME, lambda: GatewayReplica)
