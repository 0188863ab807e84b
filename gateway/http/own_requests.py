"""The ids of requests under way, by client, so that an inference key ends its own and no other's of an equal id."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from gateway.http.access import CLIENT, Access


class OwnRequests:
    """Requests that their clients may end by id. Admin keys and trusted networks may end those of all clients."""

    def __init__(self) -> None:
        self._under_way: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def under_way(self, request: web.Request, name: str) -> Iterator[None]:
        """Count the id as the client's while the block runs."""
        held = request[CLIENT], name
        self._under_way[held] += 1
        try:
            yield
        finally:
            self._under_way[held] -= 1
            if not self._under_way[held]:
                del self._under_way[held]

    def named(self, request: web.Request, access: Access, name: str) -> list[str]:
        """Return the clients with a request of this id under way that the client of `request` may end."""
        if access.is_admin(request):
            return [client for client, running in self._under_way if running == name]
        client = request[CLIENT]
        return [client] if (client, name) in self._under_way else []
