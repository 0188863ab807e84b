"""`rollout-gateway down`: removal of an application, of the Ray that `up` started, and of all that they leave."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.errors import ConfigError, DeadlineExceeded
from engines.store.weight_store import remove_store
from gateway.cli.cluster.application import deployed_config, serve_api
from gateway.cli.cluster.progress import Report
from gateway.cli.cluster.ray_head import stop_ray
from gateway.cli.cluster.serve_api import ClusterTroubled, ClusterUnreachable, ServeApi
from gateway.cli.cluster.state import State
from gateway.ledger.ledger import default_folder, remove_unless_needed
from gateway.weights.snapshots import in_memory

_DELETE_TIMEOUT_S = 120.0
_UNPLACED_DELETE_TIMEOUT_S = 30.0
"""Where replicas have found no place: Serve waits up to ten minutes for their end, though nothing of them runs."""


def down(name: str, report: Report) -> bool:
    """Remove the application, and Ray where `up` started it. False when there was nothing to remove.

    Notes each thing removed. Engine logs are kept: they say why an engine failed.
    """
    api, state = serve_api(name), State.read(name)
    applications: dict[str, Any] = {}
    removed = False
    try:
        applications = api.details()["applications"]
        if name in applications:
            delete(api, name, applications[name], report)
            removed = True
    except ClusterUnreachable:
        pass  # nothing of it runs
    except (ClusterTroubled, DeadlineExceeded) as error:
        if state is None or not state.ray_lives:
            raise
        report.note(f"{error}: its Ray is ours, and takes {name} along")
    if state is not None and state.ray_lives:
        report.step("stopping Ray")
        others = sorted(applications.keys() - {name})
        stop_ray(state, report)
        report.note(f"stopped Ray{', with ' + ', '.join(others) if others else ''}")
        removed = True
    _remove_memory(name, report)
    _remove_ledger(default_folder(name), report)
    if state is not None:
        state.remove()
    if removed and name in applications:
        with contextlib.suppress(ConfigError):  # that of another release
            folders = {str(group.log_folder) for group in deployed_config(applications[name]).groups.values()}
            report.note(f"kept: engine logs in {', '.join(sorted(folders))}")
    return removed


def delete(api: ServeApi, name: str, application: Mapping[str, Any], report: Report) -> None:
    """Remove the application from Serve, whose details of it are `application`."""
    report.step(f"removing {name}")
    replicas = [replica for found in application["deployments"].values() for replica in found["replicas"]]
    is_placed = all(replica.get("node_id") for replica in replicas)
    api.delete(name)
    timeout_s = _DELETE_TIMEOUT_S if is_placed else _UNPLACED_DELETE_TIMEOUT_S
    report.wait_until(lambda: api.application(name) is None, timeout_s, f"Serve to remove {name}")
    report.note(f"removed the application {name} with {len(replicas)} Serve replicas")


def _remove_memory(name: str, report: Report) -> None:
    """Remove the weight store in memory. Where the gateway ran on another node, its next run there frees it."""
    folder = in_memory(name)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    if remove_store(folder):
        report.note(f"removed the weight store {folder} ({size / 1e6:.0f} MB)")


def _remove_ledger(folder: Path, report: Report) -> None:
    """Remove the default ledger, unless a client has results to fetch from it."""
    if not folder.exists():
        return
    try:
        left = remove_unless_needed(folder, "session")
    except BlockingIOError:
        report.note(f"kept: the ledger {folder}, which another process has open")
    except OSError as error:
        report.note(f"kept: the ledger {folder}, which cannot be read: {error}")
    else:
        kept = f"kept: the ledger {folder} with {left} sessions, which the next `up` has again"
        report.note(kept if left else f"removed the ledger {folder}")
