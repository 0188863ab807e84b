"""Pages for people: they load nothing from elsewhere, and no other site may frame them."""

from aiohttp import web

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_reply(content: bytes) -> web.Response:
    """Return a reply with an HTML page in UTF-8."""
    return web.Response(body=content, content_type="text/html", charset="utf-8", headers=_HEADERS)
