"""Freezes the million objects that tests import, which live to the end: the garbage collector need not look at them,
and neither need the end of the process."""

import atexit
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
    """End this process with pytest's status, after its report. To take torch apart takes a second, and threads of Ray
    may end a process by a signal there, after the last test."""
    session = config.pluginmanager.getplugin("session")
    if not isinstance(session, pytest.Session):
        return
    if reporter := config.pluginmanager.getplugin("terminalreporter"):
        reporter.flush()
    atexit._run_exitfuncs()
    os._exit(session.exitstatus)
