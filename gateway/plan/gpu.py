"""What a GPU can do, by its maker's data sheet."""

import dataclasses
from dataclasses import dataclass

from engines.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Limits of one GPU. What of them an engine reaches is fitted to measurements (`gateway/plan/speed.py`)."""

    name: str
    memory_gib: float
    """As nvidia-smi tells it: less than the number on the box, which counts GB of 10^9."""
    tb_per_s: float
    """Memory bandwidth, in TB of 10^12 bytes."""
    tflops: float
    """bfloat16 with dense matrices; data sheets often print twice that, for sparse ones."""
    link_gb_per_s: float
    """To another GPU of the node, one direction: NVLink, or PCIe where there is none."""
    source: str


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="A100-40",
            memory_gib=40.0,
            tb_per_s=1.555,
            tflops=312,
            link_gb_per_s=300,
            source="NVIDIA A100 data sheet (SXM4 40 GB)",
        ),
        Gpu(
            name="A100",
            memory_gib=80.0,
            tb_per_s=2.039,
            tflops=312,
            link_gb_per_s=300,
            source="NVIDIA A100 data sheet (SXM4 80 GB)",
        ),
        Gpu(
            name="H100",
            memory_gib=79.6,
            tb_per_s=3.35,
            tflops=989,
            link_gb_per_s=450,
            source="NVIDIA H100 data sheet (SXM5)",
        ),
        Gpu(
            name="H200",
            memory_gib=140.4,
            tb_per_s=4.8,
            tflops=989,
            link_gb_per_s=450,
            source="NVIDIA H200 data sheet (SXM5)",
        ),
        Gpu(
            name="B200",
            memory_gib=179.0,
            tb_per_s=7.7,
            tflops=2250,
            link_gb_per_s=900,
            source="NVIDIA DGX B200 data sheet, an eighth of it",
        ),
        Gpu(
            name="L40S",
            memory_gib=45.0,
            tb_per_s=0.864,
            tflops=362,
            link_gb_per_s=32,
            source="NVIDIA L40S data sheet (PCIe 4)",
        ),
        Gpu(
            name="L4",
            memory_gib=22.5,
            tb_per_s=0.3,
            tflops=121,
            link_gb_per_s=16,
            source="NVIDIA L4 data sheet (PCIe 4 x8)",
        ),
    )
}

_NUMBERS = ("memory_gib", "tb_per_s", "tflops", "link_gb_per_s")


def gpu_of(text: str) -> Gpu:
    """`H200`, or numbers: `memory_gib=141,tb_per_s=4.8,tflops=989,link_gb_per_s=450`; `H200,memory_gib=70` is both.

    Raises `ConfigError` on an unknown name or number.
    """
    name, *numbers = [part.strip() for part in text.split(",")]
    if "=" in name:
        name, numbers = "", [name, *numbers]
    known = GPUS.get(name.upper())
    if name and known is None:
        told = f"it can be {', '.join(GPUS)}, or numbers: {','.join(f'{number}=...' for number in _NUMBERS)}"
        raise ConfigError(f"--gpu {name!r}: unknown; {told}")
    given = dict(_number(part) for part in numbers)
    if known is not None:
        return dataclasses.replace(known, **given)  # type: ignore[arg-type]
    if missing := [number for number in _NUMBERS if number not in given]:
        raise ConfigError(f"--gpu {text!r}: {', '.join(missing)} missing")
    return Gpu(name="GPU", source="given", **given)


def _number(part: str) -> tuple[str, float]:
    key, _, value = part.partition("=")
    if key not in _NUMBERS:
        raise ConfigError(f"--gpu {part!r}: expected one of {', '.join(f'{number}=...' for number in _NUMBERS)}")
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if number <= 0:
        raise ConfigError(f"--gpu {key}: {value!r} is no positive number")
    return key, number
