"""Logs of an application's engines, as far as they are on this machine, and the gateway's events."""

from collections import deque
from pathlib import Path

from engines.engine import Json
from engines.errors import RolloutGatewayError
from gateway.cli.cluster.application import deployed, gateway_status, serve_api


def logs_and_events(name: str, replica: str = "") -> tuple[list[Path], list[Json]]:
    """Return the log files of the engine with the label `replica`, or of those whose id begins with it, oldest first,
    and the gateway's last events, of which there are none where the control plane does not answer.

    Without `replica`: of the engines that run or start, and of those in the events, which may have failed. Raises
    `RolloutGatewayError` where this machine has none.
    """
    application, config = deployed(name)
    status = gateway_status(serve_api(name))
    events: list[Json] = list(status.get("events", ()))
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


def log_end(log: Path, lines: int) -> str:
    with log.open(encoding="utf-8", errors="replace") as file:
        return "".join(deque(file, maxlen=lines)).rstrip()
