"""What a record has of a prompt at any moment is what was made until then, whatever became of its attempts."""

from types import SimpleNamespace
from typing import cast

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.chunks import Chunk
from engines.raw_json import encoded, opened
from gateway.dialects.growth import Growth, PromptRecord
from gateway.dialects.sample import Reply, Sample, Source
from gateway.fleet.replica import Flight, Replica
from tests.rigs.rig import Json

PROMPT = [1, 2]
read_steps = msgspec.msgpack.Decoder(list[Growth]).decode
ALONE = 0


def made(sample: Sample, num_tokens: int, *, ends: bool = False) -> None:
    """So many more tokens of a sample, of version 0."""
    first = sample.num_made
    names = [f"t{place}" for place in range(first, first + num_tokens)]
    offsets = [len("".join(f"t{before}" for before in range(place))) for place in range(first, first + num_tokens)]
    scores = {"tokens": names, "token_logprobs": [-1.5] * num_tokens, "text_offset": offsets}
    told: Json = {"index": ALONE, "token_ids": list(range(first, first + num_tokens)), "text": "".join(names)}
    reply = Reply(PROMPT, [sample])
    told |= {"logprobs": scores, "finish_reason": "stop" if ends else None}
    reply.take(Chunk.read(encoded({"choices": [told]})), [sample])


def stamped(sample: Sample) -> None:
    sample.spans = [{"version": 0, "start": 0, "end": sample.num_made}]


def told(record: PromptRecord) -> Json | None:
    """The prompt's sample as a client gets it; None before it has tokens."""
    samples = record.reply.samples
    if not samples or not samples[0].num_made:
        return None
    whole = opened(samples[0].told({"text": ""}))
    return {key: whole[key] for key in ("token_ids", "logprobs", "text", "weight_versions", "finish_reason")}


EVENTS = st.lists(st.sampled_from(["chunk", "write", "rest", "void", "again"]), max_size=30)


@settings(max_examples=200)
@given(EVENTS)
def test_a_restored_prompt_continues_where_its_record_ends(events: list[str]) -> None:
    record = PromptRecord(0, PROMPT)
    record.reply.samples = [Sample(ALONE)]
    steps: list[Growth] = []
    for event in events:
        [sample] = record.reply.samples
        match event:
            case "chunk":
                made(sample, 3)
                stamped(sample)
            case "rest" if sample.num_made:
                sample.keep()
            case "void":
                sample.drop()
            case "again":
                record.reply.samples = [Sample(ALONE)]
            case "write":
                steps += record.growth()
    [sample] = record.reply.samples
    sample.settle()
    steps += record.growth()
    restored = PromptRecord(0, PROMPT)
    for step in read_steps(msgspec.msgpack.encode(steps)):
        restored.restore(step)
    if record.reply.samples[0].num_made:
        assert told(restored) == told(record)


def test_a_sample_that_ended_is_whole_in_the_record() -> None:
    record, restored = PromptRecord(0, PROMPT), PromptRecord(0, PROMPT)
    record.reply.samples = [sample := Sample(ALONE)]
    made(sample, 3)
    stamped(sample)
    steps = record.growth()
    made(sample, 3, ends=True)
    stamped(sample)
    for step in steps + record.growth():
        restored.restore(step)
    assert told(restored) == told(record)
    assert record.growth() == []


def test_tokens_of_no_known_version_are_not_written() -> None:
    record = PromptRecord(0, PROMPT)
    record.reply.samples = [sample := Sample(ALONE)]
    made(sample, 3)
    assert record.growth() == []
    sample.settle()
    assert told(record) is None


def test_a_step_has_the_versions_where_they_changed_and_a_restored_sample_those_of_all_its_tokens() -> None:
    record, restored, flight = PromptRecord(0, PROMPT), PromptRecord(0, PROMPT), Flight(3)
    record.reply.samples = [sample := Sample(ALONE)]
    sample.begin(Source(cast(Replica, SimpleNamespace(weight_version=3)), flight, None))
    has_versions = []
    for version in (None, None, 4, None):
        if version is not None:
            flight.meet(version, keeps_kv=True)
        made(sample, 2)
        [step] = record.growth()
        has_versions.append(step.spans is not None)
        [read] = read_steps(msgspec.msgpack.encode([step]))
        restored.restore(read)
        [again] = restored.reply.samples
        assert (again.spans, again.kv_versions) == sample.stamps_of(sample.num_made)
    assert has_versions == [True, False, True, False]
