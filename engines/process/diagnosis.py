"""Causes of failed engine starts: known log lines with their meaning and the lever to change.

The lines are those of vLLM 0.28 to 0.32 and SGLang 0.5.23, as in `tests/engines/process/test_diagnosis.py`.
"""

import re
from dataclasses import dataclass

from engines.levers import LEVERS
from engines.process.engine_log import lines_of, shortened
from engines.types import EngineKind

_WORDS_LENGTH = 300
_SIGKILL_EXIT = 137
# Longest traceback between a function that shows the stage of a start and the error.
_TRACEBACK_LINES = 160

_OUT_OF_MEMORY = r"CUDA out of memory|CUDA error: out of memory|out of memory occurred|cudaErrorMemoryAllocation"
_CAPTURES = (
    r"in (?:capture_model|_capture_cudagraphs|profile_cudagraph_memory|capture_decode_graph|init_\w*cuda_graphs?)$"
)
_MAKES_KV = r"in (?:initialize_kv_cache\w*|initialize_from_config|alloc_memory_pool|init_memory_pool)$"
_PROFILES = r"in (?:profile_run|determine_available_memory)$"
_LOADS = r"in (?:load_model|load_weights)$"


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause and its log line, the pattern `says`. `meaning` and `remedy` may use its groups, `{engine}` for the
    section of the configuration, `{memory}` for the engine's memory lever and `{kv_memory}` for that of its KV cache.

    `inside` matches a function in the traceback above, for messages with several causes. `may_pass` marks transient
    causes.
    """

    says: str
    meaning: str
    remedy: str
    inside: str = ""
    may_pass: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A failure's meaning, the engine's words ("" if none) and the remedy ("" if unknown)."""

    meaning: str
    words: str
    remedy: str
    may_pass: bool

    def __str__(self) -> str:
        """One line."""
        words = f'; the engine says: "{self.words}"' if self.words else ""
        return f"{self.meaning}{words}" + (f"; {self.remedy}" if self.remedy else "")


# The first match counts, so causes in the configuration come first.
CAUSES = (
    # Command line.
    Cause(
        r"error: unrecognized arguments: (?P<arguments>.+)",
        "the engine has no argument {arguments}",
        "remove it from {engine}.extra, or correct its name",
    ),
    Cause(
        r"error: argument (?P<flag>--[\w-]+)[^:]*: ",
        "the engine does not accept the value of {flag}",
        "correct {engine}.{key}",
    ),
    # Model folder.
    Cause(
        r"Repo id must be in the form .*?: '(?P<model>[^']*)'",
        "there is no folder {model} on the engine's node",
        "correct {engine}.model: the path of a checkpoint folder on that node, or a Hugging Face model id",
    ),
    Cause(
        r"Invalid repository ID or local directory specified: |Unrecognized model in \S+ Should have a `model_type` key"
        r"|does not appear to have a file named config\.json",
        "the model has no config.json with a model_type",
        "correct {engine}.model: a checkpoint folder holds config.json, the tokenizer's files and *.safetensors",
    ),
    Cause(
        r"Cannot find an appropriate cached snapshot folder|cannot find the requested files in the disk cache",
        "the model is not in the Hugging Face cache of the engine's node, and the hub is offline or not allowed",
        "download it there first, or set {engine}.model to a folder, or {engine}.env.HF_HUB_OFFLINE to '0'",
    ),
    Cause(
        r"[Cc]ouldn't connect to 'https://huggingface\.co'|MaxRetryError.*huggingface\.co",
        "the engine's node cannot reach the Hugging Face hub",
        "download the model there first and set {engine}.model to its folder",
        may_pass=True,
    ),
    Cause(
        r"is not a local folder and is not a valid model identifier|Repository Not Found for url|GatedRepoError",
        "the Hugging Face hub has no such model for this node",
        "correct {engine}.model, or give a token that may read it: HF_TOKEN in the node's environment, or "
        "its file in {engine}.env.HF_TOKEN_PATH",
    ),
    Cause(
        r"(?:Model architectures |Cannot find model module\. ')(?P<architecture>\[[^\]]*\]|\w+)'? (?:are not supported "
        r"for now|is not a registered model)",
        "the engine does not know the architecture {architecture}",
        "correct `architectures` in the model's config.json, or use an engine release or {engine}.kind that knows it",
    ),
    Cause(
        r"^\s*(?:\w+Error: |Value error, )?The checkpoint you are trying to load has model type `(?P<type>[^`]*)`",
        "the installed transformers does not know the model type {type}",
        "correct `model_type` in the model's config.json, or install a transformers release that knows it",
    ),
    Cause(
        r"Cannot find any model weights with `(?P<model>[^`]*)`",
        "{model} has no weights",
        "correct {engine}.model, or set {engine}.load_format to dummy for random weights",
    ),
    Cause(
        r"SafetensorError: .*|Error while deserializing header",
        "a weight file of the model is cut off or damaged",
        "fetch the checkpoint of {engine}.model again and compare the sizes of its files",
    ),
    # Levers that contradict the model or each other.
    Cause(
        r"Total number of attention heads \(\d+\) must be divisible by tensor parallel size"
        r"|assert (?:self\.)?(?:total_)?num_(?:kv_)?heads % |assert \w*tp_size % self\.total_num_kv_heads",
        "the model's attention heads cannot be split evenly over the GPUs of a replica",
        "set {engine}.tensor_parallel_size to a divisor of the model's num_attention_heads",
    ),
    Cause(
        r"(?:User-specified max_model_len|ValueError: Warning: .*context_length) \((?P<asked>\d+)\) is greater "
        r"than the derived \w+ \((?:\w+=)?(?P<limit>\d+)",
        "{asked} tokens are more than the model's own limit of {limit}",
        "lower {engine}.max_model_len to {limit} or leave it out",
    ),
    Cause(
        r"max_num_batched_tokens \((?P<tokens>\d+)\) (?:must be greater than or equal to max_num_seqs|is smaller than "
        r"max_model_len) \((?P<least>\d+)\)",
        "a step of {tokens} tokens is too small: it needs {least}",
        "raise {engine}.max_num_batched_tokens to at least {least}, or lower what the engine compares it with",
    ),
    Cause(
        r"Quantization method specified in the model config \((?P<has>[\w-]+)\) does not match the quantization "
        r"method specified in the `quantization` argument \((?P<asked>[\w-]+)\)",
        "the checkpoint is quantised with {has}, not with {asked}",
        "set {engine}.quantization to {has} or leave it out",
    ),
    Cause(
        r"(?:Unknown|Invalid) quantization method(?: on CPU)?: (?P<asked>[\w-]+)",
        "the engine does not know the quantization {asked}",
        "correct {engine}.quantization, or leave it out to take what the checkpoint says",
    ),
    Cause(
        r"Cannot find the config file for (?P<asked>[\w-]+)",
        "the checkpoint is not quantised with {asked}",
        "leave {engine}.quantization out, or set {engine}.model to a checkpoint that is",
    ),
    Cause(
        r"Unknown dtype: (?P<dtype>\S+)",
        "the engine does not know the dtype {dtype}",
        "set {engine}.dtype to auto, bfloat16, float16 or float32",
    ),
    # Memory.
    Cause(
        r"max seq len \((?P<length>\d+)\).*larger than the available KV cache memory.*"
        r"estimated maximum model length is (?P<fits>\d+)",
        "the KV cache is too small for one sequence of {length} tokens; {fits} fit",
        "lower {engine}.max_model_len to {fits}, or raise {kv_memory}",
    ),
    Cause(
        r"max seq len \((?P<length>\d+)\).*larger than the available KV cache memory",
        "the KV cache is too small for one sequence of {length} tokens",
        "lower {engine}.max_model_len, or raise {kv_memory}",
    ),
    Cause(
        r"No available memory for the cache blocks|Not enough memory\. Please try to increase --mem-fraction-static",
        "weights and activations leave no memory for the KV cache",
        "raise {kv_memory}, or spread the weights: {engine}.tensor_parallel_size",
    ),
    Cause(
        r"Free memory on device.*is less than desired GPU memory utilization \((?P<share>[\d.]+)",
        "another process holds memory of the GPU",
        "find it with nvidia-smi and end it, or lower {engine}.gpu_memory_utilization below {share}",
        may_pass=True,
    ),
    Cause(
        r"Available memory on node.*is less than desired CPU memory utilization \((?P<share>[\d.]+)",
        "an engine on CPU takes a share of the machine's memory, and {share} of it is not free",
        "set {engine}.kv_cache_memory_bytes, such as 1073741824, or lower {engine}.gpu_memory_utilization",
    ),
    Cause(
        r"The memory capacity is unbalanced",
        "another process holds memory of one of the GPUs",
        "find it with nvidia-smi and end it",
        may_pass=True,
    ),
    Cause(
        r"Error in memory profiling\. Initial free memory",
        "another process gave GPU memory back while the engine measured it",
        "start again, or set {engine}.kv_cache_memory_bytes, which needs no measuring",
        may_pass=True,
    ),
    Cause(
        _OUT_OF_MEMORY,
        "the GPU ran out of memory while CUDA graphs were captured",
        "lower {memory} or {engine}.max_cudagraph_capture_size",
        inside=_CAPTURES,
    ),
    Cause(
        r"Capture (?:cuda|CUDA) graph failed:.*out of memory",
        "the GPU ran out of memory while CUDA graphs were captured",
        "lower {engine}.extra.mem_fraction_static or {engine}.max_cudagraph_capture_size",
    ),
    Cause(
        r"Capture (?:cuda|CUDA) graph failed",
        "a CUDA graph could not be captured",
        "lower {engine}.max_cudagraph_capture_size, or set {engine}.enforce_eager to true",
    ),
    Cause(
        _OUT_OF_MEMORY,
        "the GPU ran out of memory while the KV cache was made",
        "lower {kv_memory}",
        inside=_MAKES_KV,
    ),
    Cause(
        _OUT_OF_MEMORY,
        "the GPU ran out of memory in the profiling step",
        "lower {engine}.max_num_batched_tokens or {engine}.max_num_seqs",
        inside=rf"{_PROFILES}|in _dummy_sampler_run$",
    ),
    Cause(
        r"CUDA out of memory occurred when warming up",
        "the GPU ran out of memory in the profiling step",
        "lower {engine}.max_num_seqs or {engine}.gpu_memory_utilization",
    ),
    Cause(
        _OUT_OF_MEMORY,
        "the weights do not fit in the GPU's memory",
        "spread them with {engine}.tensor_parallel_size, quantise them with {engine}.quantization, or end other "
        "processes on the GPU (nvidia-smi)",
        inside=_LOADS,
    ),
    Cause(
        _OUT_OF_MEMORY,
        "the GPU ran out of memory",
        "lower {memory}, {engine}.max_num_seqs or {engine}.max_num_batched_tokens",
    ),
    # The host.
    Cause(
        r"CUBLAS_STATUS_INTERNAL_ERROR|CUDA error: an illegal memory access",
        "a GPU kernel read memory that is not there; with tensor parallelism vLLM's fused all-reduce (FlashInfer's "
        "mnnvl) does so on hosts whose GPUs have no NVLink multicast, such as virtual machines",
        "set {engine}.extra.compilation_config.pass_config.fuse_allreduce_rms to false",
    ),
    Cause(
        r"World size \((?P<world>\d+)\) is larger than the number of available GPUs \((?P<gpus>\d+)\)",
        "a replica of {world} workers sees {gpus} GPUs",
        "lower {engine}.tensor_parallel_size, or see that {engine}.env and {engine}.extra do not hide GPUs",
    ),
    Cause(
        r"Found no NVIDIA driver|driver version is insufficient|NVIDIA driver on your system is too old",
        "the node has no NVIDIA driver for the installed engine",
        "install one, or an engine built for the node's driver; without a GPU set {engine}.device to cpu",
    ),
    Cause(
        r"No CUDA GPUs are available|Failed to infer device type|No accelerator \(CUDA|No CUDA devices found"
        r"|no CUDA-capable device|Torch not compiled with CUDA enabled",
        "the engine sees no GPU",
        "start Ray on the node with --num-gpus, and see that nvidia-smi shows them there; without a GPU set "
        "{engine}.device to cpu",
    ),
    Cause(
        r"invalid device ordinal",
        "the engine sees fewer GPUs than it has workers",
        "lower {engine}.tensor_parallel_size, or see that {engine}.env does not set CUDA_VISIBLE_DEVICES",
    ),
    Cause(
        r"no kernel image is available for execution",
        "the installed engine is not built for this GPU",
        "install a build of the engine for this GPU",
    ),
    Cause(
        r"SGLANG_CPU_OMP_THREADS_BIND is not set",
        "on CPU SGLang needs the cores of each worker",
        "set {engine}.env.SGLANG_CPU_OMP_THREADS_BIND, such as 0-3|4-7 for two workers",
    ),
    Cause(
        r"[Aa]ddress already in use|address already in use",
        "another process took the engine's port",
        "no change is needed: the next start takes another port",
        may_pass=True,
    ),
    Cause(
        r"No space left on device",
        "a disk or /dev/shm of the engine's node is full",
        "make room (in a container: a larger --shm-size)",
    ),
    Cause(
        r"^(?:ModuleNotFoundError|ImportError): No module named '(?P<module>[^']+)'",
        "the Python package {module} is missing where the engine runs",
        "install it in the environment that Ray was started from, on every node",
    ),
    Cause(
        r"NCCL error|ncclSystemError|ncclUnhandledCudaError|ncclInternalError",
        "NCCL could not connect the GPUs of the replica",
        "set {engine}.env.NCCL_DEBUG to INFO and read the log; in a container give it a larger --shm-size",
    ),
    Cause(
        r"died (?:during initialization|unexpectedly) \(exit code: -9\)|Failed core proc\(s\): \{[^}]*: -9",
        "a process of the engine was killed with SIGKILL, as the kernel does when the host runs out of memory",
        "see `dmesg -T | grep -i oom`; give the host more memory, start fewer replicas on it, or lower "
        "{engine}.tensor_parallel_size",
    ),
)

_KILLED = Diagnosis(
    "the engine was killed with SIGKILL (exit code 137), as the OOM killer does when the host runs out of memory",
    "",
    "see `dmesg -T | grep -i oom`; give the host more memory or start fewer replicas on it",
    may_pass=False,
)

_ERROR = re.compile(r"^\s*(?:[\w.]*(?:Error|Exception)|Value error|[\w ./-]+: error)\b.{0,3}[:,] \S")
# Errors about another process, which has logged its own.
_ECHO = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|Initialization failed\. Please see"
    r"|scheduler died during|validation errors? for|CancelledError|BrokenPipeError|EngineDeadError"
)


def diagnose(kind: EngineKind, log: str, exit_code: int | None, section: str = "engine") -> Diagnosis | None:
    """Return the diagnosis of a failed engine's log, None without a known line.

    `exit_code` is None if the engine still runs; `section` is the configuration key of its group.
    """
    lines = lines_of(log)
    for cause in CAUSES:
        for index, line in enumerate(lines):
            if (found := re.search(cause.says, line)) and _is_inside(cause, lines, index):
                return _found(cause, kind, found, line, section)
    # SGLang ends itself with SIGKILL when a worker fails, and logs it.
    if exit_code == _SIGKILL_EXIT and not any("kill_process_tree called" in line for line in lines):
        return _KILLED
    return None


def last_error(log: str) -> str:
    """Return the engine's last error line, preferably its own and not an echo; "" without one."""
    errors = [line for line in lines_of(log) if _ERROR.match(line)]
    own = [line for line in errors if not _ECHO.search(line)] or errors
    return _words(own[-1]) if own else ""


def _is_inside(cause: Cause, lines: list[str], index: int) -> bool:
    above = lines[max(0, index - _TRACEBACK_LINES) : index]
    return not cause.inside or any(re.search(cause.inside, line) for line in above)


def _found(cause: Cause, kind: EngineKind, found: "re.Match[str]", line: str, section: str) -> Diagnosis:
    memory = kv_memory = f"{section}.extra.mem_fraction_static"
    if kind is not EngineKind.SGLANG:
        memory = f"{section}.gpu_memory_utilization"
        kv_memory = f"{section}.kv_cache_memory_bytes where it is given, else {memory}"
    facts = {**found.groupdict(), "engine": section, "memory": memory, "kv_memory": kv_memory}
    if "flag" in facts:
        facts["key"] = _key_of(facts["flag"])
    return Diagnosis(cause.meaning.format(**facts), _words(line), cause.remedy.format(**facts), cause.may_pass)


def _words(line: str) -> str:
    """Return the line shortened, without the frames of pydantic and argparse."""
    frame = r"^Value error, | \[type=value_error, input_value=.*|^[\w ./-]+: error: (?=argument |unrecognized )"
    return shortened(re.sub(frame, "", line.strip()), _WORDS_LENGTH)


def _key_of(flag: str) -> str:
    """Return our key of an engine's argument; an argument without a lever came from `extra`."""
    name = flag.removeprefix("--").replace("-", "_")
    ours = next((lever.name for lever in LEVERS if name in (lever.name, lever.sglang)), None)
    return ours or f"extra.{name}"
