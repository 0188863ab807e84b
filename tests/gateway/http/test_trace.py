"""The record of requests: what is told of them, what is not, and what ends it."""

import json
from pathlib import Path

import pytest

from gateway.http import trace as trace_module
from gateway.http.trace import BLOCK_TOKENS
from tests.rigs.rig import Json, Rig, StartRig

PREFIX = list(range(3, 3 + 2 * BLOCK_TOKENS))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


async def traced(start_rig: StartRig, file: Path, **trace: object) -> Rig:
    return await start_rig(1, gateway={"trace": {"file": str(file), **trace}})


async def lines(rig: Rig, file: Path) -> list[Json]:
    """The lines of the file after the gateway's end."""
    await rig.stop_gateway()
    return [json.loads(line) for line in text(file).splitlines()]


def text(file: Path) -> str:
    """All of the file, which is its owner's alone."""
    assert file.stat().st_mode & 0o777 == 0o600
    return file.read_text()


async def test_a_request_is_one_line(start_rig: StartRig, file: Path) -> None:
    rig = await traced(start_rig, file)
    await rig.complete([PREFIX, [*PREFIX, 9, 9]], n=2, max_tokens=5, ignore_eos=True, user="ann", stop=["secret"])
    header, line = await lines(rig, file)
    assert (header["trace"], header["block_tokens"]) == (1, BLOCK_TOKENS)
    assert line["route"] == "/v1/completions"
    assert line["params"] == {"model": "sim", "n": 2, "max_tokens": 5, "ignore_eos": True}
    assert [prompt["tokens"] for prompt in line["prompts"]] == [64, 66]
    assert (line["status"], line["prompt_tokens"], line["completion_tokens"]) == (200, 130, 20)
    assert line["at"] >= 0
    assert line["seconds"] > 0
    assert "ann" not in text(file)
    assert "secret" not in text(file)


async def test_prefixes_that_were_shared_are_told_to_be(start_rig: StartRig, file: Path) -> None:
    rig = await traced(start_rig, file)
    for prompt in (PREFIX, PREFIX[:BLOCK_TOKENS] + [7] * BLOCK_TOKENS, [7] * BLOCK_TOKENS):
        await rig.complete(prompt, max_tokens=1)
    blocks = [line["prompts"][0]["blocks"] for line in (await lines(rig, file))[1:]]
    assert blocks[0][0] == blocks[1][0]
    assert blocks[0][1] != blocks[1][1]
    assert blocks[1][1] != blocks[2][0]  # the same tokens after others are another prefix


async def test_streams_and_other_dialects_are_counted(start_rig: StartRig, file: Path) -> None:
    rig = await traced(start_rig, file)
    chat = {"model": "sim", "messages": [{"role": "user", "content": "a" * 100}], "max_tokens": 3, "ignore_eos": True}
    for path, body in (
        ("/v1/completions", {"prompt": PREFIX, "max_tokens": 4, "ignore_eos": True, "stream": True}),
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/chat/completions", chat),
        ("/generate", {"input_ids": PREFIX, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}, "stream": True}),
    ):
        async with rig.client.post(rig.url + path, json=body, headers={"X-Session-ID": "s"}) as response:
            assert response.status == 200, await response.text()
            streamed = await response.text()
            assert "usage" not in streamed or not body.get("stream")
    _, *found = await lines(rig, file)
    assert [line["completion_tokens"] for line in found] == [4, 3, 3, 2, 2]
    assert [line["prompts"][0].get("tokens") for line in found] == [64, None, None, 64, None]
    assert found[1]["prompts"] == [{"characters": 106, "blocks": []}]
    assert found[3]["params"] == {"max_new_tokens": 2, "ignore_eos": True}
    assert len({line["session"] for line in found}) == 1
    assert found[0]["session"] != "s"


async def test_content_is_kept_where_it_is_asked_for(start_rig: StartRig, file: Path) -> None:
    rig = await traced(start_rig, file, content=True)
    await rig.complete(PREFIX, max_tokens=1)
    header, line = await lines(rig, file)
    assert header["content"] is True
    assert line["prompts"][0]["content"] == PREFIX


async def test_a_full_file_ends_the_record_and_no_request(
    start_rig: StartRig, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "_MAX_BYTES", 900)
    rig = await traced(start_rig, file)
    for _ in range(8):
        await rig.complete(PREFIX, max_tokens=1)
    found = await lines(rig, file)
    assert 1 < len(found) < 8
    assert len(text(file)) <= 900
