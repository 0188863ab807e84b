"""Routes about the rollout URL itself: its root, its description for programs and for people."""

from aiohttp import web

from gateway.fleet.metrics import package_version
from gateway.http.access import Access
from gateway.http.json_body import reply
from gateway.http.openapi.document import openapi_document
from gateway.http.openapi.page import docs_page, start_page
from gateway.http.pages.html_page import page_reply


class AboutRoutes:
    """The root, /docs and /openapi.json. They hold no data of the fleet, so they are open."""

    def add_routes(self, router: web.UrlDispatcher, access: Access) -> None:
        self._router, self._access = router, access
        router.add_get("/", self._start)
        router.add_get("/docs", self._docs)
        router.add_get("/openapi.json", self._document)

    async def _start(self, request: web.Request) -> web.Response:
        """Say what this URL is: a page for browsers, lines of text for other clients."""
        if "text/html" in request.headers.get("Accept", ""):
            return page_reply(start_page(package_version()))
        text = (
            f"rollout-gateway {package_version()}: one URL in front of inference engines for RL rollouts.\n"
            "/dashboard shows the fleet, /docs and /openapi.json describe every route; /v1/completions, "
            "/v1/chat/completions and vLLM's other routes generate.\n"
        )
        return web.Response(text=text)

    async def _docs(self, request: web.Request) -> web.Response:
        """Reply with a page that describes every route."""
        return page_reply(docs_page(openapi_document(self._router, self._access)))

    async def _document(self, request: web.Request) -> web.Response:
        """Reply with the OpenAPI document."""
        return reply(openapi_document(self._router, self._access))
