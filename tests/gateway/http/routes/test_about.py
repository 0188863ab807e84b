"""The description of the rollout URL, against the router that it describes."""

import re
from collections.abc import Iterator

import pytest
from aiohttp import web

from engines.store.peer_store import VERSIONS_PATH
from gateway.http.access import Need
from gateway.http.openapi.fields import BODIES, QUERIES
from tests.rigs.browser import page_of
from tests.rigs.rig import Json, Rig, StartRig


@pytest.fixture
async def all_routes(start_rig: StartRig) -> Rig:
    return await start_rig(1)


def routes_of(router: web.UrlDispatcher) -> set[tuple[str, str]]:
    """Method and path of every route; HEAD, which aiohttp adds to GET, is left out."""
    return {
        (route.method, route.resource.canonical)
        for route in router.routes()
        if route.resource is not None and route.method != "HEAD"
    }


def described(document: Json) -> Iterator[tuple[str, str]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield "*" if "x-any-method" in operation else method.upper(), path


async def test_the_document_has_every_route_of_the_router_and_no_other(all_routes: Rig) -> None:
    _, document = await all_routes.get("/openapi.json")
    found = list(described(document))
    assert set(found) == routes_of(all_routes.router)
    assert len(found) == len(set(found))
    assert len(found) > 60


async def test_the_url_serves_the_document_without_a_key(start_rig: StartRig) -> None:
    keys = {"inference_keys": ["reader"], "admin_keys": ["owner"], "trusted_networks": []}
    rig = await start_rig(1, gateway=keys)
    status, document = await rig.get("/openapi.json")
    assert status == 200
    assert document["openapi"] == "3.1.0"
    assert "/v1/completions" in document["paths"]


async def test_every_route_has_a_summary_and_a_tag(all_routes: Rig) -> None:
    _, document = await all_routes.get("/openapi.json")
    operations = {
        f"{method} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert [name for name, operation in operations.items() if not operation["summary"].endswith((".", ":"))] == []
    tags = {tag["name"] for tag in document["tags"]}
    assert {tag for operation in operations.values() for tag in operation["tags"]} == tags
    assert all(tag["description"] for tag in document["tags"])


@pytest.mark.parametrize(
    ("path", "method", "need"),
    [
        ("/v1/completions", "post", Need.INFERENCE),
        ("/start_weight_update", "post", Need.ADMIN),
        (VERSIONS_PATH, "get", Need.STORE),
        ("/dashboard", "get", None),
        ("/health", "get", None),
    ],
)
async def test_a_route_names_the_key_that_it_needs(rig: Rig, path: str, method: str, need: Need | None) -> None:
    _, document = await rig.get("/openapi.json")
    wanted = document["paths"][path][method].get("security")
    assert wanted == (need and [{need: []}])


async def test_a_route_without_a_key_in_the_document_answers_without_one(start_rig: StartRig) -> None:
    keys = {"inference_keys": ["reader"], "admin_keys": ["owner"], "trusted_networks": []}
    rig = await start_rig(1, gateway=keys)
    _, document = await rig.get("/openapi.json")
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            url = rig.url + re.sub(r"{(\w+)}", "1", path)
            async with rig.client.request(method, url, allow_redirects=False) as response:
                assert (response.status == 401) == ("security" in operation), (method, path, response.status)


async def test_fields_stand_at_routes_that_exist_and_required_fields_are_required(all_routes: Rig) -> None:
    _, document = await all_routes.get("/openapi.json")
    assert {f"{method} {path}" for path, methods in document["paths"].items() for method in methods} >= BODIES.keys()
    assert document["paths"].keys() >= QUERIES.keys()
    for name, fields in BODIES.items():
        required = [field for field, about in fields.items() if about.required]
        method, path = name.split()
        if not required:
            continue
        url = all_routes.url + re.sub(r"{(\w+)}", "1", path)
        async with all_routes.client.request(method, url, json={}) as response:
            assert response.status == 400, name
            reason = await response.text()
        assert any(field in reason for field in required), (name, reason)


async def test_the_page_shows_every_path_and_loads_nothing(all_routes: Rig) -> None:
    _, document = await all_routes.get("/openapi.json")
    async with all_routes.client.get(all_routes.url + "/docs") as response:
        page = await response.text()
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert [path for path in document["paths"] if f"</b> {path}</code>" not in page] == []
    assert not re.search(r"<script|@import|url\(|src=|href=\"(?!/)", page)


async def test_a_browser_shows_the_page(rig: Rig) -> None:
    assert "/v1/chat/completions" in await page_of(rig.url + "/docs")


@pytest.mark.parametrize(("accept", "start"), [("*/*", "rollout-gateway "), ("text/html", "<!doctype html>")])
async def test_the_root_says_what_the_url_is_and_where_to_look(rig: Rig, accept: str, start: str) -> None:
    async with rig.client.get(rig.url + "/", headers={"Accept": accept}) as response:
        page = await response.text()
    assert page.startswith(start)
    assert "/dashboard" in page
    assert "/openapi.json" in page
