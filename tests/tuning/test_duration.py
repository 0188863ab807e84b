"""Times on the command line."""

import pytest

from engines.errors import ConfigError
from tuning.duration import seconds_of


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), (" 30s ", 30)])
def test_a_time_has_a_unit_or_is_in_seconds(text: str, seconds: float) -> None:
    assert seconds_of(text, "--budget") == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "soon", "5d", "nan", "inf", "1e3"])
def test_a_time_that_is_none_is_refused_with_its_option(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--watch .*: expected a number of seconds"):
        seconds_of(text, "--watch")
