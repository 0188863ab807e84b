"""The progress of an engine by the lines of its log.

Lines are of vLLM 0.32 and SGLang 0.5.23 as seen on CPU; graphs as in the source of vLLM 0.26 and SGLang 0.5.17.
"""

import os
from pathlib import Path

import pytest

from engines.process.engine_log import Phases, doing, forget_old_logs, lines_of, measured_kv_memory, read_tail

FIRST = "2026-11-21 15:03:00 python -m vllm.entrypoints.cli.main serve tiny\n"
CORE = "(EngineCore pid=29771) INFO 11-21 15:03:15 [core.py:133] "
TIME = "[2026-11-21 15:03:04 TP0] "
MEASURED = (
    "INFO 11-29 11:00:00 [gpu_worker.py:1033] Free memory on device (138.9/139.8 GiB) on startup. Desired GPU memory "
    "utilization is (0.5, 69.9 GiB). Actual usage is 15.1 GiB for consumed memory (weights + non-torch), 1.4 GiB for "
    "peak activation, and 0.9 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with "
    "`--kv-cache-memory=%d` (52.3 GiB) to fit into requested memory, or `--kv-cache-memory=130000000000` (121.1 GiB) "
    "to fully utilize gpu memory. Current kv cache memory in use is 51.9 GiB.\n"
)


@pytest.mark.parametrize(
    ("log", "stage"),
    [
        ("", "starting"),
        (
            "(APIServer pid=7) INFO 11-21 15:03:07 [model.py:733] Resolved architecture: Qwen3",
            "reading the configuration",
        ),
        (f"{CORE}Initializing a V1 LLM engine (v0.32.0) with config: model='tiny'", "starting workers"),
        (f"{CORE}Starting to load model tiny...", "loading weights"),
        (
            "Loading safetensors checkpoint shards:   0% Completed | 0/8 [00:00<?, ?it/s]\r"
            "Loading safetensors checkpoint shards:  38% Completed | 3/8 [00:09<00:15,  3.10s/it]\r",
            "loading weights 3/8",
        ),
        (f"{CORE}Loading weights took 24.81 seconds", "profiling memory"),
        (f"{CORE}Dynamo bytecode transform time: 6.81 s", "compiling"),
        (f"{CORE}Available KV cache memory: 110.10 GiB", "making the KV cache"),
        (
            "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  30%|██▉       | 20/67 [00:01<00:03, 14.1it/s]",
            "capturing graphs 20/67",
        ),
        (f"{CORE}Graph capturing finished in 5 secs, took 0.61 GiB", "starting the server"),
        ("INFO:     Application startup complete.", "warming up"),
        (f"{TIME}Load weight begin. avail mem=138.53 GB", "loading weights"),
        ("Multi-thread loading shards: 100% Completed | 1/1 [00:00<00:00, 14.99it/s]", "loading weights 1/1"),
        (f"{TIME}KV Cache is allocated. dtype: torch.bfloat16, #tokens: 8192", "making the KV cache"),
        (f"{TIME}Capture decode CUDA graph begin. This can take up to several minutes.", "capturing graphs"),
        (
            "Capturing batches (bs=96 avail_mem=14.51 GB):  25%|██▌  | 5/20 [00:02<00:06,  2.2it/s]",
            "capturing graphs 5/20",
        ),
        (f"{TIME}Something new {'x' * 200}", f"starting: Something new {'x' * 83}..."),
    ],
)
def test_a_log_tells_what_its_engine_is_doing(log: str, stage: str) -> None:
    assert doing(FIRST + log) == stage


def test_a_line_that_says_nothing_does_not_hide_the_stage_before() -> None:
    assert doing(f"{FIRST}{CORE}Starting to load model tiny...\n{CORE}Using FLASH_ATTN backend.\n") == "loading weights"


def test_a_count_goes_on_within_its_phase_and_leaves_with_it() -> None:
    phases = Phases("importing")
    for text in ("starting: Triton is there", "loading weights 1/8", "loading weights 8/8", "warming up"):
        phases.enter(text)
    told = phases.told()
    assert [phase for phase, _ in told] == ["importing", "starting", "loading weights", "warming up"]
    assert [since for _, since in told] == sorted(since for _, since in told)
    phases.enter("capturing graphs 2/9")
    assert phases.told()[-1][0] == "capturing graphs 2/9"


def test_lines_are_the_engines_words_without_time_process_and_colour() -> None:
    log = (
        "(Worker_TP1 pid=7) (Worker_TP1 pid=7) ERROR 11-21 15:00:26 [multiproc.py:15] ValueError: no\n"
        "(APIServer pid=7) INFO 11-21 15:00:26 [api_utils.py:347] \n"
        f"\n{TIME}\x1b[32mready\x1b[0m\n"
    )
    assert lines_of(log) == ["ValueError: no", "ready"]


def test_of_many_logs_the_last_two_hundred_are_kept(tmp_path: Path) -> None:
    forget_old_logs(tmp_path / "absent")
    for number in range(203):
        (tmp_path / f"engine-{number}.log").touch()
        os.utime(tmp_path / f"engine-{number}.log", (number, number))
    (tmp_path / "notes.txt").touch()
    forget_old_logs(tmp_path)
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {f"engine-{number}.log" for number in range(3, 203)} | {"notes.txt"}


def test_the_kv_cache_that_fits_is_that_of_the_worker_with_the_least() -> None:
    ranks = [f"(Worker_TP{rank} pid=7{rank}) {MEASURED % num_bytes}" for rank, num_bytes in enumerate((56_000, 55_000))]
    assert measured_kv_memory("".join(ranks)) == 55_000
    assert measured_kv_memory(FIRST + MEASURED.replace("%d", "-5")) is None
    assert measured_kv_memory(FIRST) is None


def test_what_libraries_leak_as_an_engine_fails_hides_nothing(tmp_path: Path) -> None:
    """vLLM 0.32 on CPU ends with 31 such lines, more than are shown."""
    log = tmp_path / "log"
    log.write_text(
        "ValueError: no such thing\n"
        "nanobind: leaked 514 functions!\n"
        ' - leaked function "__init__"\n'
        " - ... skipped remainder\n"
        "nanobind: this is likely caused by a reference counting issue in the binding code.\n"
        "See https://nanobind.readthedocs.io/en/latest/refleaks.html"
    )
    assert read_tail(log) == "ValueError: no such thing\n"
