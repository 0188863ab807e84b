"""The last events of the fleet, for people: changes of replicas and ends of updates. The log has all of them."""

import time
from collections import deque

from engines.engine import Json

KEPT = 100


class Events:
    """The last hundred events, oldest first."""

    def __init__(self) -> None:
        self._events: deque[Json] = deque(maxlen=KEPT)

    def add(self, subject: str, text: str) -> None:
        """Note an event; `subject` is a replica's id, or the name of what changed."""
        self._events.append({"at": round(time.time(), 3), "subject": subject, "text": text})

    @property
    def last(self) -> list[Json]:
        return list(self._events)
