"""The documentation's tools: writes the generated parts of README.md and docs/, and checks all of it.

    python -m scripts.docs            # write
    python -m scripts.docs --check    # check

A check ends with exit code 1 where a page is stale, or names what does not exist.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts import fit_speeds
from scripts.docs import (
    clients_table,
    configuration_page,
    continuation_table,
    engines_matrix,
    rooms_picture,
    tuning_guide,
)
from scripts.docs.commands import wrong_commands
from scripts.docs.links import dead_links
from scripts.docs.marked_part import with_part
from scripts.docs.python import wrong_python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def _part(page: str, begin: str, end: str, make: Callable[[], str]) -> Callable[[], str]:
    return lambda: with_part((DOCS / page).read_text(encoding="utf-8"), begin, make(), end)


PAGES: dict[str, Callable[[], str]] = {
    "architecture.md": _part("architecture.md", rooms_picture.BEGIN, rooms_picture.END, rooms_picture.rooms_picture),
    "compatibility.md": _part("compatibility.md", clients_table.BEGIN, clients_table.END, clients_table.clients_table),
    "configuration.md": _part(
        "configuration.md", configuration_page.BEGIN, configuration_page.END, configuration_page.keys_tables
    ),
    "design/rollouts.md": _part(
        "design/rollouts.md", continuation_table.BEGIN, continuation_table.END, continuation_table.continuation_table
    ),
    "engines.md": lambda: engines_matrix.page(engines_matrix.read_results()),
    "plan.md": fit_speeds.page,
    "tuning.md": tuning_guide.page,
}
"""How each page that is generated, or has a generated part, is made."""


def stale_pages() -> Iterator[str]:
    """A line for each generated page that is not what its source makes now."""
    for name, make in PAGES.items():
        if (DOCS / name).read_text(encoding="utf-8") != make():
            yield f"docs/{name} is stale: run python -m scripts.docs"


def write_pages() -> None:
    """Write every generated page."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes or checks the generated parts of README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where something is wrong")
    if not parser.parse_args().check:
        write_pages()
        return
    wrong = [*stale_pages(), *dead_links(), *wrong_commands(), *wrong_python()]
    print("\n".join(wrong) or "docs: pages, links, files, functions, commands and Python are right")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
