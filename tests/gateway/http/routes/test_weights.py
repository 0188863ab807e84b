"""Weight routes: the numbers that a trainer may give a version."""

from pathlib import Path

import pytest

from engines.store.draft import Draft, claim_draft, raw
from tests.rigs.rig import Rig, StartRig

HIGHEST = 2**62


@pytest.fixture
async def rig(start_rig: StartRig, tmp_path: Path) -> Rig:
    return await start_rig(2, weights={"store": str(tmp_path / "store")})


async def push(rig: Rig, folder: Path, **body: int) -> tuple[int, int | str]:
    """The status, and the version or the error's message."""
    path, _ = claim_draft(folder)
    draft = Draft(path, "sim")
    draft.add([raw("weight", "float32", [4, 4], bytes(64))])
    draft.finish()
    status, reply = await rig.post("/v1/weight_updates", {"transport": "store", "snapshot": path.name, **body})
    return status, reply.get("weight_version") or reply["error"]["message"]


async def test_after_the_highest_version_updates_go_on(rig: Rig, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert await push(rig, store, version=HIGHEST) == (200, HIGHEST)
    assert await push(rig, store) == (200, HIGHEST + 1)
    assert (await rig.get("/status"))[1]["weight_version"] == HIGHEST + 1
    assert (await rig.get(f"/v1/weight_store/versions/{HIGHEST + 1}"))[0] == 200
    (choice,) = (await rig.complete([[1, 2, 3]]))["choices"]
    assert {span["version"] for span in choice["weight_versions"]} == {HIGHEST + 1}
    assert (await rig.fleet.replicas[0].engine.weight_label(20.0)).version == HIGHEST + 1


@pytest.mark.parametrize("version", [0, HIGHEST + 1, 2**64 - 1])
async def test_a_number_out_of_range_is_refused(rig: Rig, tmp_path: Path, version: int) -> None:
    status, message = await push(rig, tmp_path / "store", version=version)
    assert (status, str(message).startswith("version: Expected `int`")) == (400, True)
