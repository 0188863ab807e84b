"""The OpenAPI document of the rollout URL, from the router's own table of routes."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from aiohttp import hdrs, web

from engines.engine import Json
from gateway.fleet.metrics import package_version
from gateway.http.access import Access, Handler, Need
from gateway.http.openapi.fields import BODIES, QUERIES, Field

_KEYS = {
    Need.INFERENCE: "An inference key or an admin key.",
    Need.ADMIN: "An admin key.",
    Need.STORE: "An admin key, or the key that engines fetch weight versions with.",
}
_ANY_METHOD = "post"
_SECTION = re.compile(r"(?<=[a-z])(?=[A-Z])")


def openapi_document(router: web.UrlDispatcher, access: Access) -> Json:
    """Describe every route of the router: its summary, the key that it needs, and its fields where they are known.

    A summary is the first sentence of the handler's docstring, a tag the class that holds the handler. HEAD is left
    out beside GET. A route for any method is described once, as POST, with `x-any-method`.
    """
    paths: dict[str, Json] = {}
    tags: dict[str, str] = {}
    for route in _routes(router):
        need, handler = access.need_of(route.handler)
        tag, about = _tag(handler)
        tags[tag] = about
        method = _ANY_METHOD if route.method == hdrs.METH_ANY else route.method.lower()
        path = _path(route)
        paths.setdefault(path, {}).setdefault(method, _operation(route, method, path, handler, need) | {"tags": [tag]})
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rollout-gateway",
            "version": package_version(),
            "description": "The rollout URL: one address in front of inference engines for RL rollouts.",
        },
        "tags": [{"name": name, "description": about} for name, about in sorted(tags.items())],
        "paths": dict(sorted(paths.items())),
        "components": {"securitySchemes": _schemes(), "schemas": {"Error": _ERROR}},
    }


def _routes(router: web.UrlDispatcher) -> Iterator[web.AbstractRoute]:
    return (route for route in router.routes() if route.method != hdrs.METH_HEAD)


def _path(route: web.AbstractRoute) -> str:
    assert route.resource is not None
    return route.resource.canonical


def _operation(route: web.AbstractRoute, method: str, path: str, handler: Handler, need: Need) -> Json:
    summary, _, description = (_function(handler).__doc__ or "").strip().partition("\n")
    operation: Json = {"summary": summary, "responses": _responses(need)}
    if description.strip():
        operation["description"] = " ".join(description.split())
    if need in _KEYS:
        operation["security"] = [{str(need): []}]
    if parameters := [*_path_parameters(path), *_query_parameters(path)]:
        operation["parameters"] = parameters
    if method in ("post", "delete") and route.method != hdrs.METH_ANY and (fields := BODIES.get(f"{method} {path}")):
        operation["requestBody"] = _body(fields)
    if route.method == hdrs.METH_ANY:
        operation["x-any-method"] = True
    return operation


def _function(handler: Any) -> Any:
    return _function(handler.func) if isinstance(handler, partial) else handler


def _tag(handler: Handler) -> tuple[str, str]:
    """Return the subject of a handler and a sentence about it, from the class that holds it."""
    owner = type(_function(handler).__self__)
    name = _SECTION.sub(" ", owner.__name__.removesuffix("Routes")).lower()
    return name, (owner.__doc__ or "").strip().partition("\n")[0]


def _path_parameters(path: str) -> list[Json]:
    names = re.findall(r"{(\w+)}", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _query_parameters(path: str) -> list[Json]:
    return [
        {"name": name, "in": "query", "description": field.meaning, "schema": _type(field)}
        for name, field in QUERIES.get(path, {}).items()
    ]


def _body(fields: dict[str, Field]) -> Json:
    required = [name for name, field in fields.items() if field.required]
    properties = {name: _type(field) | {"description": field.meaning} for name, field in fields.items()}
    schema = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    return {"required": bool(required), "content": {"application/json": {"schema": schema}}}


def _type(field: Field) -> Json:
    types = field.type.split(" | ")
    return {"type": types[0] if len(types) == 1 else types}


def _responses(need: Need) -> Json:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    statuses: Json = {"200": {"description": "The answer."}}
    if need in _KEYS:
        statuses["401"] = {"description": "The key is missing or wrong.", "content": error}
    if need in (Need.ADMIN, Need.STORE):
        statuses["403"] = {"description": "The key may generate only.", "content": error}
    return statuses | {"default": {"description": "An error that names the remedy.", "content": error}}


def _schemes() -> Json:
    return {str(need): {"type": "http", "scheme": "bearer", "description": text} for need, text in _KEYS.items()}


_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
                "replica_id": {"type": "string"},
            },
        }
    },
}
