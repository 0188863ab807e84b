"""vLLM's own models on the CPU, without an engine around them: their modules, their loaders, their LoRA layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engines.process.port import free_port

CONTEXT = 64


@contextmanager
def parallel_state() -> Iterator[None]:
    """One rank of one, without which vLLM makes no layer."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as vllm_state

    with set_current_vllm_config(VllmConfig()):
        vllm_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, backend="gloo")
        vllm_state.ensure_model_parallel_initialized(1, 1)
    try:
        yield
    finally:
        vllm_state.destroy_model_parallel()
        vllm_state.destroy_distributed_environment()


def loaded(folder: Path, *, lora: bool = False) -> tuple[Any, Any]:
    """vLLM's configuration and the model of a checkpoint, as its loaders leave it: nothing is packed."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    asked = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=CONTEXT, enable_lora=lora
    )
    config = asked.create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        model = initialize_model(vllm_config=config)
        record_metadata_for_reloading(model)
        model.load_weights(tensors_of(folder).items())
        if lora:
            _wrap(model, config)
    return config, model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _wrap(model: Any, config: Any) -> None:
    """Put LoRA layers before the model's own, as an engine does; around experts too, which needs a GPU's kernel."""
    from vllm.lora.layers import FusedMoEWithLoRA
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.model_executor.layers.fused_moe import MoERunner

    experts = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items()]
    experts = [found for found in experts if isinstance(found[2], MoERunner)]
    for parent, name, _ in experts:
        del parent._modules[name]
    LoRAModelManager(model, 4, CONTEXT, 128, config.lora_config, torch.device("cpu"), config)
    for parent, name, child in experts:
        wrapper = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
        torch.nn.Module.__init__(wrapper)
        wrapper.base_layer = child
        child.routed_experts.lora_base_layer_prefix = "base_layer."
        parent._modules[name] = wrapper
