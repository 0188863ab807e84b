"""The meaning of each known line of an engine's log. The lines are the engines' own, seen in runs on CPU or
copied from the source of the version named; long lists in them are cut. `test_real_failures.py` has some of a running
engine."""

import pytest

from engines.process.diagnosis import causes, diagnose, last_error
from engines.types import EngineKind

VLLM, SGLANG = EngineKind.VLLM, EngineKind.SGLANG

PYDANTIC = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, "
FRAME = " [type=value_error, input_value=ArgsKwargs((), {'model': ...nderer_num_workers': 1}), input_type=ArgsKwargs]"
CORE = "(EngineCore pid=27127) ERROR 11-21 15:00:26 [core.py:1510] "
SCHEDULER = "[2026-11-21 15:03:37] "
SGLANG_ENDS = (
    f"{SCHEDULER}Received sigquit from a child process. It usually means the child failed.\n"
    f"{SCHEDULER}kill_process_tree called: parent_pid=7, include_parent=True, pid=7\n"
)
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB. GPU 0 has a total capacity of 139.80 GiB "
    "of which 608.00 MiB is free."
)


def traceback(prefix: str, *functions: str, error: str) -> str:
    """As Python prints it, each line with the engine's prefix."""
    frames = [f'{prefix}  File "worker.py", line 7, in {function}' for function in functions]
    return "\n".join([f"{prefix}Traceback (most recent call last):", *frames, f"{prefix}{error}"])


# fmt: off
KNOWN = [
    (VLLM, "missing config.json, vLLM 0.32", "has no config.json", "correct engine.model",
     f"{PYDANTIC}Invalid repository ID or local directory specified: '/models/x'.\nPlease verify the following"),
    (SGLANG, "missing config.json, SGLang 0.5.23", "has no config.json", "correct engine.model",
     "ValueError: Unrecognized model in /models/x. Should have a `model_type` key in its config.json."),
    (VLLM, "offline, vLLM 0.32", "not in the Hugging Face cache", "download it there first",
     "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder for the "
     "specified revision on the local disk and outgoing traffic has been disabled."),
    (VLLM, "unknown architecture, vLLM 0.26 and 0.32",
     "does not know the architecture ['FooForCausalLM']", "engine.kind",
     f"{PYDANTIC}Model architectures ['FooForCausalLM'] are not supported for now. Supported"),
    (SGLANG, "unknown architecture, SGLang 0.5.23", "does not know the architecture FooForCausalLM", "engine.kind",
     f"ValueError: Cannot find model module. 'FooForCausalLM' is not a registered model in the Transformers "
     f"library\n{SGLANG_ENDS}"),
    (VLLM, "unknown model type, vLLM 0.32", "does not know the model type foo", "install a transformers release",
     f"{PYDANTIC}The checkpoint you are trying to load has model type `foo` but Transformers does not recognize "
     "this architecture."),
    (VLLM, "half a safetensors file, vLLM 0.32, SGLang 0.5.23", "cut off or damaged", "fetch the checkpoint",
     "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata"),
    (SGLANG, "tensor parallel size, models/qwen3.py of SGLang 0.5.17 and 0.5.23",
     "the model's attention heads cannot be split evenly", "engine.tensor_parallel_size",
     traceback("", "load_model", "__init__", error="    assert self.total_num_heads % attn_tp_size == 0")
     + f"\nAssertionError\n{SGLANG_ENDS}"),
    (SGLANG, "SGLang's name of a lever is ours in the remedy",
     "the value of --context-length", "correct engine.max_model_len",
     "sglang serve: error: argument --context-length: invalid int value: 'x'"),
    (SGLANG, "unknown argument, SGLang 0.5.23", "has no argument --nonsense 1", "engine.extra",
     "sglang serve: error: unrecognized arguments: --nonsense 1"),
    (VLLM, "max_model_len, vLLM 0.26 and 0.32",
     "100000 tokens are more than the model's own limit of 512", "lower engine.max_model_len to 512",
     f"{PYDANTIC}User-specified max_model_len (100000) is greater than the derived max_model_len "
     "(max_position_embeddings=512.0 or model_max_length=None in model's config.json)."),
    (VLLM, "tokens of a step, vLLM 0.32",
     "a step of 4 tokens is too small: it needs 16", "raise engine.max_num_batched_tokens to at least 16",
     f"{PYDANTIC}max_num_batched_tokens (4) must be greater than or equal to max_num_seqs (16).{FRAME}"),
    (VLLM, "no KV cache, vLLM 0.26 and 0.32", "no memory for the KV cache", "engine.gpu_memory_utilization",
     f"{CORE}ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when"),
    (SGLANG, "no KV cache, pool_configurator.py of SGLang 0.5.17 and 0.5.23",
     "no memory for the KV cache", "raise engine.extra.mem_fraction_static",
     "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
     f"mem_fraction_static=0.1\n{SGLANG_ENDS}"),
    (VLLM, "GPU in use, worker/utils.py of vLLM 0.26",
     "another process holds memory of the GPU", "lower engine.gpu_memory_utilization below 0.92",
     f"{CORE}ValueError: Free memory on device cuda:0 (12.3/139.8 GiB) on startup is less than desired GPU "
     "memory utilization (0.92, 128.62 GiB). Decrease GPU memory utilization or reduce GPU memory used by other"),
    (VLLM, "memory in use on CPU, vLLM 0.32",
     "takes a share of the machine's memory, and 0.92 of it is not free", "set engine.kv_cache_memory_bytes",
     f"{CORE}ValueError: Available memory on node 0 (20.39/22.71 GiB) on startup is less than desired CPU "
     "memory utilization (0.92, 20.9 GiB). On the CPU backend, the `--gpu-memory-utilization` flag controls the"),
    (SGLANG, "GPU in use, distributed/bootstrap.py of SGLang 0.5.17 and 0.5.23", "one of the GPUs", "nvidia-smi",
     f"RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied.\n{SGLANG_ENDS}"),
    (VLLM, "out of memory while loading, vLLM 0.26", "the weights do not fit", "engine.tensor_parallel_size",
     traceback(CORE, "_init_executor", "load_model", "create_weights", error=OUT_OF_MEMORY)),
    (VLLM, "out of memory while profiling, vLLM 0.26", "in the profiling step", "lower engine.max_num_batched_tokens",
     traceback(CORE, "determine_available_memory", "profile_run", "_dummy_run", error=OUT_OF_MEMORY)),
    (VLLM, "out of memory in the sampler's trial, gpu_model_runner.py of vLLM 0.26",
     "in the profiling step", "lower engine.max_num_seqs",
     f"{CORE}RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please "
     "try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine."),
    (VLLM, "out of memory for the KV cache, vLLM 0.26",
     "while the KV cache was made", "lower engine.kv_cache_memory_bytes",
     traceback(CORE, "initialize_from_config", "initialize_kv_cache", "zeros", error=OUT_OF_MEMORY)),
    (VLLM, "out of memory while capturing, vLLM 0.26",
     "while CUDA graphs were captured", "engine.max_cudagraph_capture_size",
     traceback(CORE, "compile_or_warm_up_model", "capture_model", "_dummy_run", error=OUT_OF_MEMORY)),
    (SGLANG, "out of memory while capturing, decode_cuda_graph_runner.py of SGLang 0.5.17 and 0.5.23",
     "while CUDA graphs were captured", "lower engine.extra.mem_fraction_static",
     f"Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 1.02 GiB.\n{SGLANG_ENDS}"),
    (SGLANG, "out of memory for the KV cache, SGLang 0.5.17",
     "while the KV cache was made", "lower engine.extra.mem_fraction_static",
     traceback(SCHEDULER, "alloc_memory_pool", "_create_buffers", error=OUT_OF_MEMORY) + f"\n{SGLANG_ENDS}"),
    (SGLANG, "out of memory somewhere, SGLang", "the GPU ran out of memory", "lower engine.extra.mem_fraction_static",
     OUT_OF_MEMORY),
    (VLLM, "no GPU, config/device.py of vLLM 0.26", "sees no GPU", "nvidia-smi",
     "RuntimeError: Failed to infer device type, please set the environment variable "
     "`VLLM_LOGGING_LEVEL=DEBUG` to turn on verbose logging to help debug the issue."),
    (SGLANG, "no GPU, utils/common.py of SGLang 0.5.17 and 0.5.23", "sees no GPU", "engine.device to cpu",
     "RuntimeError: No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) or platform plugin is available."),
    (VLLM, "no driver, torch", "no NVIDIA driver", "engine.device to cpu",
     "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"),
    (VLLM, "too few GPUs, config/parallel.py of vLLM 0.26 and 0.32",
     "a replica of 4 workers sees 2 GPUs", "lower engine.tensor_parallel_size",
     "  Value error, World size (4) is larger than the number of available GPUs (2) in this node. If this is"),
    (VLLM, "tensor parallelism without NVLink multicast, vLLM 0.26",
     "no NVLink multicast", "set engine.extra.compilation_config.pass_config.fuse_allreduce_rms to false",
     f"{CORE}RuntimeError: Worker failed with error 'CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling "
     "`cublasCreate(handle)`', please check the stack trace above for the root cause"),
    (VLLM, "another quantization, vLLM 0.26, SGLang 0.5.17 and 0.5.23",
     "quantised with gptq, not with awq", "set engine.quantization to gptq",
     f"{PYDANTIC}Quantization method specified in the model config (gptq) does not match the quantization "
     "method specified in the `quantization` argument (awq)."),
    (VLLM, "a plain checkpoint, vLLM 0.32 and SGLang 0.5.23",
     "the checkpoint is not quantised with awq", "leave engine.quantization out",
     f"{PYDANTIC}Cannot find the config file for awq{FRAME}"),
    (VLLM, "unknown quantization, vLLM 0.32", "does not know the quantization foo", "correct engine.quantization",
     f"{PYDANTIC}Unknown quantization method: foo. Must be one of ['awq', 'auto_awq', 'fp8']"),
    (VLLM, "port, vLLM 0.32", "took the engine's port", "next start takes another port",
     "OSError: [Errno 98] Address already in use"),
    (VLLM, "missing package, Python", "the Python package flashinfer is missing", "install it",
     "ModuleNotFoundError: No module named 'flashinfer'"),
    (VLLM, "torchvision for CUDA beside PyTorch for CPU, vLLM 0.32",
     "torchcodec is built for another PyTorch", "pip uninstall torchvision",
     "RuntimeError: operator torchvision::nms does not exist"),
    (VLLM, "torchcodec for CUDA beside PyTorch for CPU, vLLM 0.32",
     "torchcodec is built for another PyTorch", "pip uninstall torchvision",
     "OSError: Could not load this library: /venv/lib/python3.11/site-packages/torchcodec/libtorchcodec_image.so"),
    (SGLANG, "a worker killed, engine.py of SGLang 0.5.17 and 0.5.23",
     "killed with SIGKILL", "give the host more memory",
     f"{SCHEDULER}RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 "
     "(SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check."),
    (VLLM, "a worker killed, multiproc_executor.py of vLLM 0.26 and 0.32",
     "killed with SIGKILL", "give the host more memory",
     f"{CORE}Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor."),
]
# fmt: on


@pytest.mark.parametrize(("kind", "name", "meaning", "remedy", "log"), KNOWN, ids=[row[1] for row in KNOWN])
def test_a_known_line_gives_what_happened_and_the_lever_to_change(
    kind: EngineKind, name: str, meaning: str, remedy: str, log: str
) -> None:
    found = diagnose(kind, f"our own first line\n{log}\n", 1)
    assert found is not None
    before, _, after = found[0].partition('; the engine says: "')
    words, _, advice = after.rpartition('"; ')
    assert meaning in before
    assert remedy in advice
    assert words
    assert words in log.replace("\n", " "), "the engine's own words"
    assert "\n" not in found[0]


def test_a_kill_without_a_word_is_the_oom_killers_unless_sglang_ended_itself() -> None:
    found = diagnose(VLLM, "Loading weights\n", 137)
    assert found is not None
    assert "OOM killer" in found[0]
    assert diagnose(SGLANG, SGLANG_ENDS, 137) is None


def test_modules_that_sglang_can_do_without_are_no_cause() -> None:
    log = f"{SCHEDULER}Ignore import error when loading sglang.srt.models.inkling: No module named 'cutlass'"
    assert diagnose(SGLANG, log, 1) is None


def test_modules_that_vllm_can_do_without_are_no_cause() -> None:
    lines = [
        f"{CORE}Module humming was found but failed to import",
        *traceback(CORE, "_has_module", "<module>", error="ModuleNotFoundError: No module named 'cuda'").split("\n"),
    ]
    log = "\r\n".join([*lines[:-1], f"{CORE}    raise ImportError(name)", lines[-1]]) + "\nLoading weights\n"
    assert diagnose(VLLM, log, 1) is None
    assert last_error(log) == ""


def test_only_what_may_pass_is_worth_a_second_start() -> None:
    passing = [cause.meaning for cause in causes() if cause.may_pass]
    assert "another process took the engine's port" in passing
    assert "another process holds memory of the GPU" in passing
    assert not any("attention heads" in meaning for meaning in passing)


def test_an_unknown_failure_is_told_by_the_last_error_that_is_not_an_echo() -> None:
    log = (
        "ValueError: first\n"
        f"{CORE}KeyError: 'model.layers.0'\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
        "/lib/resource_tracker.py:254: UserWarning: There appear to be 1 leaked semaphore objects\n"
    )
    assert diagnose(VLLM, log, 1) is None
    assert last_error(log) == "KeyError: 'model.layers.0'"
    assert last_error("all is well\n") == ""
