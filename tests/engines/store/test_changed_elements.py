"""Changed elements of a tensor: what they are against brought to what it is now, in few bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import InvalidRequest
from engines.store.changed_elements import Array, ChangedElements

PLACES = st.lists(st.integers(0, 300_000), unique=True, max_size=50)


def drawn(size: int) -> Array:
    return np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)


def with_elements(content: Array, places: list[int], width: int) -> Array:
    changed = content.copy()
    changed[np.array(places, np.int64) * width] ^= 1
    return changed


@given(PLACES, st.sampled_from([1, 2, 4, 8]))
def test_the_new_tensor_comes_of_the_old_one_however_wide_its_gaps(places: list[int], width: int) -> None:
    old = drawn(300_001 * width)
    new = with_elements(old, places, width)
    elements = ChangedElements.between(old, new, width)
    assert elements.num_bytes <= (width + 2) * (len(places) + 300_001 // 65_536)
    elements.apply_to(old)
    assert np.array_equal(old, new)


@pytest.mark.parametrize(("every", "kind", "num_bytes"), [(100, "u1", 3), (1000, "u2", 4)])
def test_gaps_are_of_the_type_that_takes_fewer_bytes(every: int, kind: str, num_bytes: int) -> None:
    old = drawn(2_000_000)
    new = with_elements(old, list(range(every - 1, 1_000_000, every)), 2)
    elements = ChangedElements.between(old, new, 2)
    assert elements.gaps.dtype == np.dtype(kind)
    assert elements.num_bytes == num_bytes * (1_000_000 // every)


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
        (np.array([0], np.uint8), np.array([1], np.complex128)),
    ],
)
def test_elements_that_are_not_of_the_tensor_are_refused(gaps: Array, values: Array) -> None:
    with pytest.raises(InvalidRequest, match="changed elements are damaged"):
        ChangedElements(gaps, values).apply_to(drawn(8))
