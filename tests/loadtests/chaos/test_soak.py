"""A soak in short, and its judgement of drift."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from loadtests.chaos.soak import Look, Soak, bytes_in, main
from loadtests.chaos.tally import Tally


def soaked(rss_mb: float) -> Soak:
    """A soak whose memory ends at `rss_mb`, from 200 on."""
    return Soak([Look(float(at), 200.0 if at < 75 else rss_mb, 40, 9, 30, 1.0) for at in range(101)], Tally())


def test_steady_figures_have_not_grown() -> None:
    assert soaked(219.0).grown() == []


def test_memory_that_grows_is_named_with_both_quarters() -> None:
    assert soaked(260.0).grown() == ["rss_mb grew from 200 to 260"]


@pytest.mark.slow
@pytest.mark.load
def test_five_minutes_lose_nothing_and_leak_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--minutes", "5"])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "lost 0, duplicated 0, stale 0, wrong 0, hung 0" in said


def test_a_version_that_is_removed_while_its_bytes_are_counted_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "weights").write_bytes(bytes(100))
    scan = os.scandir

    def removed_first(path: Any) -> Any:
        if str(path).endswith("v1"):
            shutil.rmtree(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", removed_first)
    assert bytes_in(tmp_path) == 100
