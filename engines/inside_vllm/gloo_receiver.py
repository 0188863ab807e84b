"""vLLM weight transfer backend "gloo": receives a trainer's weights in a vLLM worker without CUDA.

`engines/transfer/gloo.py` has the protocol; this file opens and closes the backend in the worker, and loads tensors.
"""

from collections import Counter
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.platforms import current_platform

from engines.inside_vllm import cpu_mends
from engines.transfer.gloo import Receiver, WeightGroup


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """vLLM's NCCL backend over TCP, with the same calls for trainers. Layerwise reload is inherited."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receiver = Receiver()
        if current_platform.is_cpu():  # the first code of ours that runs in the worker
            cpu_mends.mend_adapters()
            cpu_mends.mend_experts()

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the trainer's group."""
        if init_info.master_address is None or init_info.master_port is None:
            raise ValueError("the gloo backend needs master_address and master_port")
        if not init_info.packed:
            raise ValueError("the gloo backend takes packed transfers only: set packed to true")
        group = WeightGroup(
            init_info.master_address, init_info.master_port, self._rank(init_info.rank_offset), init_info.world_size
        )
        self._receiver.join(group, init_info.packed_buffer_size_bytes)

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive and load all tensors announced."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        with disable_mtp_completeness_check():
            self._receiver.receive(vars(update_info), self.model.load_weights)

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        rebuild_tied_head(self.model)

    def shutdown(self) -> None:
        """Leave the group and close its sockets."""
        self._receiver.leave()

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
