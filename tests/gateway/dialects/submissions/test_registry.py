"""Bounds of the submissions that a gateway keeps: those of one key take no room from others."""

import asyncio
from pathlib import Path

from tests.rigs.rig import Json, Rig, StartRig
from tests.rigs.submissions import SAMPLING, body, submitted

ADMIN, MINE, THEIRS = ({"Authorization": f"Bearer {key}"} for key in ("owner", "mine", "theirs"))
MAX_BYTES = 60_000


async def test_submissions_that_take_too_much_room_are_held_against_their_key_alone(
    start_rig: StartRig, tmp_path: Path
) -> None:
    keys = {"inference_keys": ["mine", "theirs"], "admin_keys": ["owner"], "trusted_networks": []}
    room = keys | {"ledger": str(tmp_path / "ledger"), "submissions": {"max_bytes": MAX_BYTES}}
    rig = await start_rig(2, gateway=room, sim={"decode_step_s": 0.0, "decode_step_per_seq_s": 0.0})
    await rig.begun(samples=0, tokens=40)  # no sample gets more

    async def submit(headers: Json, name: str, groups: list[Json]) -> tuple[int, Json]:
        return await rig.post("/v1/rollouts", body(groups, id=name, stream=False), headers=headers)

    async def found(headers: Json, name: str) -> int:
        async with rig.client.get(f"{rig.url}/v1/rollouts/{name}", headers=headers) as response:
            await response.read()
            return response.status

    async def report() -> Json:
        ledger: Json = (await rig.get("/status", headers=ADMIN))[1]["ledger"]
        return ledger

    short: Json = {"prompt": [5, 6, 7], "n": 8, "sampling": SAMPLING | {"max_tokens": 40}}
    endless: Json = {"prompt": [5, 6, 7], "sampling": SAMPLING | {"max_tokens": 41}}
    async with asyncio.timeout(60):
        assert (await submit(THEIRS, "unread", [{"prompt": [5, 6, 7]}]))[0] == 202
        assert await found(THEIRS, "unread") == 200  # it has ended
        assert (await submit(MINE, "large", [*[short] * 120, endless]))[0] == 202
        while (await report())["kept_bytes"] < 3 * MAX_BYTES:
            await asyncio.sleep(0.02)
        assert (await submit(THEIRS, "new", [{"prompt": [5, 6, 7]}]))[0] == 202
        assert (await found(THEIRS, "new"), await found(THEIRS, "unread")) == (200, 200)
        status, refusal = await submit(MINE, "more", [{"prompt": [5, 6, 7]}])
        assert (status, "of this key" in refusal["error"]["message"]) == (429, True)
        rig.hurry()
        while (await report())["kept_bytes"] > MAX_BYTES:
            await asyncio.sleep(0.02)
        assert (await found(MINE, "large"), await found(THEIRS, "unread")) == (404, 200)
        assert (await submit(MINE, "more", [{"prompt": [5, 6, 7]}]))[0] == 202


async def test_a_prompt_is_kept_with_one_object_for_each_of_its_ids(rig: Rig) -> None:
    await submitted(rig, [{"prompt": [300, 301] * 20}])
    [submission] = rig.submissions
    [run] = submission.runs
    assert isinstance(run.group.prompt, list)
    assert len({id(token_id) for token_id in run.group.prompt}) == 2
