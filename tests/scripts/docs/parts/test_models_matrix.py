"""The matrix of models in docs/compatibility.md."""

from typing import Any

from scripts.docs.parts.models_matrix import page

ROW = {"model": "tiny", "family": "dense", "dtype": "float32", "engine": "vLLM 1", "transformers": "5"}


def _row(verdicts: dict[str, str]) -> dict[str, Any]:
    return ROW | {"cells": {name: {"verdict": word} for name, word in verdicts.items()}}


def test_a_cell_is_the_worst_of_its_results() -> None:
    right = {"module, flat": "right", "module, delta, flat": "right", "kill": "right"}
    assert "| tiny | dense | float32 | right |  | right |  |  |  |  |  |  | right |" in page([_row(right)])
    wrong = right | {"module, delta, store": "wrong"}
    assert "| tiny | dense | float32 | right |  | **wrong** |" in page([_row(wrong)])


def test_a_model_that_the_engine_does_not_serve_is_named_with_the_reason() -> None:
    made = page([ROW | {"model": "odd", "cells": {}, "problem": "EngineStartFailed: no kernel\nmore"}])
    assert "* odd: EngineStartFailed: no kernel\n" in made
