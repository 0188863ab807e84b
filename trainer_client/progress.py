"""Progress of a batch and of a weight update: arguments of the callbacks, and bars."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightProgress:
    """The state of a weight update when the transport takes a tensor."""

    tensors: int
    """Taken so far, as are `bytes`; `num_tensors` and `num_bytes` count the whole update."""
    num_tensors: int
    bytes: int
    num_bytes: int


OnProgress = Callable[[Progress], object]
OnWeightProgress = Callable[[WeightProgress], object]


@contextmanager
def progress_bar(description: str = "rollouts") -> Iterator[OnProgress]:
    """Show a bar on standard error while the block runs; pass the yielded function as `on_progress`."""
    from rich.progress import MofNCompleteColumn, TextColumn

    with _bar(description, MofNCompleteColumn(), TextColumn("{task.fields[rate]}")) as update:

        def show(progress: Progress) -> None:
            rate = f"{progress.tokens / max(progress.seconds, 1e-9):,.0f} tokens/s"
            lost = f", {progress.failed} failed" if progress.failed else ""
            update(total=progress.num_prompts, completed=progress.ended, rate=rate + lost)

        yield show


@contextmanager
def weight_bar(description: str = "weights") -> Iterator[OnWeightProgress]:
    """Show the same bar for a sender: bytes sent of the running update."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _bar(description, DownloadColumn(), TransferSpeedColumn()) as update:
        yield lambda progress: update(total=progress.num_bytes, completed=progress.bytes)


@contextmanager
def _bar(description: str, *columns: Any) -> Iterator[Callable[..., None]]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    shown = (TextColumn("{task.description}"), BarColumn(), *columns, TimeElapsedColumn())
    with Bar(*shown, console=Console(stderr=True)) as bar:
        yield partial(bar.update, bar.add_task(description, total=None, rate=""))
