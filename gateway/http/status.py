"""The status of the fleet as one JSON document, for people, `rollout-gateway status` and the control plane."""

import time

from engines.engine import Json
from gateway.fleet.adapters import Adapter
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement.scheduler import Scheduler
from gateway.fleet.replica import Replica
from gateway.fleet.watch import starts
from gateway.weights.coordinator import WeightCoordinator
from gateway.weights.snapshots import Snapshots

_OF_ENGINES = (
    "replica_id", "group", "kind", "engine_version", "model", "world_size", "reload_reason", "gpu_ids", "node",
    "url", "pid", "log_path",
)  # fmt: skip


def status_report(fleet: Fleet, scheduler: Scheduler, weights: WeightCoordinator, snapshots: Snapshots) -> Json:
    """Seconds and counts; `weight_version` of a replica is null where its weights are unknown.

    `pid` is the engine's own process; `replicas_missing` has a row for each expected replica that is not there.
    `start` has the seconds of an engine's start by phase: up to now where it goes on, in the last phase. It is null
    where no engine starts for a missing replica, and for a replica whose engine was not started here.
    `replicas_lost` counts by engine group; `events` are the last hundred, oldest first. With a weight store these and
    `last_weight_update` outlive the gateway.
    `restarts` counts how often an engine was started again under this label after a loss, since the last change of the
    configuration; with a weight store it outlives the gateway. Removals on purpose, as by `scale`, count from 0 again.

    Updates, pauses and the gate concern the model `policy`, which is null where all models are frozen.
    """
    update, last, models = weights.update, weights.updates.reports(1), fleet.models
    queues = {model: scheduler.queue_length(model) for model in models.names}
    return {
        "ready": fleet.is_ready,
        "policy": models.policy,
        "weight_version": fleet.version,
        "weight_update": update and update.report(),
        "last_weight_update": last[0] if last else None,
        "weight_store": snapshots.report(),
        "weight_relay": weights.relay_report(),
        "paused": weights.pauses.is_paused,
        "gate_closed_for": scheduler.closed_for,
        "queue_length": sum(queues.values()),
        "models": [{"model": m, "frozen": m != models.policy, "queue_length": n} for m, n in queues.items()],
        "adapters": [_adapter_report(adapter, fleet) for adapter in fleet.adapters.loaded],
        "replicas_expected": fleet.expected,
        "replicas_refused": fleet.arrivals.refused,
        "replicas_lost": dict(fleet.losses),
        "replicas": [_replica_report(replica) for replica in fleet.replicas],
        "replicas_missing": [
            {
                "group": group,
                "reason": reason,
                "replica_id": start and start.replica_id,
                "start": start and starts.report(start.phases),
            }
            for group, reason, start in fleet.missing
        ],
        "events": fleet.events.last,
    }


def _adapter_report(adapter: Adapter, fleet: Fleet) -> Json:
    holders = [replica.replica_id for replica in fleet.trained if replica.holds(adapter)]
    own = {"name": adapter.name, "path": adapter.path, "version": adapter.version}
    return own | {"rollouts": adapter.users, "replicas": holders}


def _replica_report(replica: Replica) -> Json:
    info = replica.info
    own = {name: getattr(replica, name) for name in ("label", "state", "reason", "weight_version", "frozen")}
    return {name: getattr(info, name) for name in _OF_ENGINES} | {
        **own,
        "samples_in_flight": replica.load_samples,
        "samples_placed": replica.placed,
        "restarts": replica.place.restarts,
        "uptime_s": round(time.time() - info.started, 1) if info.started else None,
        "start": starts.report(info.phases, info.started) if info.phases else None,
    }
