"""Replicas that come in: admitted or refused, resumed, and asked for the weights and adapters that they hold."""

import time
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from collections.abc import Set as AbstractSet

import structlog

from engines.engine import Engine
from engines.errors import ConfigError, DeadlineExceeded, EngineError, EngineRefused
from engines.types import ReplicaInfo
from gateway.config.models import Models
from gateway.config.schema import FleetConfig
from gateway.fleet.adapters import Adapter, Adapters
from gateway.fleet.history import Events
from gateway.fleet.replica import Place, Replica

log = structlog.get_logger()

Connect = Callable[[ReplicaInfo], Engine]
_KEY_REFUSED = (401, 403)


class Arrivals:
    """Makes replicas of engines that are discovered. `refused` has the reason by id of each that was not admitted."""

    def __init__(
        self,
        config: FleetConfig,
        models: Models,
        adapters: Adapters,
        events: Events,
        connect: Connect,
    ) -> None:
        self.refused: dict[str, str] = {}
        self._timeout_s = config.probe_timeout_s
        self._models = models
        self._adapters = adapters
        self._places = Places()
        self._events = events
        self._connect = connect

    def forget_all_but(self, listed: Container[str]) -> None:
        """Forget refusals of replicas that are gone."""
        self.refused = {replica_id: reason for replica_id, reason in self.refused.items() if replica_id in listed}

    async def welcome(self, info: ReplicaInfo, present: AbstractSet[str]) -> Replica | None:
        """Return the replica that joins; None where it is refused, or does not answer yet. Ids that are `present` keep
        their places."""
        try:
            self._models.join(info)
        except ConfigError as error:
            self._refuse(info, str(error))
            return None
        frozen = self._models.is_frozen(info.group)
        replica = Replica(info, self._connect(info), frozen=frozen)
        # Before the first wait, so that replicas that join together have labels in the order of their list.
        replica.place = self._places.take(info, present)
        try:
            await self._wake(replica)
            await self._read_label(replica)
            has_adapters = not replica.frozen and "/v1/load_lora_adapter" in replica.info.capabilities
            adapters = await replica.engine.lora_adapters(self._timeout_s) if has_adapters else {}
        except BaseException as error:
            await replica.engine.close()
            if not isinstance(error, Exception):
                raise
            self._put_off(info, error)
            return None
        self.refused.pop(info.replica_id, None)
        self._take_over(replica, adapters)
        return replica

    def _put_off(self, info: ReplicaInfo, error: Exception) -> None:
        """Tell why a replica does not come in yet. Status has a refused key, which does not pass by itself."""
        if isinstance(error, EngineRefused) and error.status in _KEY_REFUSED:
            self._refuse(info, str(error))
            return
        self.refused.pop(info.replica_id, None)
        is_expected = isinstance(error, EngineError | DeadlineExceeded)
        log.warning("replica does not answer yet", replica=info.replica_id, error=str(error), exc_info=not is_expected)

    def _refuse(self, info: ReplicaInfo, reason: str) -> None:
        if self.refused.get(info.replica_id) != reason:
            log.error("replica does not come in", replica=info.replica_id, url=info.url, reason=reason)
            self._events.add(info.replica_id, f"refused: {reason}")
        self.refused[info.replica_id] = reason

    async def _wake(self, replica: Replica) -> None:
        """Resume an engine that an earlier gateway left frozen, by an update or a trainer's pause."""
        if replica.info.takes_weights and not replica.frozen and replica.info.has("/resume"):
            await replica.engine.resume(self._timeout_s)

    async def _read_label(self, replica: Replica) -> None:
        """Read what the engine holds; `Fleet._agree` judges it."""
        if replica.frozen:
            await replica.engine.health(self._timeout_s)
            replica.weight_version = 0
            return
        replica.found = await replica.engine.weight_label(self._timeout_s)

    def _take_over(self, replica: Replica, adapters: Mapping[str, str]) -> None:
        """Serve adapters that an engine already holds. A name that was loaded here is loaded again, as the engine's may
        be an earlier load."""
        for name, path in adapters.items():
            adapter = None if self._adapters.was_loaded(name) else Adapter(name, path, load_id=time.time_ns())
            replica.adapters[name] = adapter
            if adapter is not None:
                self._adapters.add(adapter)


class Places:
    """The places by group; a label counts them from 0."""

    def __init__(self) -> None:
        self._groups: defaultdict[str, list[Place]] = defaultdict(list)

    def take(self, info: ReplicaInfo, present: AbstractSet[str]) -> Place:
        """Return the engine's place. Ids that are `present` keep theirs."""
        places = self._groups[info.group]
        own = (place for place in places if place.replica_id == info.replica_id)
        free = (place for place in places if place.replica_id not in present)
        place = next(own, None) or next(free, None)
        if place is None:
            place = Place(len(places))
            places.append(place)
        place.restarts += place.incarnation not in ("", info.incarnation)
        place.replica_id, place.incarnation = info.replica_id, info.incarnation
        return place
