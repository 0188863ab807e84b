"""The ids of requests under way, by client, so that an inference key ends its own and no other's of an equal id."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

from aiohttp import web

from gateway.http.access import CLIENT, Access


class AbortKind(StrEnum):
    """The requests that an abort by ids is about."""

    TOKENS = "tokens"  # those of /inference/v1/generate
    SGLANG = "sglang"  # those of /generate


AbortElsewhere = Callable[[AbortKind, tuple[str, ...], str | None], Awaitable[None]]
"""Ends requests of these ids in the other processes of the gateway; those of one client alone, if it is given."""


class OwnRequests:
    """Requests that their clients may end by id. Admin keys and trusted networks may end those of all clients."""

    def __init__(self) -> None:
        self._under_way: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def under_way(self, request: web.Request, ids: Sequence[str]) -> Iterator[None]:
        """Count the ids as the client's while the block runs."""
        held = [(request[CLIENT], name) for name in ids]
        self._under_way.update(held)
        try:
            yield
        finally:
            self._under_way.subtract(held)
            for one in held:
                if not self._under_way[one]:
                    del self._under_way[one]

    def named(self, request: web.Request, access: Access, name: str) -> list[str]:
        """Return the clients with a request of this id under way that the client of `request` may end."""
        return self.of(name, reach(request, access))

    def of(self, name: str, client: str | None) -> list[str]:
        """Return the clients, or `client` alone, with a request of this id under way."""
        if client is None:
            return [client for client, running in self._under_way if running == name]
        return [client] if (client, name) in self._under_way else []


def reach(request: web.Request, access: Access) -> str | None:
    """The client whose requests the client of `request` may end; None for those of all."""
    return None if access.is_admin(request) else request[CLIENT]
