"""The rooms in docs/architecture.md, with the arrows of their imports; `lint-imports` holds that these point down."""

from pathlib import Path

import pytest

from scripts.docs.parts.rooms_picture import arrows


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
