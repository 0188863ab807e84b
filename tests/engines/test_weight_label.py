"""What a label tells of an engine's weights."""

import pytest

from engines.weight_label import WeightLabel, committed_label, is_given, open_label, version_of

BEFORE = committed_label(16, "0000000a")
MADE = committed_label(17, "0000000b")


@pytest.mark.parametrize("made", [MADE, BEFORE, "17", "0"])
def test_a_label_after_the_verdict_is_committed(made: str) -> None:
    label = WeightLabel.read(made)
    assert (label, label.is_committed, label.version) == (WeightLabel(made, made), True, version_of(made))


@pytest.mark.parametrize(("made", "version"), [(MADE, 17), ("", 0)])
def test_a_label_before_the_verdict_tells_the_last_that_was_committed(made: str, version: int) -> None:
    label = WeightLabel.read(open_label(made, BEFORE))
    assert (label, label.is_committed, label.version) == (WeightLabel(made, BEFORE), False, version)


@pytest.mark.parametrize("text", ["default", "None", "", "v3", "\u00b2", "7-beta", "what?", "17?", "?"])
def test_any_other_text_is_the_checkpoint(text: str) -> None:
    assert WeightLabel.read(text) == WeightLabel()
    assert not is_given(text)


def test_a_gateway_gives_versions_and_open_labels() -> None:
    assert all(map(is_given, (MADE, "0", open_label(MADE, BEFORE), open_label("", "0"))))
