"""GET /v1/weights: the policy's tensors, for a trainer to check before it sends."""

from engines.engine import Json
from gateway.fleet.fleet import Fleet
from gateway.weights.updates.update_log import UpdateLog


def served_weights(fleet: Fleet, updates: UpdateLog) -> Json:
    """Return model, version, and each tensor under its checkpoint name, with the dtype and shape in the engines.

    `update` is the unique name of the update that made the version, null after a restart of the gateway. `tensors` is
    null where no replica could read its checkpoint, whose config.json is `config`, and `tied` has the names of tensors
    that it stores more than once. `replicas` has engine, release and GPU UUIDs of each.
    """
    infos = [replica.info for replica in fleet.trained_alive]
    known = next((info for info in infos if info.tensors is not None), None)
    tensors = known and known.tensors
    return {
        "model": fleet.models.first,
        "weight_version": fleet.version,
        "update": updates.last_committed and updates.last_committed.name,
        "tensors": tensors
        and [{"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)} for tensor in tensors],
        "config": known.model_config if known else "",
        "tied": known.tied if known else (),
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
