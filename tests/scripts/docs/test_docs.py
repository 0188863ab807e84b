"""The documentation as a whole; `make check` compares its generated pages, links, commands and Python with the tree."""

import pytest

from scripts.docs.generated import DOCS
from scripts.docs.pages import ROOT
from scripts.docs.parts.marked_part import with_part


def test_the_first_page_and_the_overview_are_short() -> None:
    pages = (ROOT / "README.md", DOCS / "architecture.md")
    assert {page.name for page in pages if len(page.read_text(encoding="utf-8").splitlines()) > 150} == set()


def test_a_part_replaces_the_text_between_its_marks() -> None:
    assert with_part("a\n<b>old<e>b\n", "<b>", "new", "<e>") == "a\n<b>new<e>b\n"


@pytest.mark.parametrize("page", ["# Page", "# Page <b>", "# Page <e><b>"])
def test_a_page_without_marks_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="no place for a generated part"):
        with_part(page, "<b>", "new", "<e>")
