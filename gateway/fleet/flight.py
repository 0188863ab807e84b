"""What a request in flight meets on its replica: the weight versions that it begins, goes on and ends with."""

from engines.engine import Json


class Flight:
    """One request on one replica. `began` is the version that was held when it was sent; None in an update.

    `Replica.hold` tells it of each version that its replica takes meanwhile. `versions` are all of them, oldest first,
    and each may have made any of its tokens: one may come long after it was made.
    """

    def __init__(self, version: int | None) -> None:
        self.began = version
        self.versions = [] if version is None else [version]
        self._kv = list(self.versions)

    def meet(self, version: int, *, keeps_kv: bool) -> None:
        """Its replica holds `version` from here on; what it has read so far was kept, or is read again."""
        self.versions.append(version)
        self._kv = [*self._kv, version] if keeps_kv else [version]

    def kv_versions(self, choice: Json) -> list[int]:
        """The versions that wrote the KV under the last token of a choice, oldest first; more than one are a mixture.

        Its spans say where it ended, if they have limits. What else the engine did with its KV is not known here: one
        that it kept waiting, or preempted, has read its prompt with newer weights than the oldest of these.
        """
        spans = choice.get("weight_versions") or ()
        if not spans or spans[-1]["end"] is None:
            return list(self._kv)
        last = spans[-1]["version"]
        return [version for version in self._kv if version <= last] or [last]
