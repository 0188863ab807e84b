"""The documentation as a whole; `make check` compares its generated pages, links, commands and Python with the tree."""

from scripts.docs.generated import DOCS
from scripts.docs.pages import ROOT


def test_the_first_page_and_the_overview_are_short() -> None:
    pages = (ROOT / "README.md", DOCS / "architecture.md")
    assert {page.name for page in pages if len(page.read_text(encoding="utf-8").splitlines()) > 150} == set()
