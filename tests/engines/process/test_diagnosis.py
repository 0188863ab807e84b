"""The meaning of each known line of an engine's log. The lines are the engines' own, seen in runs on CPU or
copied from the source of the version named; long lists in them are cut."""

import pytest

from engines.process.diagnosis import CAUSES, diagnose, last_error
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


@pytest.mark.parametrize(
    ("kind", "log", "meaning", "remedy"),
    [
        pytest.param(
            VLLM,
            "OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/nowhere/model'. Use",
            "there is no folder /nowhere/model",
            "correct engine.model",
            id="missing folder, vLLM 0.32 and SGLang 0.5.23",
        ),
        pytest.param(
            VLLM,
            f"{PYDANTIC}Invalid repository ID or local directory specified: '/models/x'.\nPlease verify the following",
            "/models/x has no config.json",
            "correct engine.model",
            id="missing config.json, vLLM 0.32",
        ),
        pytest.param(
            SGLANG,
            "ValueError: Unrecognized model in /models/x. Should have a `model_type` key in its config.json.",
            "/models/x has no config.json",
            "correct engine.model",
            id="missing config.json, SGLang 0.5.23",
        ),
        pytest.param(
            VLLM,
            "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder for the "
            "specified revision on the local disk and outgoing traffic has been disabled.",
            "not in the Hugging Face cache",
            "download it there first",
            id="offline, vLLM 0.32",
        ),
        pytest.param(
            VLLM,
            f"{PYDANTIC}Model architectures ['FooForCausalLM'] are not supported for now. Supported",
            "does not know the architecture ['FooForCausalLM']",
            "engine.kind",
            id="unknown architecture, vLLM 0.26 and 0.32",
        ),
        pytest.param(
            SGLANG,
            f"ValueError: Cannot find model module. 'FooForCausalLM' is not a registered model in the Transformers "
            f"library\n{SGLANG_ENDS}",
            "does not know the architecture FooForCausalLM",
            "engine.kind",
            id="unknown architecture, SGLang 0.5.23",
        ),
        pytest.param(
            VLLM,
            f"{PYDANTIC}The checkpoint you are trying to load has model type `foo` but Transformers does not recognize "
            "this architecture.",
            "does not know the model type foo",
            "install a transformers release",
            id="unknown model type, vLLM 0.32",
        ),
        pytest.param(
            VLLM,
            f"{CORE}RuntimeError: Cannot find any model weights with `/models/x`\n"
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
            "/models/x has no weights",
            "engine.load_format",
            id="missing safetensors, vLLM 0.26, 0.32, SGLang 0.5.17, 0.5.23",
        ),
        pytest.param(
            VLLM,
            "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata",
            "cut off or damaged",
            "fetch the checkpoint",
            id="half a safetensors file, vLLM 0.32, SGLang 0.5.23",
        ),
        pytest.param(
            VLLM,
            f"{PYDANTIC}Total number of attention heads (4) must be divisible by tensor parallel size (3).{FRAME}",
            "4 attention heads cannot be split evenly over 3 GPUs",
            "set engine.tensor_parallel_size to a divisor of 4",
            id="tensor parallel size, vLLM 0.26 and 0.32",
        ),
        pytest.param(
            SGLANG,
            traceback("", "load_model", "__init__", error="    assert self.total_num_heads % attn_tp_size == 0")
            + f"\nAssertionError\n{SGLANG_ENDS}",
            "the model's attention heads cannot be split evenly",
            "engine.tensor_parallel_size",
            id="tensor parallel size, models/qwen3.py of SGLang 0.5.17 and 0.5.23",
        ),
        pytest.param(
            VLLM,
            "entry.py: error: argument --dtype: invalid choice: 'float17' (choose from 'auto', 'bfloat16', 'float')",
            "does not accept the value of --dtype",
            "correct engine.dtype",
            id="dtype, vLLM 0.32",
        ),
        pytest.param(
            SGLANG,
            "sglang serve: error: argument --dtype: invalid choice: 'float17' (choose from 'auto', 'half', 'float16')",
            "does not accept the value of --dtype",
            "correct engine.dtype",
            id="dtype, SGLang 0.5.23",
        ),
        pytest.param(
            SGLANG,
            "sglang serve: error: argument --context-length: invalid int value: 'x'",
            "the value of --context-length",
            "correct engine.max_model_len",
            id="SGLang's name of a lever is ours in the remedy",
        ),
        pytest.param(
            SGLANG,
            "sglang serve: error: unrecognized arguments: --nonsense 1",
            "has no argument --nonsense 1",
            "engine.extra",
            id="unknown argument, SGLang 0.5.23",
        ),
        pytest.param(
            VLLM,
            f"{PYDANTIC}User-specified max_model_len (100000) is greater than the derived max_model_len "
            "(max_position_embeddings=512.0 or model_max_length=None in model's config.json).",
            "100000 tokens are more than the model's own limit of 512",
            "lower engine.max_model_len to 512",
            id="max_model_len, vLLM 0.26 and 0.32",
        ),
        pytest.param(
            SGLANG,
            "ValueError: Warning: User-specified context_length (100000) is greater than the derived context_length "
            "(512). This may lead to incorrect model outputs or CUDA errors.",
            "100000 tokens are more than the model's own limit of 512",
            "lower engine.max_model_len to 512",
            id="max_model_len, SGLang 0.5.17 and 0.5.23",
        ),
        pytest.param(
            VLLM,
            f"{PYDANTIC}max_num_batched_tokens (4) must be greater than or equal to max_num_seqs (16).{FRAME}",
            "a step of 4 tokens cannot hold 16 sequences",
            "raise engine.max_num_batched_tokens to at least 16",
            id="tokens of a step, vLLM 0.32",
        ),
        pytest.param(
            VLLM,
            f"{CORE}ValueError: To serve at least one request with the model's max seq len (512), (0.00 GiB KV cache "
            "is needed, which is larger than the available KV cache memory (0.00 GiB). Based on the available memory, "
            "the estimated maximum model length is 256. Try increasing `gpu_memory_utilization`",
            "too small for one sequence of 512 tokens; 256 fit",
            "lower engine.max_model_len to 256, or raise engine.kv_cache_memory_bytes",
            id="KV cache, vLLM 0.26 and 0.32",
        ),
        pytest.param(
            VLLM,
            f"{CORE}ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when",
            "no memory for the KV cache",
            "engine.gpu_memory_utilization",
            id="no KV cache, vLLM 0.26 and 0.32",
        ),
        pytest.param(
            SGLANG,
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
            f"mem_fraction_static=0.1\n{SGLANG_ENDS}",
            "no memory for the KV cache",
            "raise engine.extra.mem_fraction_static",
            id="no KV cache, pool_configurator.py of SGLang 0.5.17 and 0.5.23",
        ),
        pytest.param(
            VLLM,
            f"{CORE}ValueError: Free memory on device cuda:0 (12.3/139.8 GiB) on startup is less than desired GPU "
            "memory utilization (0.92, 128.62 GiB). Decrease GPU memory utilization or reduce GPU memory used by other",
            "another process holds memory of the GPU",
            "lower engine.gpu_memory_utilization below 0.92",
            id="GPU in use, worker/utils.py of vLLM 0.26",
        ),
        pytest.param(
            VLLM,
            f"{CORE}ValueError: Available memory on node 0 (20.39/22.71 GiB) on startup is less than desired CPU "
            "memory utilization (0.92, 20.9 GiB). On the CPU backend, the `--gpu-memory-utilization` flag controls the",
            "takes a share of the machine's memory, and 0.92 of it is not free",
            "set engine.kv_cache_memory_bytes",
            id="memory in use on CPU, vLLM 0.32",
        ),
        pytest.param(
            SGLANG,
            f"RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied.\n{SGLANG_ENDS}",
            "one of the GPUs",
            "nvidia-smi",
            id="GPU in use, distributed/bootstrap.py of SGLang 0.5.17 and 0.5.23",
        ),
        pytest.param(
            VLLM,
            traceback(CORE, "_init_executor", "load_model", "create_weights", error=OUT_OF_MEMORY),
            "the weights do not fit",
            "engine.tensor_parallel_size",
            id="out of memory while loading, vLLM 0.26",
        ),
        pytest.param(
            VLLM,
            traceback(CORE, "determine_available_memory", "profile_run", "_dummy_run", error=OUT_OF_MEMORY),
            "in the profiling step",
            "lower engine.max_num_batched_tokens",
            id="out of memory while profiling, vLLM 0.26",
        ),
        pytest.param(
            VLLM,
            f"{CORE}RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please "
            "try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
            "in the profiling step",
            "lower engine.max_num_seqs",
            id="out of memory in the sampler's trial, gpu_model_runner.py of vLLM 0.26",
        ),
        pytest.param(
            VLLM,
            traceback(CORE, "initialize_from_config", "initialize_kv_cache", "zeros", error=OUT_OF_MEMORY),
            "while the KV cache was made",
            "lower engine.kv_cache_memory_bytes",
            id="out of memory for the KV cache, vLLM 0.26",
        ),
        pytest.param(
            VLLM,
            traceback(CORE, "compile_or_warm_up_model", "capture_model", "_dummy_run", error=OUT_OF_MEMORY),
            "while CUDA graphs were captured",
            "engine.max_cudagraph_capture_size",
            id="out of memory while capturing, vLLM 0.26",
        ),
        pytest.param(
            SGLANG,
            f"Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 1.02 GiB.\n{SGLANG_ENDS}",
            "while CUDA graphs were captured",
            "lower engine.extra.mem_fraction_static",
            id="out of memory while capturing, decode_cuda_graph_runner.py of SGLang 0.5.17 and 0.5.23",
        ),
        pytest.param(
            SGLANG,
            traceback(SCHEDULER, "alloc_memory_pool", "_create_buffers", error=OUT_OF_MEMORY) + f"\n{SGLANG_ENDS}",
            "while the KV cache was made",
            "lower engine.extra.mem_fraction_static",
            id="out of memory for the KV cache, SGLang 0.5.17",
        ),
        pytest.param(
            SGLANG,
            OUT_OF_MEMORY,
            "the GPU ran out of memory",
            "lower engine.extra.mem_fraction_static",
            id="out of memory somewhere, SGLang",
        ),
        pytest.param(
            VLLM,
            "RuntimeError: Failed to infer device type, please set the environment variable "
            "`VLLM_LOGGING_LEVEL=DEBUG` to turn on verbose logging to help debug the issue.",
            "sees no GPU",
            "nvidia-smi",
            id="no GPU, config/device.py of vLLM 0.26",
        ),
        pytest.param(
            SGLANG,
            "RuntimeError: No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) or platform plugin is available.",
            "sees no GPU",
            "engine.device to cpu",
            id="no GPU, utils/common.py of SGLang 0.5.17 and 0.5.23",
        ),
        pytest.param(
            VLLM,
            "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
            "no NVIDIA driver",
            "engine.device to cpu",
            id="no driver, torch",
        ),
        pytest.param(
            VLLM,
            "  Value error, World size (4) is larger than the number of available GPUs (2) in this node. If this is",
            "a replica of 4 workers sees 2 GPUs",
            "lower engine.tensor_parallel_size",
            id="too few GPUs, config/parallel.py of vLLM 0.26 and 0.32",
        ),
        pytest.param(
            VLLM,
            f"{CORE}RuntimeError: Worker failed with error 'CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling "
            "`cublasCreate(handle)`', please check the stack trace above for the root cause",
            "no NVLink multicast",
            "set engine.extra.compilation_config.pass_config.fuse_allreduce_rms to false",
            id="tensor parallelism without NVLink multicast, vLLM 0.26",
        ),
        pytest.param(
            VLLM,
            f"{PYDANTIC}Quantization method specified in the model config (gptq) does not match the quantization "
            "method specified in the `quantization` argument (awq).",
            "quantised with gptq, not with awq",
            "set engine.quantization to gptq",
            id="another quantization, vLLM 0.26, SGLang 0.5.17 and 0.5.23",
        ),
        pytest.param(
            VLLM,
            f"{PYDANTIC}Cannot find the config file for awq{FRAME}",
            "the checkpoint is not quantised with awq",
            "leave engine.quantization out",
            id="a plain checkpoint, vLLM 0.32 and SGLang 0.5.23",
        ),
        pytest.param(
            VLLM,
            f"{PYDANTIC}Unknown quantization method: foo. Must be one of ['awq', 'auto_awq', 'fp8']",
            "does not know the quantization foo",
            "correct engine.quantization",
            id="unknown quantization, vLLM 0.32",
        ),
        pytest.param(
            VLLM,
            "OSError: [Errno 98] Address already in use",
            "took the engine's port",
            "next start takes another port",
            id="port, vLLM 0.32",
        ),
        pytest.param(
            VLLM,
            "ModuleNotFoundError: No module named 'flashinfer'",
            "the Python package flashinfer is missing",
            "install it",
            id="missing package, Python",
        ),
        pytest.param(
            SGLANG,
            f"{SCHEDULER}RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 "
            "(SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.",
            "killed with SIGKILL",
            "give the host more memory",
            id="a worker killed, engine.py of SGLang 0.5.17 and 0.5.23",
        ),
        pytest.param(
            VLLM,
            f"{CORE}Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",
            "killed with SIGKILL",
            "give the host more memory",
            id="a worker killed, multiproc_executor.py of vLLM 0.26 and 0.32",
        ),
    ],
)
def test_a_known_line_gives_what_happened_and_the_lever_to_change(
    kind: EngineKind, log: str, meaning: str, remedy: str
) -> None:
    found = diagnose(kind, f"our own first line\n{log}\n", 1)
    assert found is not None
    assert meaning in found.meaning
    assert remedy in found.remedy
    assert found.words
    assert found.words in log.replace("\n", " "), "the engine's own words"
    assert "\n" not in str(found)


def test_the_line_has_what_happened_the_engines_words_and_the_remedy() -> None:
    log = f"{PYDANTIC}Total number of attention heads (4) must be divisible by tensor parallel size (3).{FRAME}"
    assert str(diagnose(VLLM, log, 1, "engines.judge")) == (
        "4 attention heads cannot be split evenly over 3 GPUs; the engine says: "
        '"Total number of attention heads (4) must be divisible by tensor parallel size (3)."; '
        "set engines.judge.tensor_parallel_size to a divisor of 4"
    )


def test_a_kill_without_a_word_is_the_oom_killers_unless_sglang_ended_itself() -> None:
    found = diagnose(VLLM, "Loading weights\n", 137)
    assert found is not None
    assert "OOM killer" in found.meaning
    assert diagnose(SGLANG, SGLANG_ENDS, 137) is None


def test_modules_that_sglang_can_do_without_are_no_cause() -> None:
    log = f"{SCHEDULER}Ignore import error when loading sglang.srt.models.inkling: No module named 'cutlass'"
    assert diagnose(SGLANG, log, 1) is None


def test_only_what_may_pass_is_worth_a_second_start() -> None:
    passing = {cause.says for cause in CAUSES if cause.may_pass}
    assert any("in use" in says for says in passing)
    assert any("Free memory" in says for says in passing)
    assert not any("attention heads" in says for says in passing)


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
