"""The store of a gateway, where its folder leaves while it serves."""

import shutil
from pathlib import Path

from gateway.config.schema import WeightsConfig
from gateway.weights.snapshots import Snapshots


async def test_where_the_folder_is_gone_the_reason_is_told_until_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    snapshots = Snapshots(WeightsConfig(store=str(folder)), "app", lambda: None)
    await snapshots.open()
    try:
        assert await snapshots.why_not(1) == ""
        shutil.rmtree(folder)
        assert "No such file" in await snapshots.why_not(1)
        assert await snapshots.draft(0, 1) is None
        folder.mkdir()
        assert await snapshots.why_not(1) == ""
    finally:
        await snapshots.close()
