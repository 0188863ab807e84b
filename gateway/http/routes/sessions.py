"""/v1/sessions: the ends of sessions, which free the KV that they count with."""

from aiohttp import web

from engines.errors import UnknownRequest
from gateway.fleet.placement.scheduler import Scheduler
from gateway.fleet.placement.sessions import session_key
from gateway.http.access import Access
from gateway.http.json_body import reply


class SessionRoutes:
    """Sessions: the turns of one agent, on the replica that holds their prefix."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        self._access = access
        router.add_post("/v1/sessions/{id}/finish", access.for_inference(self._finish))

    async def _finish(self, request: web.Request) -> web.Response:
        """End a session whose last turn is over: others may take its place in the KV cache.

        An inference key ends its own sessions, an admin key those of all clients.
        """
        name = request.match_info["id"]
        clients = self._access.clients_within_reach(request)
        were_known = [self._scheduler.finish_session(session_key(client, name)) for client in clients]
        if not any(were_known):
            raise UnknownRequest(
                f"no session {name!r:.300} of this key is known: it had no turn here, has ended, or was forgotten",
                param="id",
            )
        return reply({"session": name})
