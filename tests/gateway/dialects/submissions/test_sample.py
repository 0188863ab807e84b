"""A sample of a submission: what its chunks leave in its record and in its event."""

from typing import Any

import pytest

from gateway.dialects.submissions.sample import Sample

SPANS = [{"version": 3, "start": 0, "end": 2}]
CHUNK: dict[str, Any] = {"token_ids": [7, 8], "text": "ab", "weight_versions_so_far": SPANS}


def grown(sample: Sample) -> Sample:
    """The sample as the next gateway has it from the ledger."""
    part = sample.everything(0)
    assert part is not None
    restored = Sample(sample.index)
    restored.grow(part)
    return restored


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_sample_that_its_deadline_ends_keeps_the_mark_of_its_break(is_restored: bool) -> None:
    sample = Sample(0)
    sample.add(CHUNK | {"resumed": ["seed"]})
    event = (grown(sample) if is_restored else sample).report("deadline")
    assert (event["resumed"], event["weight_versions"]) == (["seed"], SPANS)


def test_a_sample_without_a_break_has_no_mark() -> None:
    sample = Sample(0)
    sample.add(CHUNK)
    assert not {"resumed", "missing_logprobs"} & grown(sample).report("deadline").keys()
