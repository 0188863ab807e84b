"""The places of engines in their groups: a successor takes the place, and so the label, of an engine that was lost."""

from collections import defaultdict
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from engines.types import ReplicaInfo


@dataclass(slots=True)
class Place:
    """One engine's place. `restarts` counts the engines that were started again here after a loss."""

    number: int = 0
    replica_id: str = ""
    incarnation: str = ""
    restarts: int = 0

    def leave(self) -> None:
        """Free the place of an engine that was removed on purpose: the next one here is no restart of it."""
        self.replica_id, self.incarnation, self.restarts = "", "", 0


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
