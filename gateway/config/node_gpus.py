"""`--gpus 0,1`: the GPUs of this node that engines may have. The others are left to the trainer."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from engines.errors import UsageError

VISIBLE = "CUDA_VISIBLE_DEVICES"

_ID = re.compile(r"\d+|(GPU|MIG)-[0-9a-fA-F-]+")
_DRIVER = Path("/proc/driver/nvidia/gpus")


def read_gpus(text: str, environ: Mapping[str, str] = os.environ, driver: Path = _DRIVER) -> tuple[str, ...]:
    """Parse GPU ids in the form of CUDA_VISIBLE_DEVICES: numbers or UUIDs between commas.

    Raises `UsageError` for a malformed or repeated id, for a number that this machine does not have (where the driver
    is loaded), and for an id outside the CUDA_VISIBLE_DEVICES that a batch system has set.
    """
    ids = tuple(part.strip() for part in text.split(","))
    for gpu in ids:
        if not _ID.fullmatch(gpu):
            raise UsageError(f"--gpus {text}: {gpu!r} is no GPU: give numbers or UUIDs, such as --gpus 0,1")
        if ids.count(gpu) > 1:
            raise UsageError(f"--gpus {text}: {gpu} is given twice")
    present = len(list(driver.iterdir())) if driver.is_dir() else None
    if present is not None and (missing := [gpu for gpu in ids if gpu.isdigit() and int(gpu) >= present]):
        raise UsageError(f"--gpus {text}: this machine has {present} GPUs, 0 to {present - 1}, and no {missing[0]}")
    if (allowed := environ.get(VISIBLE)) is not None:
        outside = [gpu for gpu in ids if gpu not in [part.strip() for part in allowed.split(",")]]
        if outside:
            raise UsageError(f"--gpus {text}: {outside[0]} is not in {VISIBLE}={allowed}, which is all that is ours")
    return ids


def visible_gpus(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> list[str]:
    """List the GPUs that this process may use, without CUDA: from the variable, else from device files."""
    if (visible := environ.get(VISIBLE)) is not None:
        return [gpu for gpu in visible.split(",") if gpu]
    return [str(index) for index in range(len(list(devices.glob("nvidia[0-9]*"))))]
