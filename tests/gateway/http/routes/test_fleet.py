"""What the rollout URL says of itself."""

import re

from gateway.http.routes.sglang import REFUSED
from tests.rigs.rig import Rig, StartRig


async def test_the_document_has_every_route_that_answers(rig: Rig) -> None:
    _, document = await rig.get("/openapi.json")
    found = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    there = {(route.method, route.resource.canonical) for route in rig.router.routes() if route.resource is not None}
    assert found == {(method, path) for method, path in there if method not in ("HEAD", "*")}
    assert len(found) > 60
    assert not document["paths"].keys() & REFUSED.keys()


async def test_routes_that_are_open_are_few_and_hold_no_data(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway={"inference_keys": ["reader"], "admin_keys": ["owner"], "trusted_networks": []})
    _, document = await rig.get("/openapi.json")
    is_open = set()
    for path, methods in document["paths"].items():
        for method in methods:
            url = rig.url + re.sub(r"{(\w+)}", "1", path)
            async with rig.client.request(method, url) as response:
                if response.status != 401:
                    is_open.add(path)
    assert is_open == {"/", "/openapi.json", "/dashboard", "/health", "/ping"}
