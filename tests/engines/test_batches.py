"""Batches end with the item that fills them, and are made as they are asked for."""

from collections.abc import Iterator

from engines.batches import batches


def test_a_batch_ends_with_the_item_that_fills_it() -> None:
    assert list(batches(["aa", "b", "ccc", "d", "e"], len, 3)) == [["aa", "b"], ["ccc"], ["d", "e"]]


def test_nothing_is_no_batch() -> None:
    assert list(batches([], len, 3)) == []


def test_no_item_is_read_ahead_of_its_batch() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for item in (1, 2, 3, 4):
            read.append(item)
            yield item

    assert next(batches(items(), lambda item: item, 3)) == [1, 2]
    assert read == [1, 2]
