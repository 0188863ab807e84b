"""Rules about an engine's levers, under the gateway, verl or TRL."""

from collections.abc import Iterator

from engines.config import EngineConfig
from engines.types import EngineKind
from tuning.doctor.engine_view import EngineView
from tuning.doctor.finding import Found, consider, fine, hurts
from tuning.doctor.kv_room import whole_sequences
from tuning.doctor.rules.rule import (
    LEVERS,
    TRL_CODE,
    TRL_GUIDE,
    VERL_CODE,
    VERL_GUIDE,
    VERL_PRACTICE,
    VLLM_CODE,
    engine_group_rule,
    engine_rule,
)
from tuning.doctor.subject import Subject
from tuning.doctor.workload import FEW_COMPLETIONS

# Memory of an engine beside weights and KV cache: activations, CUDA graphs, the buffers of a weight transfer.
_BESIDE_KV_GIB = 5.0
# Full sequences beside the weights of one GPU that make a second one worth its cost in each layer.
_FEW_ALONE = 64
# Completions of a step for one replica, with which its GPUs do as much together as apart: 0.97 of the tokens/s at 64.
_FEW_FOR_REPLICAS = 64
_GRAPHS = "CUDA graphs: 1.53 times the tokens/s at 64 streams and 1.01 at 512; with slow CPU cores 2.5 and 1.13"
_FEW_SEQS = "max_num_seqs 64 under 512 streams: 0.64 of the tokens/s, 0.57 for groups of 8; 256: 1.09 and 1.04"


@engine_rule(
    id="gpu-memory",
    asks="Does the engine use the GPU's memory?",
    reads="gpu_memory_utilization, extra.mem_fraction_static, vllm_gpu_memory_utilization",
    why="What is not weights is KV cache, and KV cache is how many sequences run. The share means something "
    "else in each engine: of the whole GPU for all in vLLM, for weights and KV cache alone in SGLang.",
    source=f"{VERL_GUIDE}; {VERL_PRACTICE}",
    gain=0.3,
)
def _memory_share(engine: EngineView, subject: Subject) -> Iterator[Found]:
    if engine.on_cpu or engine.value("kv_cache_memory_bytes"):
        return
    if engine.is_vllm:
        yield from _vllm_share(engine, subject)
    else:
        yield from _sglang_share(engine, subject)


def _vllm_share(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, share = engine.at("gpu_memory_utilization"), engine.number("gpu_memory_utilization")
    if share is None:
        yield fine(setting, "vLLM's own choice, 0.92 of the GPU")
    elif engine.shares_gpu:
        yield from _shared(engine, share, subject)
    elif share < 0.85:
        message = (
            f"{1 - share:.0%} of each GPU lies idle: vLLM takes {share:g} of the GPU for weights, activations and KV"
        )
        yield hurts(setting, message, "0.9", _kv_gain(engine, subject, share, 0.9))
    elif share > 0.95:
        yield consider(setting, "little is left for the 2 GiB of buffers of a weight transfer", "0.92")
    else:
        yield fine(setting, f"vLLM takes {share:g} of the GPU in all")


def _sglang_share(engine: EngineView, subject: Subject) -> Iterator[Found]:
    name = "gpu_memory_utilization" if engine.owner == "verl" else "mem_fraction_static"
    setting, share = engine.at(name), engine.number(name)
    if share is None:
        yield fine(setting, "SGLang's own choice of mem_fraction_static")
    elif engine.shares_gpu:
        yield from _shared(engine, share, subject)
    elif share < 0.75:
        message = (
            f"SGLang keeps {share:g} of the memory for weights and KV cache (mem_fraction_static), and what is left "
            "is far more than activations and graphs take"
        )
        yield hurts(setting, message, "0.85", _kv_gain(engine, subject, share, 0.85))
    elif share > 0.92:
        message = f"{share:g} is for weights and KV cache alone; activations and graphs come on top, unlike in vLLM"
        yield consider(setting, message, "0.85 to 0.9")
    else:
        yield fine(setting, f"{share:g} for weights and KV cache; activations and graphs have the rest")


def _shared(engine: EngineView, share: float, subject: Subject) -> Iterator[Found]:
    """The engine's share beside the trainer, which leaves the GPU or stays in part."""
    name = "gpu_memory_utilization" if engine.is_vllm or engine.owner == "verl" else "mem_fraction_static"
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
        yield fine(setting, f"{share:g}, for {load} completions of a step")
    elif engine.is_offloaded and share < 0.7:
        yield consider(setting, f"{share:g}, though the trainer leaves the GPU while the engine runs", "0.8 to 0.9")
    elif room is None and not engine.is_offloaded and share > 0.7:
        yield consider(setting, f"{share:g} beside a trainer that stays on the GPU", "0.5 to 0.7, or offload it")
    elif share < 0.4:
        yield consider(setting, f"{share:g}: little KV cache, so that few sequences run at a time", "0.5 to 0.7")
    else:
        yield fine(setting, f"{share:g} beside a trainer" + (" that is offloaded" if engine.is_offloaded else ""))


def _kv_gain(engine: EngineView, subject: Subject, share: float, better: float) -> str:
    """KV cache with either share. SGLang's share does not hold what stands beside the KV cache."""
    weights = engine.weight_gib
    if weights is None:
        return f"{better / share:.1f} times the memory"
    beside = _BESIDE_KV_GIB if engine.is_vllm else 0.0
    now, then = (
        max(0.0, part * subject.gpu_gib - weights / engine.gpus_of_weights - beside) for part in (share, better)
    )
    return f"about {now:.0f} -> {then:.0f} GiB of KV cache a GPU of {subject.gpu_gib:g} GiB"


@engine_rule(
    id="tensor-parallel",
    asks="Is the tensor parallel size the smallest that fits?",
    reads="tensor_parallel_size, num_replicas",
    why="GPUs of one replica wait for each other in every layer, replicas do not. TP is for models too large.",
    source=f"{LEVERS}; {VERL_GUIDE}",
    gain=0.3,
)
def _tensor_parallel(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, tp = engine.at("tensor_parallel_size"), int(engine.number("tensor_parallel_size") or 1)
    weights = engine.weight_gib
    if engine.on_cpu:
        return
    if weights is not None and weights > 0.9 * subject.gpu_gib * engine.gpus_of_weights:
        needed = next((n for n in (2, 4, 8, 16) if weights < 0.6 * subject.gpu_gib * n), 16)
        message = f"weights of about {weights:.0f} GiB do not fit {tp} x {subject.gpu_gib:g} GiB"
        yield hurts(setting, message, f"{needed}")
    elif tp > 1 and (alone := whole_sequences(engine, subject.gpu_gib, 1)) is not None and alone < _FEW_ALONE:
        yield fine(setting, f"one GPU would hold {alone} sequences of full length beside the weights")
    elif tp > 1 and _is_of_unknown_load(engine, subject):
        yield fine(setting, f"{tp} GPUs; replicas of fewer do more where a batch keeps them busy (plan)")
    elif tp > 1 and (load := subject.samples_per_replica(engine)) and load <= _FEW_FOR_REPLICAS:
        yield fine(setting, f"{load} completions of a step for {tp} GPUs, which as replicas do no more with so few")
    elif tp > 1 and weights is not None and weights < _roomy(engine) * subject.gpu_gib:
        message = (
            f"weights of about {weights:.0f} GiB fit one GPU of {subject.gpu_gib:g} GiB: {tp} replicas of one GPU "
            "each do more than one of all"
        )
        effect = "two TP1 against one TP2, same GPUs: 1.7 times the tokens/s at 512 streams, 0.97 at 64"
        judge = hurts if _is_busy(engine, subject) and engine.owner == "gateway" else consider
        yield judge(setting, message, f"1, and {tp} times the replicas", effect)
    elif tp > 1:
        fits = f"about {weights:.0f} GiB of weights" if weights else "a model of unknown size"
        yield fine(setting, f"{tp} GPUs for {fits}; smaller where it fits")
    else:
        yield fine(setting, "one GPU a replica: the most replicas that the GPUs give")


def _is_of_unknown_load(engine: EngineView, subject: Subject) -> bool:
    """True where more replicas may cost instead: beside several API processes, and for an engine of another's loop."""
    costs = (engine.number("api_server_count") or 1) > 1 or engine.owner == "TRL"
    return costs and not subject.samples_per_replica(engine)


def _roomy(engine: EngineView) -> float:
    """The share of a GPU that weights may take and leave a KV cache of use. Beside a trainer they count twice: what
    they take of the engine's own share is missing to the sequences of a step, which come all at the same time."""
    return 0.3 * (engine.number("gpu_memory_utilization") or 1.0) if engine.shares_gpu else 0.5


def _is_busy(engine: EngineView, subject: Subject) -> bool:
    return (subject.samples_per_replica(engine) or 0) > 128


@engine_rule(
    id="max-num-batched-tokens",
    asks="Is the token budget of a step large enough?",
    reads="max_num_batched_tokens",
    why="It is the number of tokens that one step may compute, prompts' chunks and decodes together.",
    source=f"{LEVERS}: 512 streams of 1,280 tokens each ran at 0.98, 1, 1.02 with 2048, 8192, 32768; {VERL_GUIDE}",
    corrects="“8,192 batched tokens run one sequence of 4,096 + 4,096, and 32,768 four.” With chunked prefill it "
    "does not bound concurrent sequences: under a budget of 64, 16 sequences of 340 tokens ran at the same time, "
    "and under 2,048, 512 of 1,280 made 0.98 of the tokens/s.",
)
def _batched_tokens(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, tokens = engine.at("max_num_batched_tokens"), engine.number("max_num_batched_tokens")
    # The belief counts whole sequences into it, and wants room for four.
    believed = bool(tokens and subject.workload.tokens and tokens < 4 * subject.workload.tokens)
    if not engine.reaches("max_num_batched_tokens"):
        message = (
            "verl does not pass it to SGLang, so raising it changes nothing; it bounds the tokens of a step and not "
            "the sequences that run"
        )
        if setting is None or setting.origin == "default":
            yield fine(setting, message, corrects=believed)
        else:
            instead = "leave it out; SGLang's lever is engine_kwargs.sglang.chunked_prefill_size"
            yield consider(setting, message, instead, corrects=True)
    elif tokens is None:
        yield fine(setting, "the engine's own choice")
    elif engine.value("enable_chunked_prefill") is False:
        yield from _whole_prompts(engine, subject, tokens)
    elif tokens < 2048:
        yield consider(setting, f"{tokens:.0f}: long prompts take many steps", "8192", "8192 against 2048: 1.02")
    else:
        message = (
            f"{tokens:.0f} tokens of one step. With chunked prefill it bounds no sequences: max_num_seqs and the KV "
            "cache do, and a sequence that decodes takes 1 token of a step"
        )
        yield fine(setting, message, corrects=believed)


def _whole_prompts(engine: EngineView, subject: Subject, tokens: float) -> Iterator[Found]:
    setting, longest = engine.at("max_num_batched_tokens"), engine.number("max_model_len") or subject.workload.tokens
    if longest and tokens < longest:
        message = f"{tokens:.0f}, but without chunked prefill a step has to hold a whole sequence of {longest:.0f}"
        yield hurts(setting, message, "enable_chunked_prefill: true")
    else:
        yield fine(setting, f"{tokens:.0f} hold a whole prompt")


@engine_rule(
    id="max-num-seqs",
    asks="Do enough sequences run at a time?",
    reads="max_num_seqs against completions of a step / replicas",
    why="Decoding reads all weights once a step, for one sequence or for hundreds; what waits gains nothing.",
    source=LEVERS,
    gain=0.4,
)
def _max_num_seqs(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, most = engine.at("max_num_seqs"), engine.number("max_num_seqs")
    load, room = subject.samples_per_replica(engine), whole_sequences(engine, subject.gpu_gib)
    if engine.on_cpu:
        return
    if most is None:
        yield fine(setting, "the engine's own choice")
    elif room is not None and room <= most:
        yield fine(setting, f"{most:.0f}; the KV cache holds {room} sequences of full length")
    elif load and most < min(load, 128) and load >= 2 * most:
        message = f"{most:.0f} run at a time, and a step brings {load} completions to a replica"
        yield hurts(setting, message, f"{min(load, 256)}", _FEW_SEQS)
    elif most < 128 and (load is None or most < load):
        yield consider(setting, f"{most:.0f} run at a time", "256, or the completions that a replica gets", _FEW_SEQS)
    else:
        beside = f", {load} completions of a step for a replica" if load else ""
        yield fine(setting, f"{most:.0f}{beside}: 256 and 1024 did alike at 512 streams, 64 lost 36 to 43 %")


@engine_rule(
    id="cuda-graphs",
    asks="Are CUDA graphs on?",
    reads="enforce_eager",
    why="Without graphs every kernel of a decode step is launched by the CPU, which the GPU then waits for.",
    source=LEVERS,
    gain=0.35,
    corrects="“RL needs eager mode, since its batches change size.” It does not: graphs are captured for many "
    "sizes, and a batch takes the next larger one.",
)
def _eager(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, is_eager = engine.at("enforce_eager"), engine.value("enforce_eager")
    if engine.on_cpu or setting is None:
        return
    if is_eager is True:
        message = (
            "CUDA graphs are off. A graph is replayed for the next larger captured size, so batches may be of any size"
        )
        yield hurts(setting, message, "false", _GRAPHS, corrects=True)
    else:
        yield fine(setting, "CUDA graphs are on")


@engine_rule(
    id="capture-sizes",
    asks="Do CUDA graphs cover the batches that run?",
    reads="cudagraph_capture_sizes, max_cudagraph_capture_size against max_num_seqs",
    why="A batch larger than the largest captured size runs without a graph. vLLM's own choice goes to twice "
    "max_num_seqs, at most 512.",
    source=f"{LEVERS}; {VLLM_CODE}, config/vllm.py",
    gain=0.3,
)
def _capture_sizes(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, sizes = engine.at("cudagraph_capture_sizes"), engine.value("cudagraph_capture_sizes")
    if not engine.reaches("cudagraph_capture_sizes") or engine.on_cpu:
        return
    largest = engine.number("max_cudagraph_capture_size")
    if isinstance(sizes, list) and sizes and all(isinstance(size, int) for size in sizes):
        largest = max(sizes)
    elif largest is not None:
        setting = engine.at("max_cudagraph_capture_size")
    if largest is None:
        return
    if engine.value("enforce_eager") is True:
        yield consider(setting, "without effect: enforce_eager turns graphs off", "enforce_eager: false")
        return
    widest = engine.number("max_num_seqs") or 256
    load = subject.samples_per_replica(engine)
    widest = min(widest, load) if load else widest
    if largest < 64 and largest < widest:
        message = (
            f"batches of more than {largest:.0f} run without a graph, and up to {widest:.0f} sequences run at a time"
        )
        yield hurts(setting, message, f"up to {min(widest, 512):.0f}, or leave it out", _GRAPHS)
    elif largest < widest:
        message = f"batches above {largest:.0f} of {widest:.0f} run without a graph"
        yield consider(
            setting, message, f"up to {min(widest, 512):.0f}, or leave it out", "1.01 to 1.13 at 512 streams"
        )
    else:
        yield fine(setting, f"graphs up to {largest:.0f}, sequences up to {widest:.0f}")


@engine_rule(
    id="chunked-prefill",
    asks="Is chunked prefill on?",
    reads="enable_chunked_prefill, extra.chunked_prefill_size",
    why="Prompts are read in pieces beside the decodes of others, so that decoding goes on.",
    source=f"{VERL_GUIDE}; {VERL_CODE}, vllm_async_server.py raises max_num_batched_tokens where it is off",
    gain=0.05,
)
def _chunked_prefill(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, chunked = engine.at("enable_chunked_prefill"), engine.value("enable_chunked_prefill")
    if not engine.reaches("enable_chunked_prefill") or engine.on_cpu:
        return
    if chunked is False or engine.number("chunked_prefill_size") == -1:
        setting = setting if chunked is False else engine.at("chunked_prefill_size")
        message = "a long prompt stops all decoding until it is read, and max_num_batched_tokens must hold it whole"
        yield consider(setting, message, "on, which is the engines' default")
    elif setting is not None:
        yield fine(setting, "on")


@engine_rule(
    id="prefix-caching",
    asks="Is the prompt of a group read once?",
    reads="enable_prefix_caching, extra.disable_radix_cache",
    why="All samples of a group, and all turns of a session, begin with the same tokens.",
    source=TRL_GUIDE,
    gain=0.2,
)
def _prefix_caching(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, caching = engine.at("enable_prefix_caching"), engine.value("enable_prefix_caching")
    if not engine.reaches("enable_prefix_caching"):
        return
    off = caching is False or engine.value("disable_radix_cache") is True
    setting = engine.at("disable_radix_cache") if engine.value("disable_radix_cache") is True else setting
    group = subject.workload.group_size or 1
    if off and group > 1:
        message = f"the prompt of a group is read {group} times instead of once"
        yield hurts(setting, message, "on", f"{1 - 1 / group:.0%} of the prompt tokens need not be read")
    elif off:
        yield consider(setting, "equal prefixes, such as a system prompt or earlier turns, are read again", "on")
    elif setting is not None:
        yield fine(setting, "on; the gateway salts prefixes with the weight version, so that no old KV is used")


@engine_rule(
    id="log-stats",
    asks="Can the engine be watched?",
    reads="disable_log_stats",
    why="Tuning begins with what the engine says of itself: KV cache in use, preemptions, waiting requests.",
    source=VERL_GUIDE,
    is_general=True,
)
def _log_stats(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting = engine.at("disable_log_stats")
    if not engine.reaches("disable_log_stats") or setting is None:
        return
    if setting.value is True:
        message = "the engine reports no KV cache use, preemptions and queues, so that nothing can be tuned"
        yield consider(setting, message, "false while tuning")
    else:
        yield fine(setting, "statistics are on")


@engine_rule(
    id="logprobs-mode",
    asks="Are log-probabilities those that were sampled from?",
    reads="logprobs_mode",
    why="Trainers divide their own log-probabilities by these.",
    source=f"{TRL_CODE} warns of any other mode",
    gain=0.5,
)
def _logprobs_mode(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting = engine.at("logprobs_mode")
    if not engine.is_vllm or setting is None or setting.value is None:
        return
    if setting.value != "processed_logprobs":
        message = f"{setting.value} are not those of the distribution that was sampled from, once temperature is not 1"
        yield hurts(setting, message, "processed_logprobs", "importance ratios that are 1 where the weights are equal")
    else:
        yield fine(setting, "log-probabilities are of what was sampled from")


@engine_rule(
    id="seeds",
    asks="Do replicas draw different samples?",
    reads="seed, extra.seed",
    why="Engines with one seed give one prompt the same completions on each replica, and a group without variance "
    "teaches nothing.",
    source=f"{VLLM_CODE}: its default seed is 0; {VERL_CODE} adds the replica's rank",
    gain=0.5,
)
def _seed(engine: EngineView, subject: Subject) -> Iterator[Found]:
    in_extra = next((engine.at(name) for name in ("extra.seed", "extra.random_seed") if engine.at(name)), None)
    setting = in_extra or engine.at("seed")
    if setting is None:
        return
    if in_extra:
        yield hurts(setting, "every replica draws the same numbers: equal prompts, equal samples", "engine.seed")
    else:
        yield fine(setting, "each replica adds its number, so that equal prompts do not give equal samples on two")


@engine_rule(
    id="stream-interval",
    asks="Are streamed chunks coarse enough?",
    reads="stream_interval",
    why="Each chunk is put together, sent and read by Python.",
    source=LEVERS,
    gain=0.4,
)
def _stream_interval(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, interval = engine.at("stream_interval"), engine.number("stream_interval")
    if interval is None:
        return
    effect = "tokens/s against 32, at 512 streams: 1 gives 0.54, 8 gives 0.93, 128 gives 1.06; at 64 streams all alike"
    if interval < 8:
        yield hurts(setting, f"a chunk every {interval:.0f} tokens is work of the one API process", "32", effect)
    elif interval < 32:
        yield consider(setting, f"a chunk every {interval:.0f} tokens", "32", effect)
    else:
        yield fine(setting, f"a chunk every {interval:.0f} tokens")


@engine_rule(
    id="api-servers",
    asks="Can the API process keep up with the GPU?",
    reads="api_server_count",
    why="One process parses and streams for the whole engine, however many GPUs it has.",
    source=LEVERS,
    gain=0.2,
)
def _api_servers(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, weights = engine.at("api_server_count"), engine.weight_gib
    if not engine.is_vllm or engine.owner != "gateway" or engine.on_cpu:
        return
    count = engine.number("api_server_count") or 1
    tp = engine.number("tensor_parallel_size") or 1
    one = "one API process parses and streams about 20,000 tok/s at most"
    if count > 1:
        yield fine(setting, f"{count:.0f} API processes")
    elif weights is not None and weights < 3:
        message = f"{one}, and a model of {weights:.1f} GiB can make more"
        effect = "0.5B model, 2 processes: 1.57 times the tokens/s at 512 streams, 4: 1.74; at 64 streams 0.94 and 1.10"
        yield consider(setting, message, "api_server_count: 4", effect)
    elif tp > 1:
        message = f"{one}, for the work of {tp:.0f} GPUs"
        yield consider(setting, message, f"api_server_count: {tp:.0f}", "one TP2 of a 7B made 17,900 tok/s and no more")
    else:
        effect = (
            "7B on one H200, 256 streams with log-probabilities: 13,000 tok/s with 1, 19,000 with 4; a weight update "
            "stood still for 0.66 s and 0.22 s, and its canary waited 4.5 s and 0.12 s"
        )
        yield consider(setting, f"{one}, and answers of the engine wait behind them", "api_server_count: 4", effect)


@engine_rule(
    id="data-parallel",
    asks="Are copies replicas of their own?",
    reads="data_parallel_size",
    why="Replicas restart one by one, are balanced by the tokens they hold, and fail alone.",
    source=f"{TRL_GUIDE}: data parallel servers of dense models are not advised since vLLM 0.14",
)
def _copies(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, copies = engine.at("data_parallel_size"), engine.number("data_parallel_size")
    if copies and copies > 1 and engine.has_expert_parallelism:
        yield fine(setting, f"{copies:.0f} ranks with attention of their own share the experts")
    elif copies and copies > 1:
        message = f"{copies:.0f} copies in one server start, fail and take weights together"
        yield consider(setting, message, f"data_parallel_size: 1 and {copies:.0f} times the replicas")


@engine_rule(
    id="dtype",
    asks="Do weights take two bytes?",
    reads="dtype",
    why="Decoding is bound by reading weights.",
    source=VERL_CODE,
    gain=0.4,
)
def _dtype(engine: EngineView, subject: Subject) -> Iterator[Found]:
    setting, dtype = engine.at("dtype"), engine.value("dtype")
    if setting is None or engine.on_cpu:
        return
    if dtype in ("float32", "float"):
        yield hurts(setting, "four bytes a weight: twice the memory to hold and to read for each token", "bfloat16")
    elif dtype in ("float16", "half"):
        yield consider(setting, "trainers hold bfloat16: rounding differs, and log-probabilities with it", "bfloat16")
    else:
        yield fine(setting, f"{dtype}; it should be the trainer's")


@engine_group_rule(
    id="external-engine",
    asks="Are all engines' settings here?",
    reads="kind: external",
    why="A server that somebody else runs was started with arguments of its own.",
    source="engines/clients/external.py",
)
def _unseen(group: EngineConfig, subject: Subject) -> Iterator[Found]:
    if group.kind is EngineKind.EXTERNAL:
        message = f"the settings of {group.url} are its own, in none of these files"
        yield consider(None, message, "examine it live: doctor --url URL_OF_THE_GATEWAY")


@engine_rule(
    id="unreached-lever",
    asks="Does the engine hear of every lever that is given?",
    reads="actor_rollout_ref.rollout.* with name=sglang",
    why="A lever that is dropped on the way looks set and changes nothing.",
    source=f"{VERL_CODE}, workers/rollout/sglang_rollout/async_sglang_server.py",
)
def _unreached(engine: EngineView, subject: Subject) -> Iterator[Found]:
    """Levers with a rule of their own are left to it."""
    for lever, setting in engine.settings.items():
        if (
            not engine.reaches(lever)
            and setting.origin != "default"
            and lever not in ("max_num_batched_tokens", "seed")
        ):
            if lever == "max_model_len":
                continue  # verl itself bounds max_tokens by it
            instead = f"engine_kwargs.sglang.{_SGLANG_NAMES[lever]}" if lever in _SGLANG_NAMES else "leave it out"
            yield consider(setting, "verl does not pass it to SGLang: it changes nothing", instead)


_SGLANG_NAMES = {
    "cudagraph_capture_sizes": "cuda_graph_bs_decode",
    "enable_prefix_caching": "disable_radix_cache",
    "enable_chunked_prefill": "chunked_prefill_size",
}
