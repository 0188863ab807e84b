"""The pure parts of the matrix of models."""

import math
from typing import Any

import pytest

from loadtests.studies.weights.model_matrix import merged, verdict

FAR = 2.0


def word(**differs: Any) -> str:
    equal = {"refused": False, "alone_refused": False, "apart": 0.0, "far": 0.0, "alone_far": 0.0, "near": 1e-4}
    return verdict(**equal | differs)


@pytest.mark.parametrize(
    ("differs", "expected"),
    [
        ({}, "right"),
        ({"far": FAR, "alone_far": FAR}, "right"),
        ({"refused": True, "alone_refused": True}, "refused"),
        ({"refused": True}, "wrong"),
        ({"refused": True, "alone_far": FAR}, "better"),
        ({"alone_refused": True, "apart": math.inf, "alone_far": math.inf}, "better"),
        ({"alone_refused": True, "apart": math.inf, "far": FAR}, "wrong"),
        ({"apart": FAR, "alone_far": FAR}, "better"),
        ({"apart": FAR, "far": FAR}, "wrong"),
    ],
)
def test_a_cell_is_judged_by_the_engine_alone_and_then_by_the_trainer(differs: dict[str, Any], expected: str) -> None:
    assert word(**differs) == expected


def test_new_rows_replace_those_before_in_the_order_of_the_matrix() -> None:
    before = [{"model": "qwen2", "cells": 1}, {"model": "llama", "cells": 1}]
    assert merged(before, [{"model": "qwen2", "cells": 2}]) == [
        {"model": "llama", "cells": 1},
        {"model": "qwen2", "cells": 2},
    ]
