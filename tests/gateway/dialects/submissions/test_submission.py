"""The events of a submission over kills at any moment: each once, in order, with the tokens that were made."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.sample import Sample
from gateway.dialects.submissions.frames import Head, read_head, read_steps
from gateway.dialects.submissions.group_run import GroupRun, Outcome
from gateway.dialects.submissions.submission import Counts, Submission
from gateway.dialects.submissions.words import Group
from gateway.ledger.folder import Folder
from gateway.ledger.ledger import Ledger, Record, Work
from tests.rigs.rig import Json

NUM_GROUPS, N, LENGTH = 2, 2, 4


class Uncounted(Counts):
    def __init__(self) -> None: ...

    def sample(self, run: GroupRun, num_tokens: int, report: Json) -> None: ...

    def group(self, run: GroupRun) -> None: ...


class SlowLedger(Ledger):
    """Its folder, and writes that wait for `commit`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.folder = Folder(path)
        self.life = self.folder.begin_life(0)
        self.waiting: list[tuple[Work, Callable[[], None]]] = []

    def put(self, work: Work, then: Callable[[], None]) -> None:
        self.waiting.append((work, then))

    def commit(self, most: int = 1000) -> None:
        waiting, self.waiting = self.waiting[:most], self.waiting[most:]
        for work, then in waiting:
            work(self.folder)
            then()


def token(group: int, sample: int, place: int) -> int:
    """The token that an engine makes there, whoever asks."""
    return 100 * group + 10 * sample + place


class GatewayLife:
    """A gateway with one submission and its ledger."""

    def __init__(self, path: Path) -> None:
        self.ledger = SlowLedger(path)
        groups = [Group(n=N, need=N, sampling={}, prompt=[1, 2]) for _ in range(NUM_GROUPS)]
        left = self.ledger.folder.load()
        record = Record(self.ledger, left[0].name) if left else Record.new(self.ledger, "submission")
        head = read_head(left[0].frames[0]) if left else Head("me", "one", b"d", 0.0)
        self.submission = Submission(head, groups, record, Uncounted(), self.ledger.life)
        if left:
            self.submission.restore(step for frame in left[0].frames[1:] for step in read_steps(frame))
        else:
            self.submission.write(b"[]")
        self.ledger.commit()

    def kill(self) -> "GatewayLife":
        self.ledger.folder.close()
        return GatewayLife(self.ledger.folder.path)

    def make(self, group: int, index: int) -> None:
        """One more token of a sample, if it is open."""
        run = self.submission.runs[group]
        if run.index in self.submission.outcomes or index not in run.left:
            return
        samples = run.made.reply.samples
        if (sample := next((one for one in samples if one.index == index), None)) is None:
            sample = Sample(index)
            samples.append(sample)
        place = sample.num_made
        choice: Json = {"token_ids": [token(group, index, place)], "logprobs": {"token_logprobs": [-1.0]}, "text": "x"}
        sample.add_told(choice | {"index": index, "finish_reason": "length" if place + 1 == LENGTH else None})
        sample.spans = [{"version": 0, "start": 0, "end": place + 1}]
        run._heard()
        if not run.left:
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
    life, client = GatewayLife(tmp_path_factory.mktemp("life") / "ledger"), Client()
    for name, group, sample in steps:
        if name == "make":
            life.make(group, sample)
        elif name == "commit":
            life.ledger.commit()
        elif name == "read":
            client.read(life.submission)
        elif name == "grow":
            life.submission.record.write_growth()
        elif name == "ack":
            life.submission.ack(client.cursor)
        elif name == "kill":
            life = life.kill()
    for _ in range(LENGTH):
        for group in range(NUM_GROUPS):
            for sample in range(N):
                life.make(group, sample)
    life.ledger.commit()
    client.read(life.submission)
    life.ledger.folder.close()
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
