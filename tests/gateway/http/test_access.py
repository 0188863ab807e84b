"""Keys and trusted networks."""

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from engines.errors import NotAllowed
from gateway.config.schema import GatewayConfig
from gateway.http.access import Access

KEYS = {"inference_keys": ["infer"], "admin_keys": ["admin"]}


@pytest.mark.parametrize(
    ("networks", "peer", "header", "opens"),
    [
        (None, "127.0.0.1", None, "everything"),
        (None, "::1", None, "everything"),
        (None, "10.0.0.7", None, "nothing"),
        (None, "10.0.0.7", "Bearer guess", "nothing"),
        (None, "10.0.0.7", "Bearer ", "nothing"),
        (None, "10.0.0.7", "Bearer infer", "inference"),
        (None, "10.0.0.7", "Bearer admin", "everything"),
        (["10.0.0.0/24"], "10.0.0.7", None, "everything"),
        (["10.0.0.0/24"], "::ffff:10.0.0.7", None, "everything"),
        (["10.0.0.0/24"], "10.0.1.7", None, "nothing"),
        ([], "127.0.0.1", None, "nothing"),
    ],
)
async def test_a_trusted_network_or_a_key_opens(
    networks: list[str] | None, peer: str, header: str | None, opens: str
) -> None:
    own = {} if networks is None else {"trusted_networks": networks}
    access = Access(GatewayConfig.model_validate(KEYS | own))
    headers = {"Host": "127.0.0.1"} | ({"Authorization": header} if header else {})
    request = make_mocked_request("GET", "/", headers).clone(remote=peer)
    for admin, wrapped in ((False, access.for_inference), (True, access.for_admin)):
        if opens == "everything" or (opens == "inference" and not admin):
            assert (await wrapped(_answer)(request)).status == 200
        else:
            with pytest.raises(NotAllowed, match="admin key" if opens == "inference" else "missing or wrong key"):
                await wrapped(_answer)(request)


async def _answer(request: web.BaseRequest) -> web.Response:
    return web.Response()
