"""The picture of the rooms in docs/architecture.md: arrows are the imports', and they point down."""

from pathlib import Path

import pytest

from scripts.docs.parts.rooms_picture import arrows, layers, rooms_picture


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "gateway/api.py": "import engines.types\n",
        "gateway/app.py": "from gateway.http import server\n",
        "gateway/http/__init__.py": "",
        "gateway/http/server.py": "def late() -> None:\n    from gateway.api import STATUS\n    import aiohttp\n",
        "engines/types.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_rooms_have_the_arrows_of_their_modules(root: Path) -> None:
    assert arrows(root) == {
        "gateway/*.py": {"engines/*.py"},
        "gateway/app.py": {"gateway/http"},
        "gateway/http": {"gateway/*.py"},
        "engines/*.py": set(),
    }


@pytest.mark.parametrize("package", ["gateway", "engines"])
def test_every_arrow_inside_a_package_points_down(package: str) -> None:
    floor = {
        f"{package}/{room.strip()}": number
        for number, rooms in enumerate(layers()[package])
        for room in rooms.split("|")
    }
    checked = 0
    for room, targets in arrows().items():
        for target in targets:
            if room in floor and target in floor:
                assert floor[room] < floor[target], f"{room} imports {target}"
                checked += 1
    assert checked > 5


def test_the_picture_has_every_room_of_the_tree() -> None:
    drawn = rooms_picture()
    assert {room for room in arrows() if f"| `{room}` |" not in drawn} == set()
