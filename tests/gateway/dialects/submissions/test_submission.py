"""The events of a submission over kills at any moment: each once, in order, with the tokens that were made."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.submissions.group_run import GroupRun, Outcome
from gateway.dialects.submissions.sample import Sample
from gateway.dialects.submissions.submission import Submission
from gateway.dialects.submissions.words import Group
from gateway.ledger.file import LedgerFile
from tests.rigs.rig import Json

NUM_GROUPS, N, LENGTH = 2, 2, 4


class Uncounted:
    def sample(self, run: GroupRun, sample: Sample) -> None: ...

    def group(self, run: GroupRun) -> None: ...

    def tokens(self, owner: str, number: int) -> None: ...

    def outgrew(self) -> None: ...


def token(group: int, sample: int, place: int) -> int:
    """The token that an engine makes there, whoever asks."""
    return 100 * group + 10 * sample + place


@dataclass
class Life:
    """A gateway with one submission, its ledger, and writes that wait for their commit."""

    path: Path
    submission: Submission = field(init=False)
    waiting: list[tuple[Callable[[LedgerFile], None], Callable[[], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.file = LedgerFile(self.path, 1 << 24)
        self.file.begin()
        number = self.file.begin_life(0)
        rows = self.file.load()
        groups = [Group(n=N, need=N, sampling={}, prompt=[1, 2]) for _ in range(NUM_GROUPS)]
        put = lambda work, then: self.waiting.append((work, then))  # noqa: E731
        self.submission = Submission(1, "me", "one", b"d", groups, 0.0, put, Uncounted())
        self.submission.life = number
        if rows:
            self.submission.restore(rows[0])
        else:
            self.submission.write()
        self.file.commit()
        self.commit()

    def commit(self) -> None:
        waiting, self.waiting = self.waiting, []
        self.file.begin()
        for work, _ in waiting:
            work(self.file)
        self.file.commit()
        for _, then in waiting:
            then()

    def kill(self) -> "Life":
        self.file.close()
        return Life(self.path)

    def make(self, group: int, index: int) -> None:
        """One more token of a sample, or of the first that is open."""
        run = self.submission.runs[group]
        sample = run.samples[index]
        if run.index in self.submission.outcomes or not sample.is_open:
            return
        place = len(sample.token_ids)
        choice: Json = {"token_ids": [token(group, index, place)], "logprobs": {"token_logprobs": [-1.0]}, "text": "x"}
        choice["weight_versions_so_far"] = [{"version": 0, "start": 0, "end": place + 1}]
        if place + 1 == LENGTH:
            choice |= {"finish_reason": "length", "weight_versions": choice["weight_versions_so_far"]}
        run._take(sample, choice)
        if not run.open:
            self.submission.end_group(run, Outcome.DELIVERED)
        if len(self.submission.outcomes) == NUM_GROUPS:
            self.submission.end()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("make"), st.integers(0, NUM_GROUPS - 1), st.integers(0, N - 1)),
        st.tuples(st.sampled_from(["commit", "read", "ack", "grow", "kill"]), st.just(0), st.just(0)),
    ),
    max_size=80,
)


class Client:
    """Reads on from its cursor, as far as it goes."""

    def __init__(self) -> None:
        self.cursor = 0
        self.events: list[Json] = []

    def read(self, submission: Submission) -> None:
        submission.check_cursor(self.cursor)
        for row in submission.ready(self.cursor):
            assert row.cursor > self.cursor
            self.cursor = row.cursor
            self.events.append(msgspec.msgpack.decode(row.content or b""))


@settings(max_examples=60)
@given(STEPS)
def test_each_event_is_delivered_once_whatever_is_killed_when(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    life, client = Life(tmp_path_factory.mktemp("life") / "ledger"), Client()
    for name, group, sample in steps:
        if name == "make":
            life.make(group, sample)
        elif name == "commit":
            life.commit()
        elif name == "read":
            client.read(life.submission)
        elif name == "grow":
            life.submission.write_growth()
        elif name == "ack":
            life.submission.ack(client.cursor)
        elif name == "kill":
            life = life.kill()
    for _ in range(LENGTH):
        for group in range(NUM_GROUPS):
            for sample in range(N):
                life.make(group, sample)
    life.commit()
    client.read(life.submission)
    life.file.close()
    found = [(event["group"], event["sample"]) for event in client.events if event["type"] == "sample"]
    assert sorted(found) == [(group, sample) for group in range(NUM_GROUPS) for sample in range(N)]
    assert [event["type"] for event in client.events].count("group") == NUM_GROUPS
    assert client.events[-1]["type"] == "end"
    for event in client.events:
        if event["type"] == "sample":
            wanted = [token(event["group"], event["sample"], place) for place in range(LENGTH)]
            assert np.frombuffer(event["token_ids"], "<i4").tolist() == wanted
            assert len(event["logprobs"]) == 4 * LENGTH
            assert event["text"] == "x" * LENGTH


def test_a_suspended_group_is_in_one_submission_or_the_other_whatever_is_killed_when(tmp_path: Path) -> None:
    life = Life(tmp_path / "ledger")
    life.make(0, 0)
    run = life.submission.runs[0]
    life.submission.end_group(run, Outcome.SUSPENDED)
    life.commit()
    other = Submission(2, "me", "two", b"d", [run.group], 0.0, life.submission._put, Uncounted())
    other.take_over(0, life.submission, 0)
    other.write()
    assert len(life.waiting) == 1  # both in one transaction
    life.commit()
    life.file.begin()
    first, second = life.file.load()
    life.file.commit()
    assert (list(first.parts), list(second.parts)) == ([], [(0, 0)])
    assert first.events[0].mark == "taken"
    life.submission.number, life.submission.id = 3, "three"
    life.submission.write()  # into another ledger, which the other submission is no longer in
    life.commit()
    life.file.begin()
    assert [event.mark for row in life.file.load() if row.number == 3 for event in row.events] == ["taken"]
    life.file.commit()
    assert other.runs[0].samples[0].token_ids.tolist() == [token(0, 0, 0)]
    life.file.close()
