"""Values of overrides, as Hydra 1.3 read them."""

from typing import Any

import pytest

from tuning.doctor.values import hydra_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[1,b c]", [1, "b c"]), ("12:30", "12:30"), ("on", "on"), ("010", "010"), ("1e-6", 1e-6), ("", ""),
        ("null", None), ("True", True), ('"q w"', "q w"), ("x y", "x y"), ("${b}", "${b}"), ("[]", []), ("-1", -1),
        (".5", 0.5), ('["a","b"]', ["a", "b"]),
    ],
)  # fmt: skip
def test_a_value_is_the_one_that_hydra_reads(text: str, value: Any) -> None:
    found = hydra_value(text)
    assert (found, type(found)) == (value, type(value))
