"""A weight store of a test's own."""

from pathlib import Path

import pytest

from engines.store.weight_store import WeightStore


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store")
