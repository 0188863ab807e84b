"""Markdown pages, taken apart."""

from pathlib import Path

import pytest

from scripts.docs.pages import Page, anchor, read_page

PAGE = """# The `make` page

See [one](one.md), [two](two.md#part) and `[no](link)`.

```
make test \\
  ARGS=1
```

```python
import make
```

    make indented

## Part
## Part
"""


@pytest.fixture
def page(tmp_path: Path) -> Page:
    path = tmp_path / "page.md"
    path.write_text(PAGE, encoding="utf-8")
    return read_page(path, tmp_path)


def test_shell_lines_are_joined_and_python_is_left_out(page: Page) -> None:
    assert [(place.line, place.text.split()) for place in page.shell] == [
        (6, ["make", "test", "ARGS=1"]),
        (14, ["make", "indented"]),
    ]


def test_a_repeated_heading_has_a_numbered_anchor(page: Page) -> None:
    assert page.anchors == {"the-make-page", "part", "part-1"}


@pytest.mark.parametrize(
    ("heading", "slug"),
    [
        ("verl's own trainers", "verls-own-trainers"),
        ("TRL 1.10 and older", "trl-110-and-older"),
        ("A_b `c.d`", "a_b-cd"),
    ],
)
def test_anchors_are_githubs(heading: str, slug: str) -> None:
    assert anchor(heading) == slug
