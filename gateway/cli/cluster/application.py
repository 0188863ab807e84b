"""A deployed application as Serve, the gateway and its engines' logs report it, and the waits for it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines.errors import DeadlineExceeded, RolloutGatewayError
from gateway.cli.cluster.progress import Report, stages_of
from gateway.cli.cluster.serve_api import ServeApi, ask_control_plane
from gateway.cli.cluster.state import State
from gateway.config.addresses import url_of
from gateway.config.schema import Config
from gateway.config.serve_document import config_of


class DeployFailed(RolloutGatewayError):
    """Serve gave the application up. The message begins with the engine's own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An application that Serve knows. A URL is empty where it is unknown."""

    status: str
    message: str
    rollout_url: str
    control_url: str
    replicas: dict[str, str]
    """Counts of replicas by state, per deployment."""
    dashboard: str


def serve_api(name: str) -> ServeApi:
    """Return Serve's API on the cluster that the application was deployed to."""
    api, state = ServeApi.from_environment(), State.read(name)
    return replace(api, address=state.dashboard) if state else api


def running(name: str) -> Running | None:
    """Return the application as it is now; None when Serve does not know it."""
    api = serve_api(name)
    details = api.details()
    application = details["applications"].get(name)
    if application is None:
        return None
    url = control_url(details)
    return Running(
        status=application["status"],
        message=last_words(application),
        rollout_url=ask_control_plane(url, "/url").get("url") or _configured_url(application),
        control_url=url,
        replicas=replica_states(application),
        dashboard=api.address,
    )


def deployed(name: str) -> tuple[dict[str, Any], Config]:
    """Return Serve's details of a deployed application, and its configuration. Raises where there is none."""
    application = serve_api(name).application(name)
    if application is None or not application.get("deployed_app_config"):
        raise unknown_application(name)
    return application, deployed_config(application)


def deployed_config(application: Mapping[str, Any]) -> Config:
    return config_of(application.get("deployed_app_config") or {})


def logs_and_events(name: str, replica: str = "") -> tuple[list[Path], list[dict[str, Any]]]:
    """Return the log files of the engine with the label `replica`, or of those whose id begins with it, oldest first,
    and the gateway's last events, of which there are none where the control plane does not answer.

    Without `replica`: of the engines that run or start, and of those in the events, which may have failed. Raises
    `RolloutGatewayError` where this machine has none.
    """
    application, config = deployed(name)
    status = ask_control_plane(control_url(serve_api(name).details()), "/status")
    events: list[dict[str, Any]] = list(status.get("events", ()))
    labels = {row.get("label"): row["replica_id"] for row in status.get("replicas", ())}
    ids = {
        f"{group}-{row['replica_id']}" for group, one in application["deployments"].items() for row in one["replicas"]
    }
    wanted = {labels.get(replica, replica)} if replica else ids | {event["subject"] for event in events}
    folders = {group: engine.log_folder for group, engine in config.groups.items()}
    found = {log for group, folder in folders.items() for log in folder.glob(f"{group}-*.log")}
    logs = sorted((log for log in found if log.name.startswith(tuple(wanted))), key=lambda log: log.stat().st_mtime)
    if not logs:
        places = ", ".join(sorted({str(folder) for folder in folders.values()}))
        raise RolloutGatewayError(f"this machine has no log of {replica or 'an engine'} in {places}")
    return logs, events


def control_url(details: Mapping[str, Any]) -> str:
    """Return the URL of the control plane from Serve's details; empty where it is off."""
    http = details["http_options"]
    return "" if details["proxy_location"] == "Disabled" else url_of(http["host"], http["port"])


def unknown_application(name: str) -> RolloutGatewayError:
    others = ", ".join(f"--name {other}" for other in serve_api(name).details()["applications"])
    remedy = f"it has {others}" if others else "start it with: rollout-gateway up -c FILE"
    return RolloutGatewayError(f"Serve knows no application {name}; {remedy}")


def _configured_url(application: Mapping[str, Any]) -> str:
    """Return the rollout URL by configuration alone; empty for port 0, which the gateway alone resolves."""
    gateway = deployed_config(application).gateway
    return url_of(gateway.host, gateway.port) if gateway.port else ""


def wait_for_serve(
    api: ServeApi, config: Config, before: Mapping[str, Any] | None, report: Report, timeout_s: float
) -> None:
    """Wait until the application runs by Serve's details, and report its replicas meanwhile; `before` are those of the
    one that it replaces. Raise `DeployFailed`."""
    seen: dict[str, Any] = {}

    def check() -> bool:
        details = api.details()
        seen.update(details["applications"].get(config.name) or {})
        status = ask_control_plane(control_url(details), "/status") if seen else {}
        report.replicas(stages_of(seen, config.groups, status))
        if not seen or (before and seen["last_deployed_time_s"] == before["last_deployed_time_s"]):
            return False
        if seen["status"] == "DEPLOY_FAILED":  # UNHEALTHY is not the end: Serve goes on restarting
            raise DeployFailed(last_words(seen) or f"Serve gave up on {config.name} and does not say why")
        return bool(seen["status"] == "RUNNING")

    try:
        report.wait_until(check, timeout_s, "the application to run")
    except DeadlineExceeded as error:
        states = "  ".join(f"{name}: {text}" for name, text in replica_states(seen).items())
        raise DeployFailed(f"{error}; Serve says: {states or 'no replica listed'} {last_words(seen)}") from error


def met_by_the_gateway(config: Config, report: Report) -> Running:
    """Wait until the gateway is healthy, and return the application.

    Serve knows that replicas run a moment before the gateway does, and new replicas may have weights to load. Raises
    `DeployFailed` for a replica that the gateway refuses.
    """
    found = running(config.name)
    assert found is not None

    def check() -> bool:
        status = ask_control_plane(found.control_url, "/status")
        for replica_id, reason in status.get("replicas_refused", {}).items():
            raise DeployFailed(f"replica {replica_id} does not fit in: {reason}")
        return bool(ask_control_plane(found.control_url or found.rollout_url, "/health"))

    report.step("waiting for the gateway to meet all replicas")
    report.wait_until(check, config.fleet.complete_within_s, "the gateway to meet all replicas")
    return found


def replica_states(application: Mapping[str, Any]) -> dict[str, str]:
    """Return a text such as "1 RUNNING, 1 STARTING" per deployment."""
    counted: dict[str, str] = {}
    for name, deployment in application.get("deployments", {}).items():
        states = [replica["state"] for replica in deployment["replicas"]]
        counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
        counted[name] = counts or str(deployment["status"])
    return counted


def last_words(application: Mapping[str, Any]) -> str:
    """Return the reason of a failure: our own errors where there are any, else all of Serve's messages."""
    found = {name: deployment["message"] for name, deployment in application.get("deployments", {}).items()}
    messages = {"": application.get("message", ""), **found}
    own = [_own_error(message) for message in messages.values()]
    if any(own):
        return "\n".join(dict.fromkeys(text for text in own if text))
    plain = {name: re.sub(r"\x1b\[\d*m", "", message).strip() for name, message in messages.items()}
    return "\n".join(f"{name}: {text}" if name else text for name, text in plain.items() if text)


def _own_error(message: str) -> str:
    """Return our own error out of the traceback that Serve wraps around it; empty where there is none."""
    found = list(re.finditer(r"^engines\.errors\.\w+: ", message, re.MULTILINE))
    return message[found[-1].end() :].strip() if found else ""
