"""Progress of a batch: the argument of its callback, and a bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a batch at the end of one of its rollouts."""

    num_prompts: int
    delivered: int
    failed: int
    cancelled: int
    tokens: int
    """Tokens of delivered completions."""
    seconds: float
    """Seconds since the batch began."""

    @property
    def ended(self) -> int:
        return self.delivered + self.failed + self.cancelled


OnProgress = Callable[[Progress], object]


@contextmanager
def progress_bar(description: str = "rollouts") -> Iterator[OnProgress]:
    """Show a bar on standard error while the block runs; pass the yielded function as `on_progress`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    words, rate = TextColumn("{task.description}"), TextColumn("{task.fields[rate]}")
    with Bar(words, BarColumn(), MofNCompleteColumn(), rate, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=None, rate="")

        def show(progress: Progress) -> None:
            speed = f"{progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s"
            lost = f", {progress.failed} failed" if progress.failed else ""
            bar.update(task, total=progress.num_prompts, completed=progress.ended, rate=speed + lost)

        yield show
