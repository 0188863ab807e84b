"""Groups in parts: the client's reply is that of whole groups, and the parts are placed by themselves."""

from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.group_parts import part_size
from gateway.dialects.replays import batch
from tests.gateway.dialects.replays.test_replays import ALL, left, made, until, whole
from tests.rigs.rig import FAST_WATCH, Json, Rig, StartRig

PROMPTS = [[5, 6, 7], [5, 6, 8]]


@pytest.fixture
async def parted_rig(start_rig: StartRig) -> Rig:
    """Two replicas, and parts of two samples."""
    return await start_rig(2, gateway={"samples_together": 2}, fleet=FAST_WATCH)


@given(st.integers(1, 200), st.integers(1, 200))
def test_parts_are_equal_and_as_large_as_they_may_be(n: int, most: int) -> None:
    size = part_size(n, most)
    assert n % size == 0
    assert size == n or size <= most
    assert all(n % larger for larger in range(size + 1, most + 1) if larger <= n)


async def test_samples_of_a_group_go_to_several_replicas(parted_rig: Rig) -> None:
    await parted_rig.complete(PROMPTS[:1], n=8)
    assert [replica.placed for replica in parted_rig.fleet.replicas] == [4, 4]


async def test_a_stream_is_that_of_whole_groups(parted_rig: Rig) -> None:
    body = {"model": "sim", "prompt": PROMPTS, "n": 4, "max_tokens": 5, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
    made: dict[int, int] = {}
    async with parted_rig.client.post(parted_rig.url + "/v1/completions", json=body) as response:
        events = [line[6:] for line in (await response.read()).split(b"\n\n") if line.startswith(b"data: {")]
    *chunks, last = map(orjson.loads, events)
    for chunk in chunks:
        for choice in chunk["choices"]:
            made[choice["index"]] = made.get(choice["index"], 0) + len(choice["token_ids"])
    assert made == dict.fromkeys(range(8), 5)
    assert last["usage"] == {"prompt_tokens": 6, "completion_tokens": 40, "total_tokens": 46}


@pytest.mark.parametrize("one", [{"seed": 0}, {"seed": 7}, {"prompt_logprobs": 0}])
async def test_a_request_whose_samples_depend_on_each_other_is_no_group_of_parts(parted_rig: Rig, one: Json) -> None:
    await parted_rig.complete(PROMPTS[:1], n=8, **one)
    assert sorted(replica.placed for replica in parted_rig.fleet.replicas) == [0, 8]


async def test_the_turn_of_a_session_stays_on_its_replica(parted_rig: Rig) -> None:
    status, _ = await parted_rig.post(
        "/v1/completions", {"model": "sim", "prompt": PROMPTS[0], "n": 8}, headers={"X-Session-ID": "a"}
    )
    assert status == 200
    assert sorted(replica.placed for replica in parted_rig.fleet.replicas) == [0, 8]


async def test_parts_keep_their_tokens_when_a_replica_dies(parted_rig: Rig) -> None:
    body: Json = {"prompt": [[5, 6, number + 7] for number in range(4)], "n": 2, "max_tokens": 24}
    body |= {"ignore_eos": True, "return_token_ids": True}
    await left(parted_rig, body)
    await parted_rig.replicas[0].kill()
    parted_rig.hurry()
    await whole(parted_rig, body)


@pytest.mark.parametrize("after", [None, 1])
async def test_a_batch_goes_on_after_a_restart_in_the_parts_that_it_began_with(
    start_rig: StartRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int | None
) -> None:
    monkeypatch.setattr(batch, "_WORTH_IT_S", 0.0)
    ledger = str(tmp_path / "ledger")
    rig = await start_rig(2, gateway={"ledger": ledger, "samples_together": 2})
    body: Json = {"prompt": [[5, 6, 7]], "n": 8, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    await left(rig, body)
    before = made(rig)
    await rig.stop_gateway()
    again = await start_rig(2, replicas=rig.replicas, gateway={"ledger": ledger, "samples_together": after})
    again.hurry()
    reply = await whole(again, body)
    await until(again, "orphaned_batch_ends", 1, end="adopted")
    assert [choice["index"] for choice in reply["choices"]] == list(range(8))
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": ALL, "total_tokens": ALL + 3}
    assert made(again) - before <= ALL - 8 * 4  # a chunk of each sample was noted
