"""One reading of what the product does, on simulated engines: start, generate, update the weights, generate, lose a
replica, recover."""

import asyncio

from tests.rigs.calls import until
from tests.rigs.rig import Rig, StartRig

PROMPTS = [[digit, digit + 1, digit + 2] for digit in range(3, 11)]


async def test_the_story_of_a_run(start_rig: StartRig) -> None:
    # Start: a trainer waits for /health, asks for the world size and opens its transfer group.
    rig = await start_rig(num_replicas=3)
    await _healthy(rig)
    await rig.open_group()

    # Generate: the batch is spread over the fleet, and every completion is of version 0.
    await _step(rig, version=0)

    # Update and generate again: three steps of training.
    for version in (1, 2, 3):
        await rig.update()
        await _step(rig, version=version)

    # Lose a replica in the middle of a batch: the batch is whole all the same.
    batch = asyncio.create_task(_step(rig, version=3))
    await rig.begun(24)
    await rig.replicas[0].kill()
    rig.hurry()
    await batch

    # It comes back with the checkpoint's weights: it takes no rollout, and the batch is still of one version.
    await rig.add_replica("engine-0")
    await _healthy(rig)
    assert (await rig.states())["engine-0"] == "SYNCING"
    await _step(rig, version=3)

    # The trainer opens a new group, as it does when it is started again, and all three are in step.
    await rig.open_group()
    await rig.update()
    assert set((await rig.states()).values()) == {"SERVING"}
    await _step(rig, version=4)


async def _step(rig: Rig, version: int) -> None:
    """A trainer's batch: complete, in order, every sample its own, all of one weight version."""
    reply = await rig.complete(PROMPTS, n=4, max_tokens=24, ignore_eos=True)
    choices = reply["choices"]
    assert [choice["index"] for choice in choices] == list(range(4 * len(PROMPTS)))
    assert [choice["prompt_token_ids"] for choice in choices[::4]] == PROMPTS
    assert all(choice["weight_versions"] == [{"version": version, "start": 0, "end": 24}] for choice in choices)
    assert len({tuple(choice["token_ids"]) for choice in choices}) == len(choices)


async def _healthy(rig: Rig) -> None:
    await until(lambda: rig.get("/health"), lambda got: got[0] == 200)
