"""Rows of a session: each sampled token is trained once, or has a reason not to be."""

from collections import Counter
from typing import Any

from hypothesis import given, settings

from tests.rigs.session_records import call, events, session_of, sessions
from trainer_client.sessions.exports import trl_fields
from trainer_client.sessions.trajectories import counts_of, trajectories_of

Json = dict[str, Any]


def rows(*calls: Json) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompt, completion and mask of each row."""
    made = trajectories_of(session_of(events(*calls)))
    return [(row.prompt_ids.tolist(), row.completion_ids.tolist(), row.mask.tolist()) for row in made]


@settings(max_examples=300, deadline=None)
@given(sessions())
def test_every_sampled_token_is_trained_once_or_has_a_reason(records: list[Json]) -> None:
    session = session_of(records)
    trained = Counter(
        token_id for row in trajectories_of(session) for token_id in row.completion_ids[row.mask == 1].tolist()
    )
    counts = counts_of(session)
    assert set(trained.values()) <= {1}
    assert trained.total() == counts.trainable
    assert counts.sampled == counts.trainable + sum(counts.masked.values())
    assert counts.sampled == sum(len(record["token_ids"]) for record in records[1:-1])
    assert all(counts.masked.values())


@settings(max_examples=200, deadline=None)
@given(sessions())
def test_a_row_is_what_its_last_call_saw_and_made_with_its_own_log_probs(records: list[Json]) -> None:
    session = session_of(records)
    told = {
        token_id: logprob
        for record in records[1:-1]
        for token_id, logprob in zip(record["token_ids"], record["logprobs"] or (), strict=False)
    }
    for row in trajectories_of(session):
        last = session.calls[row.calls[-1]]
        whole = [*row.prompt_ids.tolist(), *row.completion_ids.tolist()]
        assert len(whole) == last.prompt_tokens + len(last.token_ids)
        assert whole[-len(last.token_ids) :] == last.token_ids.tolist()
        is_trained = row.mask == 1
        assert row.logprobs[is_trained].tolist() == [told[one] for one in row.completion_ids[is_trained].tolist()]
        assert not row.logprobs[~is_trained].any()
        assert set(row.versions[is_trained].tolist()) == {3}


def test_a_shared_begin_is_trained_in_the_longest_path_alone() -> None:
    first = call(0)
    fork, main = call(1, first, (20,), (30,)), call(2, first, (21,), (31, 32, 33))
    assert rows(first, fork, main) == [
        ([5, 6], [7, 8, 21, 31, 32, 33], [1, 1, 0, 1, 1, 1]),
        ([5, 6], [7, 8, 20, 30], [0, 0, 0, 1]),
    ]


def test_trl_trains_on_sampled_tokens_alone() -> None:
    first = call(0)
    assert trl_fields(trajectories_of(session_of(events(first, call(1, first, (20,), (9,)))))) == {
        "prompt_ids": [[5, 6]],
        "completion_ids": [[7, 8, 20, 9]],
        "logprobs": [[-0.5, -0.75, 0.0, -1.5]],
        "env_mask": [[1, 1, 0, 1]],
        "session_reward": [1.0],
    }


def test_a_subagent_and_a_compaction_are_rows_of_their_own() -> None:
    first = call(0)
    made = trajectories_of(
        session_of(events(first, call(1, None, (9,), agent="sub"), call(2, None, (10,), root_reason="changed")))
    )
    assert [(row.agent, row.prompt_ids.tolist(), row.reward) for row in made] == [
        (None, [5, 6], 1.0),
        ("sub", [9], 1.0),
        (None, [10], 1.0),
    ]


def test_of_retries_the_one_that_was_gone_on_with_is_trained_else_the_latest() -> None:
    first = call(0, ids=(40,))
    again = call(1, ids=(41,), retry_of=0)
    last = call(2, ids=(42,), retry_of=1)
    assert [row[1] for row in rows(first, again, last)] == [[42]]
    assert [row[1] for row in rows(first, again, last, call(3, again, (20,), (50,)))] == [[41, 20, 50]]
    counts = counts_of(session_of(events(first, again, last)))
    assert (counts.trainable, counts.masked) == (1, {"retried": 2})


def test_a_retry_that_failed_does_not_mask_the_try_before_it() -> None:
    assert [row[1] for row in rows(call(0, ids=(40,)), call(1, ids=(41,), retry_of=0, mask="cut"))] == [[40]]


def test_an_answer_whose_client_left_is_trained_once_a_later_prompt_has_it() -> None:
    left = call(0, mask="client_left", ids=(40,))
    assert rows(left) == []
    assert rows(left, call(1, left, (20,), (50,))) == [([5, 6], [40, 20, 50], [1, 0, 1])]


def test_a_masked_call_in_the_middle_is_context_and_at_the_end_is_left_out() -> None:
    first = call(0, ids=(40,))
    broken = call(1, first, (20,), (41,), mask="unparsed")
    assert rows(first, broken) == [([5, 6], [40], [1])]
    assert rows(first, broken, call(2, broken, (21,), (42,))) == [([5, 6], [40, 20, 41, 21, 42], [1, 0, 0, 0, 1])]


def test_versions_and_rewards_stand_at_their_tokens() -> None:
    spans = [{"version": 4, "start": 0, "end": 1}, {"version": 5, "start": 1, "end": 2}]
    first = call(0, weight_versions=spans, reward=0.5)
    unknown = [{"version": 7, "start": None, "end": None}, {"version": 6, "start": None, "end": None}]
    second = call(1, first, (20,), weight_versions=unknown)
    (row,) = trajectories_of(session_of(events(first, second)))
    assert row.versions.tolist() == [4, 5, -1, 6, 6]
    assert row.version_range == (4, 6)
    assert row.rewards.tolist() == [0, 0.5, 0, 0, 0]


def test_a_row_says_how_it_ended() -> None:
    first = call(0)
    cut = call(1, first, (20,), mask="frozen")
    for calls, reason in (((first,), "stop"), ((call(0, finish_reason="length"),), "length"), ((first, cut), "abort")):
        assert [row.finish_reason for row in trajectories_of(session_of(events(*calls)))] == [reason]
