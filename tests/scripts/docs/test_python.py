"""Python in the docs that cannot work is found, with its page and line."""

from pathlib import Path

import pytest

from scripts.docs.python import wrong_python


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "trainer_client").mkdir()
    (tmp_path / "trainer_client" / "__init__.py").write_text("from x import Client\nURL = ''\n", encoding="utf-8")
    (tmp_path / "trainer_client" / "trl.py").write_text("def install(): ...\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from trainer_client import Client, URL, trl\nfrom trainer_client.trl import install\nimport torch", []),
        ("from trainer_client import Server", ["README.md:2: trainer_client has no Server"]),
        ("from trainer_client.trl import remove", ["README.md:2: trainer_client.trl has no remove"]),
        ("from trainer_client.none import Client", ["README.md:2: trainer_client.none has no Client"]),
    ],
)
def test_imports_of_ours_are_compared_with_the_tree(root: Path, code: str, found: list[str]) -> None:
    (root / "README.md").write_text(f"```python\n{code}\n```\n", encoding="utf-8")
    assert list(wrong_python(root)) == found


def test_a_block_that_does_not_parse_is_found(root: Path) -> None:
    (root / "README.md").write_text("\n```python\nfine = 1\nf(a=1, ...)\n```\n", encoding="utf-8")
    (finding,) = wrong_python(root)
    assert finding.startswith("README.md:3: ")
    assert finding.endswith("in line 2 of the block")
