"""Random bad requests: the same for a seed, and none that kills, hangs or harms."""

from pathlib import Path

import orjson
import pytest

from loadtests.chaos.clients.bad_requests import bad_requests
from loadtests.chaos.fuzz import main


def test_a_seed_gives_the_same_requests() -> None:
    first, second = bad_requests(7, 300), bad_requests(7, 300)
    assert [one.content for one in first] == [one.content for one in second]
    assert [one.content for one in first] != [one.content for one in bad_requests(8, 300)]
    assert len({one.what for one in first}) > 50


@pytest.mark.load
def test_bad_requests_kill_hang_and_harm_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    status = main(["--requests", "400", "--seed", "2", "--json", str(out)])
    said = capsys.readouterr().out
    assert said.rstrip().endswith("deaths 0, hung 0, plain-text 500 0, bystanders harmed 0"), said
    assert status == 0, said
    report = orjson.loads(out.read_bytes())
    assert report["requests"] == 400
    assert report["bystanders"] > 0
