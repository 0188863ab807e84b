"""The pages that are generated, or have a generated part: how each is made, and which are stale."""

from collections.abc import Callable, Iterator

from scripts import fit_speeds
from scripts.docs.pages import ROOT
from scripts.docs.parts import (
    causes_table,
    clients_table,
    configuration_page,
    continuation_table,
    engines_matrix,
    grpo_runs,
    models_matrix,
    rooms_picture,
    tuning_guide,
    updates_matrix,
)
from scripts.docs.parts.marked_part import with_part

DOCS = ROOT / "docs"


def _compatibility() -> str:
    page = (DOCS / "compatibility.md").read_text(encoding="utf-8")
    page = with_part(page, clients_table.BEGIN, clients_table.clients_table(), clients_table.END)
    return with_part(page, models_matrix.BEGIN, models_matrix.models_matrix(), models_matrix.END)


def _part(page: str, begin: str, end: str, make: Callable[[], str]) -> Callable[[], str]:
    return lambda: with_part((DOCS / page).read_text(encoding="utf-8"), begin, make(), end)


PAGES: dict[str, Callable[[], str]] = {
    "architecture.md": _part("architecture.md", rooms_picture.BEGIN, rooms_picture.END, rooms_picture.rooms_picture),
    "compatibility.md": _compatibility,
    "configuration.md": _part(
        "configuration.md", configuration_page.BEGIN, configuration_page.END, configuration_page.keys_tables
    ),
    "design/rollouts.md": _part(
        "design/rollouts.md", continuation_table.BEGIN, continuation_table.END, continuation_table.continuation_table
    ),
    "engines.md": lambda: engines_matrix.page(engines_matrix.read_results(), updates_matrix.read_checks()),
    "examples.md": _part("examples.md", grpo_runs.BEGIN, grpo_runs.END, grpo_runs.grpo_runs),
    "plan.md": fit_speeds.page,
    "troubleshooting.md": _part("troubleshooting.md", causes_table.BEGIN, causes_table.END, causes_table.causes_table),
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
