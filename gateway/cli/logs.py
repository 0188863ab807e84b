"""Logs of an application's engines, as far as they are on this machine, and the gateway's events."""

from collections import deque
from pathlib import Path
from typing import Any

from engines.engine import Json
from engines.errors import RolloutGatewayError
from gateway.cli.cluster.application import deployed, gateway_status, serve_api


def engine_logs(name: str, replica: str = "") -> list[Path]:
    """Return the log files of the engine with the label `replica`, or of those whose id begins with it, oldest first.

    Without one: of the engines that run or start, and of those in the gateway's events, which may have failed. Raises
    `RolloutGatewayError` where this machine has none.
    """
    application, config = deployed(name)
    folders = {group: engine.log_folder for group, engine in config.groups.items()}
    ids = (_id_of(name, replica),) if replica else tuple(_replica_ids(name, application))
    found = {log for group, folder in folders.items() for log in folder.glob(f"{group}-*.log")}
    logs = sorted((log for log in found if log.name.startswith(ids)), key=lambda log: log.stat().st_mtime)
    if not logs:
        places = ", ".join(sorted({str(folder) for folder in folders.values()}))
        raise RolloutGatewayError(f"this machine has no log of {replica or 'an engine'} in {places}")
    return logs


def gateway_events(name: str) -> list[Json]:
    """Return the gateway's last events, oldest first; none where the control plane does not answer."""
    return list(gateway_status(serve_api(name)).get("events", ()))


def log_end(log: Path, lines: int) -> str:
    with log.open(encoding="utf-8", errors="replace") as file:
        return "".join(deque(file, maxlen=lines)).rstrip()


def _id_of(name: str, replica: str) -> str:
    labels: dict[str, str] = {
        row["label"]: row["replica_id"] for row in gateway_status(serve_api(name)).get("replicas", ())
    }
    return labels.get(replica, replica)


def _replica_ids(name: str, application: dict[str, Any]) -> set[str]:
    deployments = application["deployments"].items()
    running = {f"{group}-{replica['replica_id']}" for group, found in deployments for replica in found["replicas"]}
    return running | {event["subject"] for event in gateway_events(name)}
