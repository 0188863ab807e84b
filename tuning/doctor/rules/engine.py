"""Rules about an engine's levers, under the gateway, verl or TRL."""

from collections.abc import Iterator

from tuning.doctor.engine_view import EngineView
from tuning.doctor.finding import Found, consider, fine, hurts
from tuning.doctor.model_size import model_shape
from tuning.doctor.rules.rule import (
    LEVERS,
    TRL_CODE,
    TRL_GUIDE,
    VERL_CODE,
    VERL_GUIDE,
    VERL_PRACTICE,
    VLLM_CODE,
    Rule,
    of_engines,
)
from tuning.doctor.subject import Subject
from tuning.doctor.workload import FEW_COMPLETIONS
from tuning.plan.gpu import Gpu
from tuning.plan.memory import GPU_SHARE, engine_memory

# Memory of an engine beside weights and KV cache: activations, CUDA graphs, the buffers of a weight transfer.
_BESIDE_KV_GIB = 5.0
# Full sequences beside the weights of one GPU that make a second one worth its cost in each layer.
_FEW_ALONE = 64
# Completions of a step for one replica, with which its GPUs do as much together as apart: 0.97 of the tokens/s at 64.
_FEW_FOR_REPLICAS = 64
_GRAPHS = "CUDA graphs: 1.53 times the tokens/s at 64 streams and 1.01 at 512; with slow CPU cores 2.5 and 1.13"
_FEW_SEQS = "max_num_seqs 64 under 512 streams: 0.64 of the tokens/s, 0.57 for groups of 8; 256: 1.09 and 1.04"


@Rule(
    of_engines, "gpu-memory", "gpu_memory_utilization, extra.mem_fraction_static, vllm_gpu_memory_utilization",
    "What is not weights is KV cache, and KV cache is how many sequences run. The share means something else in each "
    "engine: of the whole GPU for all in vLLM, for weights and KV cache alone in SGLang.",
    f"{VERL_GUIDE}; {VERL_PRACTICE}", 0.3,
)  # fmt: skip
def _memory_share(engine: EngineView, subject: Subject) -> Iterator[Found]:
    name = "gpu_memory_utilization" if engine.is_vllm or engine.owner == "verl" else "mem_fraction_static"
    setting, share = engine.at(name), engine.number(name)
    if engine.on_cpu or engine.value("kv_cache_memory_bytes") or share is None:
        return
    if engine.shares_gpu:
        yield from _shared(engine, name, share, subject)
    elif engine.is_vllm and share < 0.85:
        message = f"{1 - share:.0%} of each GPU lies idle: vLLM takes {share:g} of it for weights, activations and KV"
        yield hurts(setting, message, "0.9", _kv_gain(engine, subject, share, 0.9))
    elif engine.is_vllm and share > 0.95:
        yield consider(setting, "little is left for the 2 GiB of buffers of a weight transfer", "0.92")
    elif not engine.is_vllm and share < 0.75:
        message = f"SGLang keeps {share:g} of the memory for weights and KV cache, and activations take far less than "
        yield hurts(setting, f"{message}what is left", "0.85", _kv_gain(engine, subject, share, 0.85))
    elif not engine.is_vllm and share > 0.92:
        message = f"{share:g} is for weights and KV cache alone; activations and graphs come on top, unlike in vLLM"
        yield consider(setting, message, "0.85 to 0.9")


def _shared(engine: EngineView, name: str, share: float, subject: Subject) -> Iterator[Found]:
    """The engine's share beside the trainer, which leaves the GPU or stays in part."""
    setting, resident = engine.at(name), engine.resident_gib
    weights = None if engine.weight_gib is None else engine.weight_gib / engine.gpus_of_weights
    load = subject.samples_per_replica(engine)
    has_few = load is not None and load <= FEW_COMPLETIONS
    room = None if resident is None else 1 - (resident + _BESIDE_KV_GIB) / subject.gpu_gib
    if weights is not None and share * subject.gpu_gib < weights:
        message = f"{share:g} of {subject.gpu_gib:g} GiB holds no KV cache beside {weights:.0f} GiB of weights"
        yield hurts(setting, message, "0.5 to 0.7, or a larger tensor parallel size")
    elif room is not None and resident is not None and share > room + _BESIDE_KV_GIB / subject.gpu_gib:
        message = f"{share:g} beside at least {resident:.0f} GiB of the trainer's, which stay on the GPU: more than "
        yield hurts(setting, f"{message}{subject.gpu_gib:g} GiB", f"{max(room, 0.1):.2f}, or offload the optimizer")
    elif has_few and (engine.is_offloaded or share < 0.4):
        return
    elif engine.is_offloaded and share < 0.7:
        yield consider(setting, f"{share:g}, though the trainer leaves the GPU while the engine runs", "0.8 to 0.9")
    elif room is None and not engine.is_offloaded and share > 0.7:
        yield consider(setting, f"{share:g} beside a trainer that stays on the GPU", "0.5 to 0.7, or offload it")
    elif share < 0.4:
        yield consider(setting, f"{share:g}: little KV cache, so that few sequences run at a time", "0.5 to 0.7")


def _kv_gain(engine: EngineView, subject: Subject, share: float, better: float) -> str:
    """KV cache with either share. SGLang's share does not hold what stands beside the KV cache."""
    if engine.weight_gib is None:
        return f"{better / share:.1f} times the memory"
    beside = engine.weight_gib / engine.gpus_of_weights + (_BESIDE_KV_GIB if engine.is_vllm else 0.0)
    now, then = (max(0.0, part * subject.gpu_gib - beside) for part in (share, better))
    return f"about {now:.0f} -> {then:.0f} GiB of KV cache a GPU of {subject.gpu_gib:g} GiB"


@Rule(
    of_engines, "tensor-parallel", "tensor_parallel_size, num_replicas",
    "GPUs of one replica wait for each other in every layer, replicas do not. TP is for models too large.",
    f"{LEVERS}; {VERL_GUIDE}", 0.3,
)  # fmt: skip
def _tensor_parallel(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, tp = engine.at("tensor_parallel_size"), int(engine.number("tensor_parallel_size") or 1)
    weights, load = engine.weight_gib, subject.samples_per_replica(engine)
    if engine.on_cpu or weights is None:
        return
    if weights > 0.9 * subject.gpu_gib * engine.gpus_of_weights:
        needed = next((n for n in (2, 4, 8, 16) if weights < 0.6 * subject.gpu_gib * n), 16)
        yield hurts(
            setting, f"weights of about {weights:.0f} GiB do not fit {tp} x {subject.gpu_gib:g} GiB", f"{needed}"
        )
    elif tp > 1 and weights < _roomy(engine) * subject.gpu_gib:
        alone = _whole_sequences(engine, subject.gpu_gib, 1)
        # More replicas may cost instead beside several API processes, and for an engine of another's loop.
        costs = (engine.number("api_server_count") or 1) > 1 or engine.owner == "TRL"
        if (alone is not None and alone < _FEW_ALONE) or (load <= _FEW_FOR_REPLICAS if load else costs):
            return
        message = (
            f"weights of about {weights:.0f} GiB fit one GPU of {subject.gpu_gib:g} GiB: {tp} replicas of one GPU "
        )
        effect = "two TP1 against one TP2, same GPUs: 1.7 times the tokens/s at 512 streams, 0.97 at 64"
        judge = hurts if (load or 0) > 128 and engine.owner == "gateway" else consider
        yield judge(setting, f"{message}each do more than one of all", f"1, and {tp} times the replicas", effect)


def _whole_sequences(engine: EngineView, gpu_gib: float, tensor_parallel: int | None = None) -> int | None:
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


def _roomy(engine: EngineView) -> float:
    """The share of a GPU that weights may take and leave a KV cache of use. Beside a trainer they count twice: what
    they take of the engine's own share is missing to the sequences of a step, which come all at the same time."""
    return 0.3 * (engine.number("gpu_memory_utilization") or 1.0) if engine.shares_gpu else 0.5


@Rule(
    of_engines, "max-num-batched-tokens", "max_num_batched_tokens",
    "It is the number of tokens that one step may compute, prompts' chunks and decodes together.",
    f"{LEVERS}: 512 streams of 1,280 tokens each ran at 0.98, 1, 1.02 with 2048, 8192, 32768; {VERL_GUIDE}",
    corrects="“8,192 batched tokens run one sequence of 4,096 + 4,096, and 32,768 four.” With chunked prefill it does "
    "not bound concurrent sequences: under a budget of 64, 16 sequences of 340 tokens ran at the same time, and under "
    "2,048, 512 of 1,280 made 0.98 of the tokens/s.",
)  # fmt: skip
def _batched_tokens(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, tokens = engine.at("max_num_batched_tokens"), engine.number("max_num_batched_tokens")
    longest = engine.number("max_model_len") or subject.workload.tokens
    # The belief counts whole sequences into it, and wants room for four.
    believed = bool(tokens and subject.workload.tokens and tokens < 4 * subject.workload.tokens)
    if not engine.reaches("max_num_batched_tokens"):
        message = "verl does not pass it to SGLang, so raising it changes nothing; it bounds the tokens of a step and "
        message += "not the sequences that run"
        if setting is not None and setting.origin != "default":
            instead = "leave it out; SGLang's lever is engine_kwargs.sglang.chunked_prefill_size"
            yield consider(setting, message, instead, corrects=True)
        elif believed:
            yield fine(setting, message)
    elif tokens is not None and engine.value("enable_chunked_prefill") is False:
        if longest and tokens < longest:
            message = f"{tokens:.0f}, but without chunked prefill a step has to hold a whole sequence of {longest:.0f}"
            yield hurts(setting, message, "enable_chunked_prefill: true")
    elif tokens is not None and tokens < 2048:
        yield consider(setting, f"{tokens:.0f}: long prompts take many steps", "8192", "8192 against 2048: 1.02")
    elif believed:
        message = f"{tokens:.0f} tokens of one step. With chunked prefill it bounds no sequences: max_num_seqs and the "
        yield fine(setting, f"{message}KV cache do, and a sequence that decodes takes 1 token of a step")


@Rule(
    of_engines, "max-num-seqs", "max_num_seqs against completions of a step / replicas",
    "Decoding reads all weights once a step, for one sequence or for hundreds; what waits gains nothing.", LEVERS, 0.4,
)  # fmt: skip
def _max_num_seqs(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, most = engine.at("max_num_seqs"), engine.number("max_num_seqs")
    load, room = subject.samples_per_replica(engine), _whole_sequences(engine, subject.gpu_gib)
    if engine.on_cpu or most is None or (room is not None and room <= most):
        return
    if load and most < min(load, 128) and load >= 2 * most:
        message = f"{most:.0f} run at a time, and a step brings {load} completions to a replica"
        yield hurts(setting, message, f"{min(load, 256)}", _FEW_SEQS)
    elif most < 128 and (load is None or most < load):
        yield consider(setting, f"{most:.0f} run at a time", "256, or the completions that a replica gets", _FEW_SEQS)


@Rule(
    of_engines, "cuda-graphs", "enforce_eager",
    "Without graphs every kernel of a decode step is launched by the CPU, which the GPU then waits for.", LEVERS, 0.35,
    "“RL needs eager mode, since its batches change size.” It does not: graphs are captured for many sizes, and a "
    "batch takes the next larger one.",
)  # fmt: skip
def _eager(engine: EngineView, subject: Subject) -> Iterator[Found]:
    if engine.value("enforce_eager") is True and not engine.on_cpu:
        message = (
            "CUDA graphs are off. A graph is replayed for the next larger captured size, so batches may be of any "
        )
        yield hurts(engine.at("enforce_eager"), f"{message}size", "false", _GRAPHS, corrects=True)


@Rule(
    of_engines, "capture-sizes", "cudagraph_capture_sizes, max_cudagraph_capture_size against max_num_seqs",
    "A batch larger than the largest captured size runs without a graph. vLLM's own choice goes to twice max_num_seqs, "
    "at most 512.",
    f"{LEVERS}; {VLLM_CODE}, config/vllm.py", 0.3,
)  # fmt: skip
def _capture_sizes(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, sizes = engine.at("cudagraph_capture_sizes"), engine.value("cudagraph_capture_sizes")
    largest = engine.number("max_cudagraph_capture_size")
    if isinstance(sizes, list) and sizes and all(isinstance(size, int) for size in sizes):
        largest = max(sizes)
    elif largest is not None:
        setting = engine.at("max_cudagraph_capture_size")
    if largest is None or not engine.reaches("cudagraph_capture_sizes") or engine.on_cpu:
        return
    widest = engine.number("max_num_seqs") or 256
    widest = min(widest, subject.samples_per_replica(engine) or widest)
    instead = f"up to {min(widest, 512):.0f}, or leave it out"
    message = f"batches of more than {largest:.0f} run without a graph, and up to {widest:.0f} sequences run at a time"
    if largest < min(64, widest):
        yield hurts(setting, message, instead, _GRAPHS)
    elif largest < widest:
        yield consider(setting, message, instead, "1.01 to 1.13 at 512 streams")


@Rule(
    of_engines, "chunked-prefill", "enable_chunked_prefill, extra.chunked_prefill_size",
    "Prompts are read in pieces beside the decodes of others, so that decoding goes on.",
    f"{VERL_GUIDE}; {VERL_CODE}, vllm_async_server.py raises max_num_batched_tokens where it is off", 0.05,
)  # fmt: skip
def _chunked_prefill(engine: EngineView, subject: Subject) -> Iterator[Found]:
    is_off = engine.value("enable_chunked_prefill") is False
    if not engine.reaches("enable_chunked_prefill") or engine.on_cpu:
        return
    if is_off or engine.number("chunked_prefill_size") == -1:
        message = "a long prompt stops all decoding until it is read, and max_num_batched_tokens must hold it whole"
        setting = engine.at("enable_chunked_prefill" if is_off else "chunked_prefill_size")
        yield consider(setting, message, "on, which is the engines' default")


@Rule(
    of_engines, "prefix-caching", "enable_prefix_caching, extra.disable_radix_cache",
    "All samples of a group, and all turns of a session, begin with the same tokens.", TRL_GUIDE, 0.2,
)  # fmt: skip
def _prefix_caching(engine: EngineView, subject: Subject) -> Iterator[Found]:
    is_radix, group = engine.value("disable_radix_cache") is True, subject.workload.group_size or 1
    setting = engine.at("disable_radix_cache" if is_radix else "enable_prefix_caching")
    if not engine.reaches("enable_prefix_caching") or not (is_radix or engine.value("enable_prefix_caching") is False):
        return
    if group > 1:
        message = f"the prompt of a group is read {group} times instead of once"
        yield hurts(setting, message, "on", f"{1 - 1 / group:.0%} of the prompt tokens need not be read")
    else:
        yield consider(setting, "equal prefixes, such as a system prompt or earlier turns, are read again", "on")


@Rule(
    of_engines, "seeds", "extra.seed",
    "Engines with one seed give one prompt the same completions on each replica, and a group without variance teaches "
    "nothing.",
    f"{VLLM_CODE}: its default seed is 0; {VERL_CODE} adds the replica's rank", 0.5,
)  # fmt: skip
def _seed(engine: EngineView, subject: Subject) -> Iterator[Found]:
    for name in ("extra.seed", "extra.random_seed"):
        if setting := engine.at(name):
            yield hurts(setting, "every replica draws the same numbers: equal prompts, equal samples", "engine.seed")


@Rule(
    of_engines,
    "stream-interval",
    "stream_interval",
    "Each chunk is put together, sent and read by Python.",
    LEVERS,
    0.4,
)
def _stream_interval(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, interval = engine.at("stream_interval"), engine.number("stream_interval")
    effect = "tokens/s against 32, at 512 streams: 1 gives 0.54, 8 gives 0.93, 128 gives 1.06; at 64 streams all alike"
    if interval is not None and interval < 32:
        judge = hurts if interval < 8 else consider
        yield judge(setting, f"a chunk every {interval:.0f} tokens is work of the one API process", "32", effect)


@Rule(
    of_engines, "api-servers", "api_server_count",
    "One process parses and streams for the whole engine, however many GPUs it has.", LEVERS, 0.2,
)  # fmt: skip
def _api_servers(engine: EngineView, subject: Subject) -> Iterator[Found]:
    tp, count = engine.number("tensor_parallel_size") or 1, engine.number("api_server_count") or 1
    if count > 1 or engine.value("enable_lora") or not engine.is_vllm or engine.owner != "gateway" or engine.on_cpu:
        return
    one = "one API process parses and streams about 20,000 tok/s at most"
    message = f"{one}, and answers of the engine wait behind them"
    effect = "7B on one H200, 256 streams with log-probabilities: 13,000 tok/s with 1, 19,000 with 4"
    if (weights := engine.weight_gib) is not None and weights < 3:
        message = f"{one}, and a model of {weights:.1f} GiB can make more"
        effect = "0.5B model, 2 processes: 1.57 times the tokens/s at 512 streams, 4: 1.74; at 64 streams 0.94 and 1.10"
    elif tp > 1:
        message, effect = f"{one}, for the work of {tp:.0f} GPUs", "one TP2 of a 7B made 17,900 tok/s and no more"
    yield consider(engine.at("api_server_count"), message, f"api_server_count: {max(tp, 4):.0f}", effect)


@Rule(
    of_engines, "data-parallel", "data_parallel_size",
    "Replicas restart one by one, are balanced by the tokens they hold, and fail alone.",
    f"{TRL_GUIDE}: data parallel servers of dense models are not advised since vLLM 0.14",
)  # fmt: skip
def _copies(engine: EngineView, subject: Subject) -> Iterator[Found]:
    copies = engine.number("data_parallel_size") or 1
    if copies > 1 and not engine.has_expert_parallelism:
        message = f"{copies:.0f} copies in one server start, fail and take weights together"
        instead = f"data_parallel_size: 1 and {copies:.0f} times the replicas"
        yield consider(engine.at("data_parallel_size"), message, instead)


@Rule(of_engines, "dtype", "dtype", "Decoding is bound by reading weights.", VERL_CODE, 0.4)
def _dtype(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, dtype = engine.at("dtype"), engine.value("dtype")
    if dtype in ("float32", "float") and not engine.on_cpu:
        yield hurts(setting, "four bytes a weight: twice the memory to hold and to read for each token", "bfloat16")
    elif dtype in ("float16", "half") and not engine.on_cpu:
        yield consider(setting, "trainers hold bfloat16: rounding differs, and log-probabilities with it", "bfloat16")


@Rule(
    of_engines, "logprobs-mode", "logprobs_mode", "Trainers divide their own log-probabilities by these.",
    f"{TRL_CODE} warns of any other mode", 0.5,
)  # fmt: skip
def _logprobs_mode(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting = engine.at("logprobs_mode")
    if engine.is_vllm and setting is not None and setting.value not in (None, "processed_logprobs"):
        message = f"{setting.value} are not those of the distribution that was sampled from, once temperature is not 1"
        yield hurts(setting, message, "processed_logprobs", "importance ratios that are 1 where the weights are equal")


@Rule(
    of_engines, "log-stats", "disable_log_stats",
    "Tuning begins with what the engine says of itself: KV cache in use, preemptions, waiting requests.", VERL_GUIDE,
)  # fmt: skip
def _log_stats(engine: EngineView, subject: Subject) -> Iterator[Found]:
    if engine.reaches("disable_log_stats") and engine.value("disable_log_stats") is True:
        message = "the engine reports no KV cache use, preemptions and queues, so that nothing can be tuned"
        yield consider(engine.at("disable_log_stats"), message, "false while tuning")
