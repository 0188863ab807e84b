"""Dead links, anchors, files and functions are found, each with its page and line."""

from pathlib import Path

import pytest

from scripts.docs.links import dead_links


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "app.py").write_text(
        "class App:\n    port = 1\n    def run(self):\n        self.state = 1\n", encoding="utf-8"
    )
    (tmp_path / "docs" / "page.md").write_text("# Page\n\n## A part\n", encoding="utf-8")
    return tmp_path


def _found(root: Path, readme: str) -> list[str]:
    (root / "README.md").write_text(readme, encoding="utf-8")
    return list(dead_links(root))


@pytest.mark.parametrize(
    ("readme", "finding"),
    [
        ("\n[page](docs/none.md)", "README.md:2: no file docs/none.md"),
        ("[part](docs/page.md#none)", "README.md:1: no heading #none in page.md"),
        ("[part](#none)", "README.md:1: no heading #none in README.md"),
        ("`gateway/none.py`", "README.md:1: no file gateway/none.py"),
        ("`gateway/none*.py`", "README.md:1: no file gateway/none*.py"),
        ("`none.py`", "README.md:1: no module none.py"),
        ("| `gateway/app.py` | `run`, `stop` |", "README.md:1: gateway/app.py has no stop"),
        ("`App.run`, `App.stop`", "README.md:1: no class has App.stop"),
    ],
)
def test_a_name_that_does_not_exist_is_found(root: Path, readme: str, finding: str) -> None:
    assert _found(root, readme) == [finding]
