"""Routes about the rollout URL itself: its root, and its routes for programs."""

from aiohttp import hdrs, web

from engines.engine import Json
from gateway.fleet.metrics import package_version
from gateway.http.access import Access
from gateway.http.json_body import reply

_METHODS = (hdrs.METH_GET, hdrs.METH_POST, hdrs.METH_DELETE)


class AboutRoutes:
    """The root and /openapi.json. They hold no data of the fleet, so they are open."""

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        self._router = router
        router.add_get("/", self._start)
        router.add_get("/openapi.json", self._document)

    async def _start(self, request: web.Request) -> web.Response:
        """Say what this URL is."""
        text = (
            f"rollout-gateway {package_version()}: one URL in front of inference engines for RL rollouts.\n"
            "/dashboard shows the fleet, /openapi.json lists the routes; /v1/completions, /v1/chat/completions and "
            "vLLM's other routes generate.\n"
        )
        return web.Response(text=text)

    async def _document(self, request: web.Request) -> web.Response:
        """Reply with an OpenAPI document of the paths and their methods, by which clients tell what a server can do.

        Routes that refuse every method are left out.
        """
        paths: dict[str, Json] = {}
        for route in self._router.routes():
            if route.resource is not None and route.method in _METHODS:
                paths.setdefault(route.resource.canonical, {})[route.method.lower()] = {}
        info = {"title": "rollout-gateway", "version": package_version()}
        return reply({"openapi": "3.1.0", "info": info, "paths": dict(sorted(paths.items()))})
