"""What tests of weight updates share."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A weight store."""
    return tmp_path / "store"
