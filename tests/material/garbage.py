"""Freezes the million objects that tests import, which live to the end: the garbage collector need not look at them."""

import gc
import os

import pytest


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # this process of pytest-xdist has told all: to take torch apart takes a second
        os._exit(0)
    gc.unfreeze()  # extension modules complain of what is left when Python ends
