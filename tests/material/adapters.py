"""LoRA adapters on disk, in PEFT's form, for tests."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_adapter(
    folder: Path,
    *,
    rank: int = 8,
    layers: int = 1,
    sizes: tuple[int, int] = (4, 4),
    module: str = "self_attn.q_proj",
    scale: float = 0.0,
) -> Path:
    """An adapter of `module` in every layer, whose inputs and outputs are `sizes`: B @ A has `scale` everywhere."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [module.rpartition(".")[2]]}
    config |= {"bias": "none", "base_model_name_or_path": None, "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    inputs, outputs = sizes
    tensors = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.{module}"
        tensors[f"{name}.lora_A.weight"] = ((rank, inputs), [1.0] * (rank * inputs))
        tensors[f"{name}.lora_B.weight"] = ((outputs, rank), [scale / rank] * (outputs * rank))
    _write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


def _write_safetensors(file: Path, tensors: Mapping[str, tuple[tuple[int, ...], Sequence[float]]]) -> None:
    header, data = {}, b""
    for name, (shape, values) in tensors.items():
        content = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
