"""`rollout-gateway scale`: more or fewer replicas of one engine group, while the others go on.

Serve rebuilds nothing when an application is deployed again with other `num_replicas` of a deployment and nothing else
changed. The gateway learns what to expect through the `user_config` of its own deployment.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engines.errors import ConfigError, DeadlineExceeded, RolloutGatewayError
from engines.types import EngineKind
from gateway.cli.progress import Report, starts_of
from gateway.cli.serve_api import ServeApi, ask_control_plane
from gateway.cli.up import DEPLOY_SLACK_S, DeployFailed, Running, State, describe, last_words, running, wait_until
from gateway.config.schema import Config

GATEWAY = "gateway"
_MAX_REPLICAS = 1024
_NOT_LEAVING = ("STARTING", "RUNNING")


def scale(
    name: str, num_replicas: int, report: Report, group: str | None = None, timeout_s: float | None = None
) -> Running:
    """Have `num_replicas` of the application's engine group, and return when they are there and the rest are gone.

    The group may be left out where there is one. Those that go finish their rollouts first, up to
    `engine.drain_timeout_s`.
    """
    state, api = State.read(name), ServeApi.from_environment()
    if state:
        api = replace(api, address=state.dashboard)
    application = api.application(name)
    deployed = application and application.get("deployed_app_config")
    if not deployed:
        raise RolloutGatewayError(f"Serve knows no application {name}; start it with: rollout-gateway up -c FILE")
    config = Config.model_validate(deployed.get("args") or {})
    group = _chosen(config, group)
    _check(config, group, num_replicas)
    report.step(f"{group}: {num_replicas} replicas")
    api.redeploy(name, scaled(deployed, group, num_replicas))
    limit_s = timeout_s or _longest_s(config, group)
    _wait(api, config, group, num_replicas, report, limit_s)
    found = running(name)
    assert found is not None
    _wait_for_the_gateway(found, group, num_replicas, report, config.fleet.complete_within_s)
    return found


def scaled(deployed: Mapping[str, Any], group: str, num_replicas: int) -> dict[str, Any]:
    """What an application was deployed with, with another number of replicas. Other overrides stay."""
    overrides = {one["name"]: dict(one) for one in deployed.get("deployments") or ()}
    overrides[group] = {**overrides.get(group, {"name": group}), "num_replicas": num_replicas}
    gateways = overrides.get(GATEWAY, {"name": GATEWAY})
    told = (gateways.get("user_config") or {}).get("num_replicas") or {}
    overrides[GATEWAY] = {**gateways, "user_config": {"num_replicas": {**told, group: num_replicas}}}
    return {**deployed, "deployments": list(overrides.values())}


def _chosen(config: Config, group: str | None) -> str:
    groups = ", ".join(config.groups)
    if group is None:
        if len(config.groups) > 1:
            raise ConfigError(f"there are several engine groups: name one with --group ({groups})")
        return next(iter(config.groups))
    if group not in config.groups:
        raise ConfigError(f"--group {group}: there is no such engine group; there is {groups}")
    return group


def _check(config: Config, group: str, num_replicas: int) -> None:
    if not 1 <= num_replicas <= _MAX_REPLICAS:
        raise ConfigError(f"{num_replicas} replicas: give a number from 1 to {_MAX_REPLICAS}; `down` removes all")
    if config.groups[group].kind is EngineKind.EXTERNAL and num_replicas != 1:
        raise ConfigError(f"{group} is external: one URL is one replica; give each external server a group")


def _longest_s(config: Config, group: str) -> float:
    engine = config.groups[group]
    return max(engine.start_timeout_s, engine.drain_timeout_s + engine.stop_timeout_s) + DEPLOY_SLACK_S


def _wait(api: ServeApi, config: Config, group: str, num_replicas: int, report: Report, timeout_s: float) -> None:
    seen: dict[str, Any] = {}

    def settled() -> bool:
        seen.update(api.application(config.name) or {})
        report.replicas(starts_of(seen, {group: config.groups[group]}))
        replicas = seen["deployments"][group]["replicas"]
        leaving = [replica for replica in replicas if replica["state"] not in _NOT_LEAVING]
        ready = [replica for replica in replicas if replica["state"] == "RUNNING"]
        report.step(f"{group}: {len(ready)} of {num_replicas} run, {len(leaving)} finish what they have")
        return len(ready) == num_replicas == len(replicas)

    try:
        wait_until(settled, timeout_s, f"{num_replicas} replicas of {group}")
    except DeadlineExceeded as error:
        raise DeployFailed(f"{error}; Serve says: {describe(seen)} {last_words(seen)}") from error


def _wait_for_the_gateway(found: Running, group: str, num_replicas: int, report: Report, timeout_s: float) -> None:
    """Serve knows what runs a moment before the gateway does; new replicas may have weights to catch up with."""
    if not found.control_url:
        return
    report.step(f"waiting for the gateway to meet {num_replicas} replicas of {group}")

    def met() -> bool:
        status = ask_control_plane(found.control_url, "/status") or {}
        for replica_id, reason in status.get("replicas_refused", {}).items():
            raise DeployFailed(f"replica {replica_id} does not fit in: {reason}")
        known = [replica for replica in status.get("replicas", ()) if replica["group"] == group]
        return len(known) == num_replicas

    wait_until(met, timeout_s, f"the gateway to meet {num_replicas} replicas of {group}")
