"""The conformance suite: what the gateway promises of an engine, asked of a running one through `Engine`.

    make test-unit                                  # the simulated engine
    make test-vllm                                  # and vLLM on CPU
    make test-sglang                                # and SGLang on CPU

On any machine, with any engine: a configuration of the gateway with one engine group, and nothing but pytest,
pytest-asyncio and what this package and that engine need. From any folder, offline:

    PYTHONPATH=REPOSITORY CONFORMANCE_CONFIG=FILE.yaml CONFORMANCE_OUT=FILE.json \\
        python -m pytest -q -W default -p no:cacheprovider REPOSITORY/tests/engines/conformance

`CONFORMANCE_OUT` writes each check's outcome; kept under docs/results/conformance/ they make docs/engines.md with
`python -m scripts.docs`. The weights of the model are replaced by random ones during the
run and are random before it where `load_format` is dummy: no check depends on what a model has learned. On GPUs the
engine takes the first ones and the trainer the next one; where there is none left, weight updates are not run.
"""

import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engines.config import EngineConfig
from engines.process.launch import gpus_per_replica
from engines.types import EngineKind
from gateway.config.load import load
from tests.engines.conformance.subject import Subject
from tests.engines.conformance.trainers import Trainer, trainer_of
from tests.rigs.engines import real_sglang, real_vllm

_CONFIG = os.environ.get("CONFORMANCE_CONFIG")
_OUT = os.environ.get("CONFORMANCE_OUT")
_SUBJECTS = (
    ["config"]
    if _CONFIG
    else ["sim", pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]
)

_TINY_MODEL = Path(__file__).parents[3] / "examples" / "tiny_model" / "digit-sort"

_outcomes = pytest.StashKey[dict[str, str]]()
_facts = pytest.StashKey[dict[str, Any]]()


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=_SUBJECTS)
async def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    """The engine under test; one server for the whole suite."""
    assert not _OUT or _facts not in request.config.stash, "CONFORMANCE_OUT holds one engine: select one with -m"
    config = _on_first_gpus(_config(request.param, tmp_path_factory.mktemp("logs")))
    subject = await Subject.start(config)
    request.config.stash[_facts] = _facts_of(subject)
    try:
        yield subject
    finally:
        await subject.stop()


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def measured(engine: Subject) -> None:
    await engine.measure()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def someone_with_weights(engine: Subject) -> Trainer:
    """Made once: the weights of a large model take their time."""
    return await trainer_of(engine)


@pytest_asyncio.fixture(loop_scope="session")
async def trainer(someone_with_weights: Trainer) -> AsyncIterator[Trainer]:
    """In a group with the engine, over the transport that the engine declares."""
    await someone_with_weights.join()
    try:
        yield someone_with_weights
    finally:
        await someone_with_weights.leave()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A stable sort of our own items: the engine is killed when nobody needs it any more.
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.parent == here and item.path.stem == "test_restart")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    outcomes = item.config.stash.setdefault(_outcomes, {})
    row = _row(item)
    if report.failed:
        outcomes[row] = "FAIL"
    elif report.skipped:
        assert isinstance(report.longrepr, tuple)
        outcomes[row] = report.longrepr[2].removeprefix("Skipped: ")
    elif report.when == "call":
        outcomes[row] = "yes"
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    facts = session.config.stash.get(_facts, None)
    if _OUT and facts is not None:
        result = facts | {"checks": session.config.stash.get(_outcomes, {})}
        Path(_OUT).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(name: str, log_dir: Path) -> EngineConfig:
    match name:
        case "sim":
            config = EngineConfig(kind=EngineKind.SIM, model="sim", max_model_len=4096, log_dir=str(log_dir))
        case "vllm":
            config = real_vllm.engine_config(_TINY_MODEL, log_dir)
        case "sglang":
            config = real_sglang.engine_config(_TINY_MODEL, log_dir)
        case _:
            assert _CONFIG is not None
            groups = load(Path(_CONFIG)).groups
            assert len(groups) == 1, f"CONFORMANCE_CONFIG={_CONFIG} has {len(groups)} engine groups, not one"
            (config,) = groups.values()
    # How many prompt tokens were cached is told by vLLM on request.
    tells_cached = {} if config.kind is EngineKind.SGLANG else {"enable_prompt_tokens_details": True}
    return config.model_copy(update={"extra": config.extra | tells_cached})


def _on_first_gpus(config: EngineConfig) -> EngineConfig:
    if not (count := gpus_per_replica(config)):
        return config
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    # A trainer in one group with an engine has to say this as the engine does, before it starts CUDA.
    os.environ["NCCL_CUMEM_ENABLE"] = "0"
    return config.model_copy(update={"env": config.env | {"CUDA_VISIBLE_DEVICES": ",".join(visible[:count])}})


def _facts_of(subject: Subject) -> dict[str, Any]:
    return {
        "kind": subject.kind.value,
        "engine_version": subject.info.engine_version,
        "device": _device(subject.config),
        "model": Path(subject.info.model).name,
        "dtype": subject.config.dtype,
        "date": time.strftime("%Y-%m-%d"),
    }


def _device(config: EngineConfig) -> str:
    if not (count := gpus_per_replica(config)):
        return "CPU"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    return f"{count} x {names[0]}"


def _row(item: pytest.Item) -> str:
    """The check in words: the test's name and its parameters other than the engine, which is the first."""
    name, _, parameters = item.name.removesuffix("]").partition("[")
    _, _, others = parameters.partition("-")
    words = name.removeprefix("test_").replace("_", " ")
    return f"{words}: {others}" if others else words
