"""Which GPUs a process sees, by the names that they have on every machine and in every process."""

import asyncio

_TIMEOUT_S = 10.0
_UUID = "GPU-"


async def visible_gpus(visible: str | None) -> tuple[str, ...]:
    """UUIDs of the GPUs that CUDA_VISIBLE_DEVICES = `visible` names, of all where None; () where no driver tells."""
    try:
        asking = await asyncio.create_subprocess_exec(
            "nvidia-smi",
            "--query-gpu=index,uuid",
            "--format=csv,noheader",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return ()  # no such program
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            listed, _ = await asking.communicate()
    except TimeoutError:
        asking.kill()
        await asking.wait()
        return ()
    return chosen(listed.decode(), visible)


def chosen(listed: str, visible: str | None) -> tuple[str, ...]:
    """Of nvidia-smi's lines "0, GPU-...", those that CUDA_VISIBLE_DEVICES = `visible` names, by number or UUID."""
    uuids = dict(line.split(", ", 1) for line in listed.splitlines() if ", " in line)
    if visible is None:
        return tuple(uuids.values())
    named = (name.strip() for name in visible.split(","))
    return tuple(name if name.startswith(_UUID) else uuids[name] for name in named if name in uuids or _UUID in name)
