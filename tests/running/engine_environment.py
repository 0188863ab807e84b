"""Engines that tests and fixtures start have the same environment: with the name of its test, which pytest puts there,
each would be one of its own, and have a warm process that imports the engine anew for ten seconds and more."""

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

_NAME = "PYTEST_CURRENT_TEST"


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    with _no_test_named():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, object, object]:
    with _no_test_named():
        return (yield)


@contextmanager
def _no_test_named() -> Iterator[None]:
    name = os.environ.pop(_NAME, None)
    try:
        yield
    finally:
        if name is not None:
            os.environ[_NAME] = name  # which pytest takes out
