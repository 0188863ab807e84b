"""The lengths that prompts are remembered by."""

from gateway.fleet.placement.lengths import Lengths, prompt_key


def test_the_newest_delivery_counts_for_half() -> None:
    lengths = Lengths()
    assert lengths.of("m", 7) is None
    lengths.delivered("m", 7, 100.0)
    assert lengths.of("m", 7) == 100.0
    lengths.delivered("m", 7, 200.0)
    assert lengths.of("m", 7) == 150.0
    assert lengths.of("judge", 7) is None


def test_prompts_that_were_delivered_least_recently_are_forgotten() -> None:
    lengths = Lengths(limit=2)
    for key in (1, 2, 1, 3):
        lengths.delivered("m", key, 10.0)
    assert [lengths.of("m", key) for key in (1, 2, 3)] == [10.0, None, 10.0]


def test_a_key_is_that_of_equal_prompts_and_none_for_what_no_engine_takes() -> None:
    assert prompt_key([3, 4]) == prompt_key([3, 4]) != prompt_key([4, 3])
    assert prompt_key("text") == prompt_key("text") != prompt_key("other")
    assert prompt_key("text") == 0x23B4FE8E30745308, "the same in every process"
    lengths = Lengths()
    lengths.delivered("m", prompt_key([{}]), 10.0)  # type: ignore[list-item]  # as a client may send it
    assert lengths.of("m", prompt_key([{}])) is None  # type: ignore[list-item]
