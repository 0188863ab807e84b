"""UUIDs of the GPUs that a process sees; a UUID is the same in every process."""

import asyncio

_TIMEOUT_S = 10.0
_UUID = "GPU-"


async def visible_gpus(visible: str | None) -> tuple[str, ...]:
    """Return UUIDs of the GPUs in CUDA_VISIBLE_DEVICES = `visible`, of all if None; () without an NVIDIA driver."""
    try:
        asking = await asyncio.create_subprocess_exec(
            "nvidia-smi",
            "--query-gpu=index,uuid",
            "--format=csv,noheader",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return ()  # no nvidia-smi
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            listed, _ = await asking.communicate()
    except TimeoutError:
        asking.kill()
        await asking.wait()
        return ()
    return chosen(listed.decode(), visible)


def chosen(listed: str, visible: str | None) -> tuple[str, ...]:
    """Return UUIDs from nvidia-smi's lines "0, GPU-..." that `visible` (CUDA_VISIBLE_DEVICES) names by number or
    UUID."""
    uuids = dict(line.split(", ", 1) for line in listed.splitlines() if ", " in line)
    if visible is None:
        return tuple(uuids.values())
    named = (name.strip() for name in visible.split(","))
    return tuple(name if name.startswith(_UUID) else uuids[name] for name in named if name in uuids or _UUID in name)
