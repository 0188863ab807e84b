"""The documentation as a whole: generated pages are fresh, and everything that a page names exists."""

import pytest

from scripts.docs.commands import wrong_commands
from scripts.docs.generated import DOCS, PAGES, stale_pages
from scripts.docs.links import dead_links
from scripts.docs.pages import ROOT
from scripts.docs.parts.marked_part import with_part
from scripts.docs.python import wrong_python


def test_generated_pages_are_fresh() -> None:
    assert list(stale_pages()) == []


def test_links_anchors_files_and_functions_exist() -> None:
    assert list(dead_links()) == []


def test_commands_and_keys_exist() -> None:
    assert list(wrong_commands()) == []


def test_python_in_the_docs_parses_and_imports_what_exists() -> None:
    assert list(wrong_python()) == []


def test_every_generated_page_exists() -> None:
    assert {name for name in PAGES if not (DOCS / name).is_file()} == set()


def test_the_first_page_and_the_overview_are_short() -> None:
    pages = (ROOT / "README.md", DOCS / "architecture.md")
    assert {page.name for page in pages if len(page.read_text(encoding="utf-8").splitlines()) > 150} == set()


def test_a_part_replaces_the_text_between_its_marks() -> None:
    assert with_part("a\n<b>old<e>b\n", "<b>", "new", "<e>") == "a\n<b>new<e>b\n"


@pytest.mark.parametrize("page", ["# Page", "# Page <b>", "# Page <e><b>"])
def test_a_page_without_marks_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="no place for a generated part"):
        with_part(page, "<b>", "new", "<e>")
