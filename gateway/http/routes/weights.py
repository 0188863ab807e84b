"""HTTP routes of weight updates, vLLM's and the gateway's own, and of pauses."""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from aiohttp import web
from msgspec import Meta, Struct

from engines.engine import Json
from engines.errors import InvalidRequest
from engines.types import InFlight, PauseMode
from gateway.config.schema import WeightsConfig
from gateway.dialects.fields import read_fields
from gateway.fleet.fleet import Fleet
from gateway.http.access import Access
from gateway.http.json_body import read_object, reply
from gateway.weights.coordinator import WeightCoordinator
from gateway.weights.snapshots import Snapshots
from gateway.weights.updates.record import UpdateLog

_Name = Annotated[str, Meta(min_length=1, max_length=300)]
# A trainer's number, such as a time in nanoseconds. Those after it fit 64 bits too, as replies and peers need.
_Version = Annotated[int, Meta(ge=1, le=1 << 62)]


class _Call(Struct):
    """The fields of a trainer's calls; each call has some, and what engines know of their own."""

    init_info: dict[str, Any] | None = None
    update_info: dict[str, Any] | None = None
    version: _Version | None = None
    """The version that the trainer names."""
    group: _Name | None = None
    """Address and port of the trainer's transfer group, such as 10.0.0.1:29500."""
    in_flight: InFlight | None = None
    canary_logprobs: list[float] | None = None
    """The log-prob of each token of GET /v1/weight_canary but the first."""
    transport: Any = None
    snapshot: str | None = None
    reason: Any = None


T = TypeVar("T")


@dataclass(eq=False)
class WeightRoutes:
    """Weight updates and pauses of all replicas, in vLLM's dialect."""

    config: WeightsConfig
    fleet: Fleet
    weights: WeightCoordinator
    snapshots: Snapshots

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        router.add_get("/get_world_size", access.for_admin(self._world_size))
        router.add_post("/init_weight_transfer_engine", access.for_admin(self._init))
        router.add_post("/start_weight_update", access.for_admin(self._start))
        router.add_post("/update_weights", access.for_admin(self._update))
        router.add_post("/finish_weight_update", access.for_admin(self._finish))
        router.add_get("/weight_info", access.for_inference(self._info))
        router.add_get("/v1/weight_updates", access.for_inference(self._updates))
        router.add_post("/v1/weight_updates", access.for_admin(self._load))
        router.add_delete("/v1/weight_updates", access.for_admin(self._abandon))
        router.add_get("/v1/weights", access.for_inference(self._served))
        router.add_get("/v1/weight_store", access.for_admin(self._store))
        router.add_get("/v1/weight_canary", access.for_inference(self._canary))
        router.add_post("/reset_prefix_cache", access.for_admin(self._reset_prefix_cache))
        router.add_post("/pause", access.for_admin(self._pause))
        router.add_post("/resume", access.for_admin(self._resume))
        router.add_get("/is_paused", access.for_admin(self._is_paused))

    async def _world_size(self, request: web.Request) -> web.Response:
        """Reply with the number of workers in a weight transfer group."""
        return reply({"world_size": await self.weights.world_size()})

    async def _init(self, request: web.Request) -> web.Response:
        """Open the weight transfer group of the trainer and all replicas."""
        call = await _call(request)
        await self.weights.init(_needed(call.init_info, "init_info", "a JSON object"))
        return reply({"message": "Weight transfer initialized"})

    async def _start(self, request: web.Request) -> web.Response:
        call = await _call(request, required=False)
        await self.weights.start(call.in_flight, call.version, call.group)
        return reply({"message": "Weight update started"})

    async def _update(self, request: web.Request) -> web.Response:
        """Receive tensors, which the trainer broadcasts at the same time."""
        call = await _call(request)
        await self.weights.receive(_needed(call.update_info, "update_info", "a JSON object"), call.group)
        return reply({"message": "Weights updated"})

    async def _finish(self, request: web.Request) -> web.Response:
        """Verify the update on all replicas, and serve the new version."""
        call = await _call(request, required=False)
        version = await self.weights.finish(call.canary_logprobs, call.group)
        return reply({"message": "Weight update finished", "weight_version": version})

    async def _load(self, request: web.Request) -> web.Response:
        """Load a draft that `trainer_client.WeightSender` wrote into the store."""
        call = await _call(request)
        if call.transport != "store":
            raise InvalidRequest(
                f"transport = {call.transport!r} is not 'store', the only transport of this route; over a group "
                "weights come with /init_weight_transfer_engine and the calls after it",
                param="transport",
            )
        served = await self.weights.load(
            _needed(call.snapshot, "snapshot", "the name of a draft's folder"),
            call.version,
            call.canary_logprobs,
            call.in_flight,
        )
        return reply({"weight_version": served})

    async def _abandon(self, request: web.Request) -> web.Response:
        """Abort the open update, for a trainer that failed in the middle of it."""
        call = await _call(request, required=False)
        reason = f": {call.reason}" if call.reason else ""
        await self.weights.abandon(f"the trainer gave it up{reason}", call.group)
        return reply({"weight_version": self.fleet.version})

    async def _info(self, request: web.Request) -> web.Response:
        return reply({"weight_version": str(self.fleet.version)})

    async def _served(self, request: web.Request) -> web.Response:
        """Reply with the served version and its tensors: names, dtypes, shapes."""
        return reply(_tensors(self.fleet, self.weights.updates))

    async def _updates(self, request: web.Request) -> web.Response:
        """Reply with the records of the running update and of earlier updates, newest first."""
        running = [self.weights.update.report()] if self.weights.update else []
        return reply({"weight_updates": running + self.weights.updates.reports()})

    async def _canary(self, request: web.Request) -> web.Response:
        """Reply with the tokens whose log-probs a trainer may send with /finish_weight_update."""
        return reply({"token_ids": self.weights.canary_token_ids()})

    async def _store(self, request: web.Request) -> web.Response:
        """Reply with the folder for drafts, and the model."""
        await self.snapshots.make_room(self.fleet.settled_version)  # a trainer writes next
        return reply({"folder": str(self.snapshots.folder), "model": self.fleet.models.first})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", PauseMode.ABORT)
        if mode not in list(PauseMode):
            raise InvalidRequest(f"mode = {mode!r} is none of {', '.join(PauseMode)}", param="mode")
        # By default vLLM clears the KV cache of paused requests, which costs their prefill again. Nothing here
        # depends on it: prefixes are salted by weight version.
        clear_cache = request.query.get("clear_cache", "false").lower() == "true"
        await self.weights.pauses.pause(PauseMode(mode), clear_cache=clear_cache)
        return reply({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        await self.weights.pauses.resume()
        return reply({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return reply({"is_paused": self.weights.pauses.is_paused})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        return reply({"success": await self.weights.pauses.reset_prefix_cache()})


def _tensors(fleet: Fleet, updates: UpdateLog) -> Json:
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


def _needed(value: T | None, field: str, meaning: str) -> T:
    if value is None:
        raise InvalidRequest(f"the body needs {field!r}: {meaning}", param=field)
    return value


async def _call(request: web.Request, *, required: bool = True) -> _Call:
    return read_fields(_Call, await read_object(request, required=required))
