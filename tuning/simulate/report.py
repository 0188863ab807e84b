"""The figures of placements beside each other, as a table and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from tuning.simulate.outcome import Outcome

_WIDTH_OF_A_PIPE = 180

Outcomes = Mapping[str, Sequence[Outcome]]
"""Outcomes of each placement, one for each seed."""


def print_outcomes(console: Console, outcomes: Outcomes) -> None:
    """Print means over the seeds; a time beside that of the first placement is the mean of the seeds' own."""
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_OF_A_PIPE)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("placement", overflow="fold")
    for column in (
        "time",
        "of first",
        "of bound",
        "tokens/s",
        "p99",
        "cached",
        "computed again",
        "preemptions",
        "busy",
    ):
        table.add_column(column, justify="right")
    first = next(iter(outcomes.values()))
    for name, found in outcomes.items():
        table.add_row(name, *_cells(found, first))
    console.print(table, markup=False)
    for name, found in outcomes.items():
        if late := sum(outcome.late for outcome in found):
            console.print(
                f"{name}: a replica worked on {late} prompts for longer than gateway.generate_timeout_s, at which the "
                "gateway gives a prompt up: raise it, or shorten the work",
                markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip


def _cells(found: Sequence[Outcome], first: Sequence[Outcome]) -> list[str]:
    return [
        f"{_mean(found, 'makespan_s'):,.1f} s",
        f"{relative(found, first):.3f}",
        f"{_mean(found, 'over_bound'):.2f}",
        f"{_mean(found, 'tokens_per_s'):,.0f}",
        f"{_mean(found, 'p99_s'):,.1f} s",
        f"{_mean(found, 'found'):.1%}",
        f"{_mean(found, 'again'):.1%}",
        f"{_mean(found, 'preemptions'):,.0f}",
        f"{_mean(found, 'busy'):.0%}",
    ]


def as_json(outcomes: Outcomes) -> dict[str, Any]:
    """Return all outcomes by placement, seed by seed."""
    first = next(iter(outcomes.values()))
    return {
        name: {
            "of_first": relative(found, first),
            "over_bound": _mean(found, "over_bound"),
            "seeds": [asdict(outcome) for outcome in found],
        }
        for name, found in outcomes.items()
    }


def relative(found: Sequence[Outcome], first: Sequence[Outcome]) -> float:
    """Return the mean over the seeds of a makespan over that of the first placement."""
    return fmean(one.makespan_s / other.makespan_s for one, other in zip(found, first, strict=True))


def _mean(found: Sequence[Outcome], name: str) -> float:
    return fmean(getattr(outcome, name) for outcome in found)
