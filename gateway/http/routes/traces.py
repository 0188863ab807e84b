"""The life of a rollout by its request's id."""

from aiohttp import web

from engines.errors import UnknownRequest
from gateway.fleet.placement.lives import KEPT, Lives
from gateway.http.access import Access
from gateway.http.json_body import reply


class TraceRoutes:
    """Attempts of the last rollouts: times, replicas, weight versions, ends."""

    def __init__(self, lives: Lives) -> None:
        self._lives = lives

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        router.add_get("/traces/{request_id:.+}", access.for_admin(self._show))

    async def _show(self, request: web.Request) -> web.Response:
        """Reply with the attempts of each rollout of a request."""
        name = request.match_info["request_id"]
        if not (found := self._lives.of(name)):
            raise UnknownRequest(
                f"no rollout of request {name!r} is among the last {KEPT:,}: send X-Request-Id to choose the id, or "
                "take it from the reply"
            )
        return reply({"request_id": name, "rollouts": found})
