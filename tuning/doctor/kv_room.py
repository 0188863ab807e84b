"""The sequences that an engine's KV cache holds, as `plan` counts them."""

from tuning.doctor.engine_view import EngineView
from tuning.doctor.model_size import model_shape
from tuning.plan.gpu import Gpu
from tuning.plan.memory import GPU_SHARE, engine_memory


def whole_sequences(engine: EngineView, gpu_gib: float, tensor_parallel: int | None = None) -> int | None:
    """Return the sequences of max_model_len that the cache of each rank holds, with another tensor parallel size where
    one is given; None for a model or a length that is not known."""
    shape, longest = model_shape(engine.model), engine.number("max_model_len")
    if shape is None or not longest:
        return None
    gpu = Gpu("GPU", gpu_gib, 1.0, 1.0, 1.0, "given")
    memory = engine_memory(
        shape,
        gpu,
        tensor_parallel or int(engine.number("tensor_parallel_size") or 1),
        int(engine.number("max_num_seqs") or 256),
        longest,
        data_parallel=int(engine.number("data_parallel_size") or 1) if engine.has_expert_parallelism else 1,
        share=engine.number("gpu_memory_utilization") or GPU_SHARE,
    )
    return memory.sequences(longest)
