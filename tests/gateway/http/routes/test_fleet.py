"""What the rollout URL says of itself."""

import re

from tests.rigs.rig import Rig, StartRig

FOR_ADMINS = {
    *(("get", path) for path in ("/get_world_size", "/is_paused", "/traces/{request_id}")),
    ("get", "/v1/weight_store"),
    *(("post", f"/{verb}_weight_update") for verb in ("start", "finish")),
    *(("post", path) for path in ("/init_weight_transfer_engine", "/update_weights")),
    *(("post", path) for path in ("/pause", "/resume", "/reset_prefix_cache")),
    *(("post", f"/v1/{verb}_lora_adapter") for verb in ("load", "unload")),
    *((method, "/v1/weight_updates") for method in ("post", "delete")),
}


async def test_the_document_has_every_route_that_answers(rig: Rig) -> None:
    _, document = await rig.get("/openapi.json")
    found = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    there = {(route.method, route.resource.canonical) for route in rig.router.routes() if route.resource is not None}
    assert found == {(method, path) for method, path in there if method not in ("HEAD", "*")}
    assert len(found) > 45


async def test_each_route_needs_no_key_or_an_inference_key_or_an_admin_key(start_rig: StartRig) -> None:
    rig = await start_rig(1, gateway={"inference_keys": ["reader"], "admin_keys": ["owner"], "trusted_networks": []})
    _, document = await rig.get("/openapi.json")
    is_open, for_admins = set(), set()
    for path, method in [(path, method) for path, methods in document["paths"].items() for method in methods]:
        url = rig.url + re.sub(r"{(\w+)}", "1", path)
        async with rig.client.request(method, url) as response:
            if response.status != 401:
                is_open.add(path)
        async with rig.client.request(method, url, headers={"Authorization": "Bearer reader"}) as response:
            if response.status == 403:
                for_admins.add((method, path))
    assert is_open == {"/", "/openapi.json", "/dashboard", "/health", "/ping"}
    assert for_admins == FOR_ADMINS
