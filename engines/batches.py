"""Batches of consecutive items, cut by their size in bytes."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batches(items: Iterable[T], num_bytes: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Yield lists that end with the item that brings them to `least` bytes; the last list may be smaller."""
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += num_bytes(item)
        if size >= least:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
