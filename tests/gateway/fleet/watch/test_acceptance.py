"""Falls of a draft's acceptance are found against the share before the update, after enough tokens."""

import pytest

from gateway.fleet.watch.acceptance import ENOUGH_TOKENS, WINDOW_S, Acceptance, Share


class Engine:
    """An engine whose counters grow by `ENOUGH_TOKENS` at each look."""

    def __init__(self, alarm: float = 0.8) -> None:
        self.acceptance = Acceptance(alarm)
        self.at = self.drafted = self.accepted = 0.0

    def look(
        self, share: float, version: int, tokens: float = ENOUGH_TOKENS, after_s: float = 10.0
    ) -> tuple[Share, Share] | None:
        self.at, self.drafted, self.accepted = self.at + after_s, self.drafted + tokens, self.accepted + tokens * share
        return self.acceptance.see(self.at, self.drafted, self.accepted, version)

    def serve(self, share: float, version: int) -> list[tuple[Share, Share]]:
        """The falls found over three looks at a version."""
        found = [self.look(share, version) for _ in range(3)]
        return [fall for fall in found if fall is not None]


def test_before_enough_tokens_there_is_no_share() -> None:
    engine = Engine()
    engine.look(0.5, version=1)
    assert engine.acceptance.share is None
    engine.look(0.5, version=1, tokens=ENOUGH_TOKENS - 1)
    assert engine.acceptance.share is None
    engine.look(0.5, version=1, tokens=1)
    assert engine.acceptance.share == pytest.approx(0.5)


def test_a_share_is_of_the_last_minute_where_that_has_enough_tokens() -> None:
    engine = Engine()
    for _ in range(20):
        engine.look(0.2, version=1)
    for _ in range(int(WINDOW_S / 10.0)):
        engine.look(0.8, version=1)
    assert engine.acceptance.share == pytest.approx(0.8)
    for _ in range(20):
        engine.look(0.1, version=1, tokens=1)
    share = engine.acceptance.share
    assert share is not None
    assert 0.7 < share < 0.8  # 20 tokens are too few, so older ones stay in


def test_a_fall_after_an_update_is_found_once() -> None:
    engine = Engine()
    assert engine.serve(0.7, version=1) == []
    assert engine.serve(0.69, version=2) == []
    (fall,) = engine.serve(0.5, version=3)
    assert [(one.version, round(one.share, 3)) for one in fall] == [(1, 0.7), (3, 0.5)]
    assert engine.serve(0.5, version=4) == []


def test_a_slow_decline_over_many_updates_is_found() -> None:
    engine = Engine()
    found = [fall for version in range(1, 12) for fall in engine.serve(0.7 * 0.95**version, version)]
    assert [(before.version, now.version) for before, now in found] == [(1, 6), (6, 11)]


def test_a_share_that_recovers_is_the_one_to_compare_with() -> None:
    engine = Engine()
    engine.serve(0.5, version=1)
    assert engine.serve(0.8, version=2) == []
    assert engine.acceptance.reference is not None
    assert engine.acceptance.reference.version == 2
    assert len(engine.serve(0.6, version=3)) == 1


def test_a_share_that_moves_without_an_update_is_no_fall() -> None:
    engine = Engine()
    assert engine.serve(0.8, version=1) + engine.serve(0.1, version=1) == []


def test_counters_that_begin_again_are_no_fall() -> None:
    engine = Engine()
    engine.serve(0.7, version=1)
    engine.drafted = engine.accepted = 0.0
    assert engine.serve(0.7, version=1) == []
    assert engine.acceptance.share == pytest.approx(0.7)
