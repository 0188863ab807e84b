"""vLLM weight transfer backend "gloo": receives a trainer's weights in a vLLM worker without CUDA.

`engines/transfer/gloo.py` has the protocol; this file opens and closes the backend in the worker, and loads tensors.
"""

from collections import Counter
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.platforms import current_platform

from engines.inside_vllm import cpu_experts
from engines.inside_vllm import lora as vllm_lora
from engines.transfer.gloo import WeightGroup, receive


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """vLLM's NCCL backend over TCP, with the same calls for trainers. Layerwise reload is inherited."""

    _group: WeightGroup | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if current_platform.is_cpu():  # the first code of ours that runs in the worker
            vllm_lora.mend()
            cpu_experts.mend()

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the trainer's group. Any earlier group is left first, so a new trainer may come at any time."""
        if init_info.master_address is None or init_info.master_port is None:
            raise ValueError("the gloo backend needs master_address and master_port")
        if not init_info.packed:
            raise ValueError("the gloo backend takes packed transfers only: set packed to true")
        self.shutdown()
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        group = WeightGroup(
            init_info.master_address, init_info.master_port, self._rank(init_info.rank_offset), init_info.world_size
        )
        group.join()
        self._group = group

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive and load all tensors announced. On any error the group is left, which frees the trainer."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        if self._group is None:
            raise RuntimeError("no weight group: call init_weight_transfer_engine first")
        try:
            dtypes = [getattr(torch, name) for name in update_info.dtype_names]
            announced = zip(update_info.names, dtypes, update_info.shapes, strict=True)
            with disable_mtp_completeness_check():
                receive(announced, self._group, self.model.load_weights, self.packed_buffer_size_bytes)
        except Exception as error:
            self._group.close(f"{type(error).__name__}: {error}")
            self._group = None
            raise

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        rebuild_tied_head(self.model)

    def shutdown(self) -> None:
        """Leave the group and close its sockets."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _rank(self, rank_offset: int) -> int:
        """Return the rank, unique over all data-parallel groups, counted as vLLM's NCCL backend does."""
        parallel = self.parallel_config
        return int(rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank)


def rebuild_tied_head(model: torch.nn.Module) -> None:
    """Pack a tied lm_head again from the weights just loaded.

    On CPU vLLM computes with a packed copy of each weight. Layerwise reload rebuilds the copies of layers that it
    loads. A tied head is loaded through the embedding, so it would silently keep the old weights. Packing takes a
    seventh of the time of a load where the vocabulary is large; an untied head does not need it.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    if not current_platform.is_cpu():
        return
    found = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    sharing = Counter(module.weight.data_ptr() for module in found if module.weight.numel())
    for module in found:
        is_packed = isinstance(module, ParallelLMHead) and getattr(module, "cpu_linear", None) is not None
        if is_packed and sharing[module.weight.data_ptr()] > 1:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
