"""How far a batch, or an update, is: what a progress callback is told, and bars that show it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A batch at the moment when one of its rollouts ended."""

    num_prompts: int
    delivered: int
    failed: int
    cancelled: int
    tokens: int
    """Of completions delivered."""
    seconds: float
    """Since the batch began."""

    @property
    def ended(self) -> int:
        return self.delivered + self.failed + self.cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightProgress:
    """A weight update at the moment when one more of its tensors was taken to be sent."""

    tensors: int
    num_tensors: int
    bytes: int
    num_bytes: int


OnProgress = Callable[[Progress], object]
OnWeightProgress = Callable[[WeightProgress], object]


@contextmanager
def progress_bar(description: str = "rollouts") -> Iterator[OnProgress]:
    """A bar on the terminal's standard error for as long as the block runs; give what it yields as `on_progress`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Bar(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=None, rate="")

        def show(progress: Progress) -> None:
            rate = f"{progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s"
            lost = f", {progress.failed} failed" if progress.failed else ""
            bar.update(task, total=progress.num_prompts, completed=progress.ended, rate=rate + lost)

        yield show


@contextmanager
def weight_bar(description: str = "weights") -> Iterator[OnWeightProgress]:
    """The same for a sender: bytes sent of the update that runs."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=None)

        def show(progress: WeightProgress) -> None:
            bar.update(task, total=progress.num_bytes, completed=progress.bytes)

        yield show
