"""GET /v1/weights: the policy's tensors, for a trainer to check before it sends."""

from engines.engine import Json
from gateway.fleet.fleet import Fleet
from gateway.weights.updates.update_log import UpdateLog


def served_weights(fleet: Fleet, updates: UpdateLog) -> Json:
    """Return model, version, and each tensor under its checkpoint name, with the dtype and shape in the engines.

    `update` is the unique name of the update that made the version, null after a restart of the gateway. `tensors` is
    null where no replica could read its checkpoint. `replicas` has engine, release and GPU UUIDs of each.
    """
    infos = [replica.info for replica in fleet.trained_alive]
    tensors = next((info.tensors for info in infos if info.tensors is not None), None)
    return {
        "model": fleet.models.first,
        "weight_version": fleet.version,
        "update": updates.last_committed and updates.last_committed.name,
        "tensors": tensors
        and [{"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)} for tensor in tensors],
        "replicas": [
            {
                "replica_id": info.replica_id,
                "kind": info.kind,
                "engine_version": info.engine_version,
                "dialect": info.dialect,
                "gpus": list(info.gpus),
            }
            for info in infos
        ],
    }
