"""What changed between two versions, by element and by block."""

import numpy as np
import pytest

from loadtests.studies.weight_changes import changes


def test_shares_are_of_elements_and_of_the_blocks_that_they_lie_in() -> None:
    before = [np.zeros(40_000, np.int16), np.zeros(10_000, np.int16)]
    after = [one.copy() for one in before]
    after[0][[0, 1, 2, 2_047, 2_048, 39_999]] = 1
    told = changes(before, after)
    assert told["tensors"] == 0.5
    assert told["elements"] == pytest.approx(6 / 50_000)
    assert told["blocks"] == {4096: pytest.approx(3 / 25), 65536: pytest.approx(2 / 3)}


def test_a_gap_too_wide_for_its_type_costs_an_element_more() -> None:
    before, after = np.zeros(1_000, np.int16), np.zeros(1_000, np.int16)
    after[[0, 600]] = 1
    gaps = changes([before], [after])["gaps"]
    assert gaps == {"uint8": 4 * 3 / 2000, "uint16": 2 * 4 / 2000, "uint32": 2 * 6 / 2000}
