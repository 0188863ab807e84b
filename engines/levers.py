"""Names of engine levers, ours and each engine's: one table for commands and docs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lever:
    """A field of `EngineConfig` and the engine arguments that it sets: vLLM's has the same name.

    `sglang` is empty if SGLang has no such argument; `instead` then names the alternative. `in_sim` marks a lever that
    the simulated engine has too.

    `off_by_default` marks a switch that has no off form: False leaves it out. `is_list` marks an argument with several
    values, `of_adapters` a lever that is set only with `enable_lora`.
    """

    name: str
    sglang: str = ""
    instead: str = ""
    in_sim: bool = False
    off_by_default: bool = False
    is_list: bool = False
    of_adapters: bool = False


# In command-line order.
LEVERS = (
    Lever("served_model_name", sglang="served_model_name"),
    Lever("dtype", sglang="dtype"),
    Lever("quantization", sglang="quantization"),
    Lever("load_format", sglang="load_format"),
    Lever("seed", sglang="random_seed"),
    Lever("tensor_parallel_size", sglang="tp_size"),
    Lever("pipeline_parallel_size", sglang="pp_size"),
    Lever("data_parallel_size", instead="engine.num_replicas: one server of several copies takes no weights"),
    Lever("api_server_count", instead="engine.extra.tokenizer_worker_num"),
    Lever("max_model_len", sglang="context_length", in_sim=True),
    Lever("max_num_seqs", sglang="max_running_requests", in_sim=True),
    Lever("max_num_batched_tokens", sglang="chunked_prefill_size", in_sim=True),
    Lever(
        "gpu_memory_utilization", instead="engine.extra.mem_fraction_static, the share for weights and KV cache alone"
    ),
    Lever("kv_cache_memory_bytes", instead="engine.extra.max_total_tokens, the size of the KV cache in tokens"),
    Lever("kv_cache_dtype", sglang="kv_cache_dtype"),
    Lever("enable_prefix_caching", instead="engine.extra.disable_radix_cache"),
    Lever("enable_chunked_prefill", instead="engine.extra.chunked_prefill_size, -1 for whole prompts"),
    Lever("enforce_eager", sglang="disable_cuda_graph", off_by_default=True),
    Lever("cudagraph_capture_sizes", sglang="cuda_graph_bs_decode", is_list=True),
    Lever("max_cudagraph_capture_size", sglang="cuda_graph_max_bs_decode"),
    Lever("speculative_config", instead="engine.extra.speculative_algorithm and its companions"),
    Lever("enable_lora", sglang="enable_lora", in_sim=True, off_by_default=True, of_adapters=True),
    Lever("max_loras", sglang="max_loras_per_batch", in_sim=True, of_adapters=True),
    Lever("max_cpu_loras", sglang="max_loaded_loras", in_sim=True, of_adapters=True),
    Lever("max_lora_rank", sglang="max_lora_rank", in_sim=True, of_adapters=True),
    Lever("logprobs_mode", instead="nothing: its log-probabilities are of what was sampled from"),
    Lever("max_logprobs", instead="nothing: it has no such limit"),
    Lever("stream_interval", sglang="stream_interval", in_sim=True),
    Lever("disable_log_stats", instead="engine.extra.log_level", off_by_default=True),
)
