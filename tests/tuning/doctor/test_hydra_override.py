"""Overrides mean what Hydra's grammar says: each row was given to Hydra 1.3."""

from typing import Any

import pytest

from tuning.doctor.files.hydra_override import hydra_value, parsed_override


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[1,b c]", [1, "b c"]),
        ("12:30", "12:30"),
        ("on", "on"),
        ("1_0", 10),
        ("010", "010"),
        ("1e-6", 1e-6),
        ("{x:1,y:[2]}", {"x": 1, "y": [2]}),
        ("", ""),
        ("null", None),
        ("True", True),
        ('"q w"', "q w"),
        ("x y", "x y"),
        ("${b}", "${b}"),
        ("[]", []),
        ("-1", -1),
        (".5", 0.5),
        ('["a","b"]', ["a", "b"]),
    ],
)
def test_a_value_is_the_one_that_hydra_reads(text: str, value: Any) -> None:
    found = hydra_value(text)
    assert (found, type(found)) == (value, type(value))


def test_signs_and_groups_are_parts_of_an_override() -> None:
    found = [parsed_override(word) for word in ("+a.b=1", "++a=1", "~a.b", "actor@x.actor=dp", "a", "--a=1")]
    assert [(one.plus, one.key, one.is_group) if one else None for one in found] == [
        ("+", "a.b", False),
        ("++", "a", False),
        ("~", "a.b", False),
        ("", "actor@x.actor", True),
        None,
        None,
    ]
