"""HTTP routes of weight updates, vLLM's and the gateway's own, and of pauses."""

import asyncio
import contextlib
import math

from aiohttp import web

from engines.engine import Json
from engines.errors import InvalidRequest, StoreFailed
from engines.types import InFlight, PauseMode
from gateway.config.schema import WeightsConfig
from gateway.fleet.fleet import Fleet
from gateway.http.access import Access
from gateway.http.door import LEASE_PATH, notice_lost_host
from gateway.http.json_body import read_object, reply
from gateway.weights.coordinator import WeightCoordinator
from gateway.weights.snapshots import Snapshots
from gateway.weights.updates.update_log import UpdateLog

_LEASE_BEAT_S = 3.0
"""A byte so often keeps a lease open through proxies."""
_LONGEST_LEASE = 100
_LONGEST_NAME = 300
_HIGHEST_VERSION = 1 << 62
"""A trainer's number, such as a time in nanoseconds. Those after it fit 64 bits too, as replies and peers need."""


class WeightRoutes:
    """Weight updates and pauses of all replicas, in vLLM's dialect."""

    def __init__(self, config: WeightsConfig, fleet: Fleet, weights: WeightCoordinator, snapshots: Snapshots) -> None:
        self._config = config
        self._fleet = fleet
        self._weights = weights
        self._snapshots = snapshots

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
        router.add_post(LEASE_PATH, access.for_admin(self._lease))
        router.add_get("/v1/weight_canary", access.for_inference(self._canary))
        router.add_post("/reset_prefix_cache", access.for_admin(self._reset_prefix_cache))
        router.add_post("/pause", access.for_admin(self._pause))
        router.add_post("/resume", access.for_admin(self._resume))
        router.add_get("/is_paused", access.for_admin(self._is_paused))

    async def _world_size(self, request: web.Request) -> web.Response:
        """Reply with the number of workers in a weight transfer group."""
        return reply({"world_size": await self._weights.world_size()})

    async def _init(self, request: web.Request) -> web.Response:
        """Open the weight transfer group of the trainer and all replicas."""
        body = await read_object(request)
        await self._weights.init(_section(body, "init_info"), _lease(body))
        return reply({"message": "Weight transfer initialized"})

    async def _start(self, request: web.Request) -> web.Response:
        body = await read_object(request, required=False)
        await self._weights.start(_in_flight(body), _lease(body), _version(body), _group(body), _after(body))
        return reply({"message": "Weight update started"})

    async def _lease(self, request: web.Request) -> web.StreamResponse:
        """Hold a lease with an endless reply: the update of its trainer ends with this connection."""
        with self._weights.leases.held(_lease_of(await read_object(request))):
            response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
            await response.prepare(request)
            notice_lost_host(request)
            while True:
                await response.write(b"\n")
                await asyncio.sleep(_LEASE_BEAT_S)

    async def _update(self, request: web.Request) -> web.Response:
        """Receive tensors, which the trainer broadcasts at the same time."""
        body = await read_object(request)
        await self._weights.receive(_section(body, "update_info"), _lease(body))
        return reply({"message": "Weights updated"})

    async def _finish(self, request: web.Request) -> web.Response:
        """Verify the update on all replicas, and serve the new version."""
        body = await read_object(request, required=False)
        version = await self._weights.finish(_canary_logprobs(body), _lease(body))
        return reply({"message": "Weight update finished", "weight_version": version})

    async def _load(self, request: web.Request) -> web.Response:
        """Load a draft that `trainer_client.WeightSender` wrote into the store."""
        body = await read_object(request)
        if body.get("transport") != "store":
            raise InvalidRequest(
                f"transport = {body.get('transport')!r} is not 'store', the only transport of this route; over a group "
                "weights come with /init_weight_transfer_engine and the calls after it",
                param="transport",
            )
        snapshot, version = body.get("snapshot"), _version(body)
        if not isinstance(snapshot, str):
            raise InvalidRequest("snapshot must be the name of a draft's folder", param="snapshot")
        rolling = body.get("rolling")
        if rolling is not None and type(rolling) is not bool:
            raise InvalidRequest(
                f"rolling = {rolling!r} is neither true nor false; leave it out for weights.rolling",
                param="rolling",
            )
        served = await self._weights.load(
            snapshot, version, _canary_logprobs(body), rolling=rolling, in_flight=_in_flight(body), after=_after(body)
        )
        return reply({"weight_version": served})

    async def _abandon(self, request: web.Request) -> web.Response:
        """Abort the open update, for a trainer that failed in the middle of it."""
        body = await read_object(request, required=False)
        reason = f": {body['reason']}" if body.get("reason") else ""
        await self._weights.abandon(f"the trainer gave it up{reason}", _lease(body))
        return reply({"weight_version": self._fleet.version})

    async def _info(self, request: web.Request) -> web.Response:
        return reply({"weight_version": str(self._fleet.version)})

    async def _served(self, request: web.Request) -> web.Response:
        """Reply with the served version and its tensors: names, dtypes, shapes."""
        return reply(_tensors(self._fleet, self._weights.updates))

    async def _updates(self, request: web.Request) -> web.Response:
        """Reply with the records of the running update and of earlier updates, newest first."""
        running = [self._weights.update.report()] if self._weights.update else []
        return reply({"weight_updates": running + self._weights.updates.reports()})

    async def _canary(self, request: web.Request) -> web.Response:
        """Reply with the tokens whose log-probs a trainer may send with /finish_weight_update."""
        return reply({"token_ids": self._weights.canary_token_ids()})

    async def _store(self, request: web.Request) -> web.Response:
        """Reply with the folder for drafts, the model, and how versions reach the replicas.

        `base` is the version that a delta may refer to; null where it is not kept.
        """
        await self._snapshots.make_room(self._fleet.settled_version)  # a trainer writes next
        place = {"folder": str(self._snapshots.folder), "model": self._fleet.models.first, "base": await self._base()}
        return reply(place | {"rolling": self._config.rolling, "replicas": len(self._fleet.trained)})

    async def _base(self) -> int | None:
        served = self._fleet.version
        with contextlib.suppress(StoreFailed):
            async with self._snapshots.reading(served, self._fleet.label):
                return served
        return None

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", PauseMode.ABORT)
        if mode not in list(PauseMode):
            raise InvalidRequest(f"mode = {mode!r} is none of {', '.join(PauseMode)}", param="mode")
        # By default vLLM clears the KV cache of paused requests, which costs their prefill again. Nothing here
        # depends on it: prefixes are salted by weight version.
        clear_cache = request.query.get("clear_cache", "false").lower() == "true"
        await self._weights.pauses.pause(PauseMode(mode), clear_cache=clear_cache)
        return reply({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        await self._weights.pauses.resume()
        return reply({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return reply({"is_paused": self._weights.pauses.is_paused})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        return reply({"success": await self._weights.pauses.reset_prefix_cache()})


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


def _section(body: Json, key: str) -> Json:
    section = body.get(key)
    if not isinstance(section, dict):
        raise InvalidRequest(f"the body needs {key!r}, a JSON object", param=key)
    return section


def _version(body: Json) -> int | None:
    """Return the version that the trainer names, if any."""
    version = body.get("version")
    if version is not None and (type(version) is not int or not 1 <= version <= _HIGHEST_VERSION):
        raise InvalidRequest(
            f"version = {version!r} is not a version: send an integer from 1 to 2**62, or leave it out",
            param="version",
        )
    return version


def _after(body: Json) -> str | None:
    """Return the id of the update that the trainer adds to, if it names one."""
    return _name(body, "after", "such as the `update` of GET /v1/weights")


def _group(body: Json) -> str | None:
    """Return the place of the trainer's transfer group, if it names one."""
    return _name(body, "group", "the address and the port of the transfer group such as 10.0.0.1:29500")


def _name(body: Json, field: str, meaning: str) -> str | None:
    """Return the name in a field, if any."""
    name = body.get(field)
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME):
        raise InvalidRequest(
            f"{field} must be a text of at most {_LONGEST_NAME} characters, {meaning}, or left out", param=field
        )
    return name


def _lease(body: Json) -> str | None:
    """Return the lease that a trainer's call is made under, if any."""
    return _lease_of(body) if "lease" in body else None


def _lease_of(body: Json) -> str:
    """Return the trainer's name for its lease."""
    lease = body.get("lease")
    if not isinstance(lease, str) or not 0 < len(lease) <= _LONGEST_LEASE:
        raise InvalidRequest(
            f"lease must be a text of 1 to {_LONGEST_LEASE} characters that no other trainer uses, such as a UUID",
            param="lease",
        )
    return lease


def _in_flight(body: Json) -> InFlight | None:
    """Return the trainer's choice for rollouts in flight, if any."""
    given = body.get("in_flight")
    if given is not None and given not in list(InFlight):
        raise InvalidRequest(f"in_flight = {given!r} is none of {', '.join(InFlight)}", param="in_flight")
    return None if given is None else InFlight(given)


def _canary_logprobs(body: Json) -> list[float] | None:
    """Return the trainer's own log-probs of the canary, if any."""
    given = body.get("canary_logprobs")
    if given is None:
        return None
    if not isinstance(given, list) or not all(type(value) in (int, float) and math.isfinite(value) for value in given):
        raise InvalidRequest(
            "canary_logprobs must be a list of numbers: the log-prob of each token of GET /v1/weight_canary but the "
            "first, or left out",
            param="canary_logprobs",
        )
    return [float(value) for value in given]
