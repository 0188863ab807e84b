"""Changed elements of a tensor: what they are against brought to what it is now, in few bytes."""

import numpy as np
import pytest

from engines.errors import InvalidRequest
from engines.store.changed_elements import Array, ChangedElements


def drawn(size: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def with_elements(content: Array, places: list[int], width: int) -> Array:
    changed = content.copy()
    for place in places:
        changed[place * width] ^= 1
    return changed


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "places",
    [[], [0], [999], [0, 1, 2, 999], [255, 256, 511], [256, 513, 770], list(range(1000)), list(range(0, 1000, 7))],
)
def test_the_new_tensor_comes_of_the_old_one(width: int, places: list[int]) -> None:
    old = drawn(1000 * width)
    new = with_elements(old, places, width)
    elements = ChangedElements.between(old, new, width)
    assert elements.values.itemsize == width
    elements.apply_to(old)
    assert np.array_equal(old, new)


@pytest.mark.parametrize("places", [[65_535], [65_536], [65_537, 200_000], [199_999, 200_000], [300_000]])
def test_a_gap_may_be_wider_than_its_type(places: list[int]) -> None:
    old = drawn(2 * 300_001)
    new = with_elements(old, places, 2)
    elements = ChangedElements.between(old, new, 2)
    assert (elements.gaps.dtype, elements.num_bytes) <= (np.dtype("u2"), 4 * 8)
    elements.apply_to(old)
    assert np.array_equal(old, new)


@pytest.mark.parametrize(("every", "kind", "num_bytes"), [(100, "u1", 3), (1000, "u2", 4)])
def test_gaps_are_of_the_type_that_takes_fewer_bytes(every: int, kind: str, num_bytes: int) -> None:
    old = drawn(2_000_000)
    new = with_elements(old, list(range(every - 1, 1_000_000, every)), 2)
    elements = ChangedElements.between(old, new, 2)
    assert elements.gaps.dtype == np.dtype(kind)
    assert elements.num_bytes == num_bytes * (1_000_000 // every)


def test_pieces_are_compared_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.store.changed_elements._PIECE", 100)
    old = drawn(2000)
    new = with_elements(old, [0, 99, 100, 450, 999], 2)
    elements = ChangedElements.between(old, new, 2)
    elements.apply_to(old)
    assert np.array_equal(old, new)


def test_elements_of_an_odd_width_are_told_as_bytes() -> None:
    old = drawn(30)
    elements = ChangedElements.between(old, with_elements(old, [2], 3), 3)
    assert elements.values.itemsize == 1


@pytest.mark.parametrize(
    ("gaps", "values"),
    [
        (np.array([4], np.uint8), np.array([1], np.uint16)),
        (np.array([0, 3], np.uint8), np.array([1, 2], np.uint16)),
        (np.array([0], np.uint8), np.array([1, 2], np.uint16)),
        (np.array([0, 0], np.uint8), np.array([1], np.uint16)),
        (np.array([-1], np.int8), np.array([1], np.uint16)),
        (np.array([0], np.uint8), np.array([1], np.uint64)),
        (np.array([[0]], np.uint8), np.array([[1]], np.uint16)),
    ],
)
def test_elements_that_are_not_of_the_tensor_are_refused(gaps: Array, values: Array) -> None:
    content = drawn(8 if values.dtype != np.dtype("u8") else 12)
    before = content.copy()
    with pytest.raises(InvalidRequest, match="changed elements are damaged"):
        ChangedElements(gaps, values).apply_to(content)
    assert np.array_equal(content, before)
