"""`rollout-gateway scale`: more or fewer replicas of one engine group, while the other replicas serve.

Serve rebuilds nothing when an application is deployed again with other `num_replicas` of a deployment and nothing else
changed. The gateway learns what to expect through the `user_config` of its own deployment.
"""

from typing import Any

from engines.config import EngineConfig
from engines.errors import ConfigError, UsageError
from engines.process.process import longest_stop_s
from engines.types import EngineKind
from gateway.cli.cluster.application import Running, deployed, met_by_the_gateway, serve_api, wait_for_serve
from gateway.cli.cluster.changes import scaled
from gateway.cli.cluster.progress import Report
from gateway.cli.cluster.state import changing
from gateway.cli.up import DEPLOY_SLACK_S
from gateway.config.schema import Config

_MAX_REPLICAS = 1024


def scale(name: str, num_replicas: int, report: Report, group: str | None = None) -> Running:
    """Bring an engine group to `num_replicas`, and return when they run and the rest are gone.

    The group may be left out where there is one. Removed replicas finish their rollouts first, up to
    `engine.drain_timeout_s`.
    """

    def settled(application: dict[str, Any]) -> bool:
        states = [replica["state"] for replica in application["deployments"][group]["replicas"]]
        ready, leaving = states.count("RUNNING"), len(states) - states.count("RUNNING") - states.count("STARTING")
        report.step(f"{group}: {ready} of {num_replicas} run, {leaving} finish their rollouts")
        return ready == num_replicas == len(states)

    def met(found: Running, status: dict[str, Any]) -> bool:
        rows = status.get("replicas", ())
        return not found.control_url or sum(replica["group"] == group for replica in rows) == num_replicas

    with changing(name, "scale"):
        application, config = deployed(name)
        group = config.chosen_group(group)
        _check(config, group, num_replicas)
        if not application["deployments"]:
            raise ConfigError(f"Serve could not build the last change of {name}: first run rollout-gateway up -c FILE")
        api = serve_api(name)
        wanted = f"{num_replicas} replicas of {group}"
        report.step(wanted)
        api.deploy(scaled(application["deployed_app_config"], group, num_replicas))
        wait_for_serve(api, config, report, _longest_s(config.groups[group]), wanted, settled)
    return met_by_the_gateway(config, report, wanted, met)


def _check(config: Config, group: str, num_replicas: int) -> None:
    if not 1 <= num_replicas <= _MAX_REPLICAS:
        raise UsageError(f"{num_replicas} replicas: give a number from 1 to {_MAX_REPLICAS}; `down` removes all")
    if config.groups[group].max_replicas is not None:
        raise ConfigError(
            f"Serve scales {group} by its load: change num_replicas and max_replicas in its file, and `up`"
        )
    if config.groups[group].kind is EngineKind.EXTERNAL and num_replicas != 1:
        raise ConfigError(f"{group} is external: one URL is one replica; give each external server a group")


def _longest_s(engine: EngineConfig) -> float:
    leave_s = engine.drain_timeout_s + longest_stop_s(engine.stop_timeout_s)
    return max(engine.start_timeout_s, leave_s) + DEPLOY_SLACK_S
