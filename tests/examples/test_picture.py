"""The demo's picture."""

from pathlib import Path
from typing import Any

import pytest

from examples.demo import Sight
from examples.picture import draw


def sight(at_s: float, state: str = "SERVING", version: int | None = 0, samples: int = 0) -> Sight:
    return Sight(at_s, "engine-a", state, version, samples)


SIGHTS = [
    sight(0.0),
    sight(18.0),
    sight(19.0, "UPDATING", None),
    sight(20.0, version=1, samples=4),
    sight(21.0, version=1),
    sight(22.0, "UPDATING", None),
    sight(23.0, version=2, samples=4),
]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    steps: list[dict[str, Any]] = [
        {"at_s": 21.0, "reward": 0.1, "weight_version": 1, "tokens_per_s": 900, "sync_s": 0.3},
        {"at_s": 24.0, "reward": 0.2, "weight_version": 2, "tokens_per_s": 950, "sync_s": 0.2},
    ]
    draw(steps, SIGHTS, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
