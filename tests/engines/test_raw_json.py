"""JSON as it leaves the gateway."""

import orjson
import pytest

from engines.raw_json import event


@pytest.mark.parametrize(
    "text", ["plain", "a\u2028b", "a\u2029b", "a\u0085b", "a\x0b\x0c\x1c\x1d\x1e\r\nb", "Grüße \\u2028"]
)
def test_an_event_is_one_line_to_those_who_split_lines_as_unicode_does(text: str) -> None:
    line, *rest = event({"text": text}).decode().splitlines()
    assert rest == [""]
    assert orjson.loads(line.removeprefix("data: ")) == {"text": text}
