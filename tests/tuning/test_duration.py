"""Times on the command line."""

import pytest
from typer.testing import CliRunner

from engines.errors import ConfigError, UsageError
from gateway.cli.main import app
from tuning.duration import seconds_of


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), (" 30s ", 30)])
def test_a_time_has_a_unit_or_is_in_seconds(text: str, seconds: float) -> None:
    assert seconds_of(text, "--budget") == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "soon", "5d", "nan", "inf", "1e3"])
def test_a_time_that_is_none_is_refused_with_its_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--watch .*: expected a number of seconds"):
        seconds_of(text, "--watch")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-c", "no.yaml", "--watch", "30s"], "--watch 30s: nothing to watch: give --url URL"),
        (["--url", "http://127.0.0.1:1", "--watch", "soon"], "--watch 'soon': expected a number of seconds"),
    ],
)
def test_watching_needs_a_url_and_a_time(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["doctor", *arguments])
    assert isinstance(done.exception, UsageError)
    assert says in str(done.exception)
