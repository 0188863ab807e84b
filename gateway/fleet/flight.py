"""The record of a request in flight: the weight versions it ran under."""

from engines.engine import Json


class Flight:
    """One request on one replica. `began` is the replica's version when the request was sent; None in an update.

    `Replica.hold` reports each version that the replica takes meanwhile. `versions` has all of them, oldest first. Any
    of them may have made any token: a token may arrive long after it was made.
    """

    def __init__(self, version: int | None) -> None:
        self.began = version
        self.versions = [] if version is None else [version]
        self._kv = list(self.versions)

    @classmethod
    def of(cls, versions: list[int], kv_versions: list[int]) -> "Flight":
        """Return a flight of a gateway before this one."""
        flight = cls(versions[0] if versions else None)
        flight.versions, flight._kv = versions, kv_versions
        return flight

    def meet(self, version: int, *, keeps_kv: bool) -> None:
        """Note that the replica holds `version` from here on, and kept the request's KV or computes it again."""
        self.versions.append(version)
        self._kv = [*self._kv, version] if keeps_kv else [version]

    def kv_versions(self, choice: Json) -> list[int]:
        """Return the versions that wrote the KV under the last token of a choice, oldest first; several are a mixture.

        The choice's spans, if they have limits, say where it ended. An engine that kept the request waiting, or
        preempted it, computed its KV with newer weights than the oldest version here; the gateway does not know that.
        """
        spans = choice.get("weight_versions") or ()
        if not spans or spans[-1]["end"] is None:
            return list(self._kv)
        last = spans[-1]["version"]
        return [version for version in self._kv if version <= last] or [last]
