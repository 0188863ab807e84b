"""The limits of GPUs, by their makers' data sheets."""

import dataclasses
import math
from dataclasses import dataclass

from engines.errors import UsageError


@dataclass(frozen=True, slots=True)
class Gpu:
    """Limits of one GPU. An engine's share of them is fitted to measurements (`tuning/plan/speed.py`)."""

    name: str
    memory_gib: float
    """As nvidia-smi shows it: less than the number on the box, which counts GB of 10^9."""
    tb_per_s: float
    """Memory bandwidth, in TB of 10^12 bytes."""
    tflops: float
    """bfloat16 with dense matrices; data sheets often print twice that, for sparse ones."""
    link_gb_per_s: float
    """To another GPU of the node, one direction: NVLink, or PCIe where there is none."""
    source: str


_KNOWN = (
    Gpu("A100-40", 40.0, 1.555, 312, 300, "NVIDIA A100 data sheet (SXM4 40 GB)"),
    Gpu("A100", 80.0, 2.039, 312, 300, "NVIDIA A100 data sheet (SXM4 80 GB)"),
    Gpu("H100", 79.6, 3.35, 989, 450, "NVIDIA H100 data sheet (SXM5)"),
    Gpu("H200", 140.4, 4.8, 989, 450, "NVIDIA H200 data sheet (SXM5)"),
    Gpu("H800", 79.6, 3.35, 989, 200, "NVIDIA H800 data sheet (SXM5)"),
    Gpu("H20", 95.6, 4.0, 148, 450, "NVIDIA H20 data sheet"),
    Gpu("B200", 179.0, 7.7, 2250, 900, "NVIDIA DGX B200 data sheet, an eighth of it"),
    Gpu("L40S", 45.0, 0.864, 362, 32, "NVIDIA L40S data sheet (PCIe 4)"),
    Gpu("L4", 22.5, 0.3, 121, 16, "NVIDIA L4 data sheet (PCIe 4 x8)"),
)
GPUS = {gpu.name: gpu for gpu in _KNOWN}

_NUMBERS = ("memory_gib", "tb_per_s", "tflops", "link_gb_per_s")


def gpu_of(text: str) -> Gpu:
    """`H200`, or numbers: `memory_gib=141,tb_per_s=4.8,tflops=989,link_gb_per_s=450`; `H200,memory_gib=70` is both.

    Raises `UsageError` on an unknown name or number.
    """
    name, *numbers = [part.strip() for part in text.split(",")]
    if "=" in name:
        name, numbers = "", [name, *numbers]
    known = GPUS.get(name.upper())
    if name and known is None:
        choices = f"it can be {', '.join(GPUS)}, or numbers: {','.join(f'{number}=...' for number in _NUMBERS)}"
        raise UsageError(f"--gpu {name!r}: unknown; {choices}")
    given = dict(_number(part) for part in numbers)
    if known is not None:
        return dataclasses.replace(known, **given)  # type: ignore[arg-type]
    if missing := [number for number in _NUMBERS if number not in given]:
        raise UsageError(f"--gpu {text!r}: {', '.join(missing)} missing")
    return Gpu(name="GPU", source="given", **given)


def _number(part: str) -> tuple[str, float]:
    key, _, value = part.partition("=")
    if key not in _NUMBERS:
        raise UsageError(f"--gpu {part!r}: expected one of {', '.join(f'{number}=...' for number in _NUMBERS)}")
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise UsageError(f"--gpu {key}: {value!r} is no positive number")
    return key, number
