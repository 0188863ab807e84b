"""Markdown tables."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the table's lines."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
