"""A weight update in the middle of completions that live through it: where the boundary lies, on real vLLM on CPU."""

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("trl")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engines.process import launch
from examples.tiny_model.task import COMMITTED
from tests.rigs.engines.real_trainer import trl_client
from tests.rigs.engines.real_vllm import (
    REQUEST_TIMEOUT_S,
    RealFleet,
    app,
    engine_config,
    gathered,
    standing_amid,
)

pytestmark = pytest.mark.vllm

Json = dict[str, Any]

LONG = 480
SAMPLED = {"model": str(COMMITTED), "max_tokens": LONG, "temperature": 1.0, "seed": 11, "ignore_eos": True}
COMPLETION = SAMPLED | {"prompt": [2, 8, 6, 7, 3], "return_token_ids": True}
CHAT = SAMPLED | {"messages": [{"role": "user", "content": "312"}], "return_token_ids": True, "max_tokens": LONG - 30}
SEEDED = (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT))

IN_FLIGHT = 5
"""Samples of `asked`."""


@pytest.fixture(scope="module", params=["group", "relay"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    weights = {"relay": "always" if request.param == "relay" else "never"}
    with app({"policy": engine_config(COMMITTED, tmp_path_factory.mktemp("logs"))}, weights=weights) as running:
        yield running


def other_weights(seed: int, sureness: float = 30) -> Any:
    """A model that is sure of what it says, so that another seed's says something else at once."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(COMMITTED), dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight *= sureness
    return model


def asked(real: RealFleet) -> list[Any]:
    """The choices of a whole completion, of a group, of a chat and of a stream, all in flight together."""

    def choices(path: str, body: Any) -> Any:
        status, reply = real.call(path, body)
        assert status == 200, reply
        return reply["choices"]

    with ThreadPoolExecutor(4) as pool:
        futures = [
            pool.submit(choices, "/v1/completions", COMPLETION),
            pool.submit(choices, "/v1/completions", COMPLETION | {"n": 2}),
            pool.submit(choices, "/v1/chat/completions", CHAT),
            pool.submit(streamed, real, COMPLETION),
        ]
        return [choice for future in futures for choice in future.result()]


def streamed(real: RealFleet, body: Any) -> list[Any]:
    data = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(f"{real.url}/v1/completions", data, {"Content-Type": "application/json"})
    token_ids: list[int] = []
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
        for event in response.read().decode().split("\n\n"):
            if event.startswith("data: {"):
                for choice in json.loads(event.removeprefix("data: "))["choices"]:
                    token_ids += choice.get("token_ids") or []
                    last = choice
    return [last | {"token_ids": token_ids}]


@contextmanager
def trainer(real: RealFleet, in_flight: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """TRL's client in a group with the engines, whose updates say what becomes of rollouts in flight."""
    body = {"in_flight": in_flight}
    with trl_client(real.url) as client:
        monkeypatch.setattr(
            client, "_start_weight_update", lambda: client._post(f"{real.url}/start_weight_update", json=body)
        )
        yield client


@pytest.mark.parametrize(
    ("paused_by", "in_flight"), [("the trainer", "keep"), ("the update", "keep"), ("the update", "recompute")]
)
def test_every_completion_that_an_update_falls_into_tells_the_exact_token(
    real: RealFleet, paused_by: str, in_flight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = real.call("/status")[1]["weight_version"]
    before, weights = [choice["token_ids"] for choice in asked(real)], other_weights(seed=version)
    with trainer(real, in_flight, monkeypatch) as client, ThreadPoolExecutor(1) as pool:
        with gathered(real, IN_FLIGHT):
            flying = pool.submit(asked, real)
        with standing_amid(real):
            if paused_by == "the trainer":
                assert real.call("/pause?mode=keep", {})[0] == 200
            client.update_model_params(weights)
            if paused_by == "the trainer":
                assert real.call("/resume", {})[0] == 200
        after = flying.result()

    assert len(after) == IN_FLIGHT
    for old, choice in zip(before, after, strict=True):
        first, second = choice["weight_versions"]
        print(choice["weight_versions"])
        assert (first["version"], second["version"]) == (version, version + 1)
        assert (first["start"], second["end"]) == (0, len(choice["token_ids"]))
        boundary = first["end"]
        assert 0 < boundary == second["start"] < second["end"]
        # Up to the boundary the old weights would have said the same, and later they would not; when is chance, since
        # the vocabulary is small and the seed the same.
        assert choice["token_ids"][:boundary] == old[:boundary]
        assert choice["token_ids"] != old
        assert choice["kv_versions"] == [version + 1] if in_flight == "recompute" else [version, version + 1]
    record = real.call("/v1/weight_updates")[1]["weight_updates"][0]
    print(record)
    assert (record["end"], record["in_flight"]) == ("committed", in_flight)
    assert (record["stopped_s"] > 0) == (paused_by == "the update")
    (replica,) = record["replicas"].values()
    assert replica["canary"]["result"] == "no peer"


@pytest.mark.parametrize(("path", "body"), SEEDED)
def test_a_sample_that_the_update_in_its_request_has_not_touched_says_so(
    real: RealFleet, monkeypatch: pytest.MonkeyPatch, path: str, body: Json
) -> None:
    """Each of the 128 tokens is as likely, one of which ends a sample: their lengths are all different."""
    with trainer(real, "keep", monkeypatch) as client, ThreadPoolExecutor(1) as pool:
        client.update_model_params(other_weights(seed=1, sureness=1e-3))
        version = client.weight_version
        with gathered(real, 16, tokens=50):
            flying = pool.submit(real.call, path, body | {"n": 16, "stop_token_ids": [9]})
        with standing_amid(real):
            client.update_model_params(other_weights(seed=2, sureness=1e-3))
        status, reply = flying.result()
    assert status == 200, reply
    told = [choice["weight_versions"] for choice in reply["choices"]]
    for choice, spans in zip(reply["choices"], told, strict=True):
        assert (spans[0]["start"], spans[-1]["end"]) == (0, len(choice["token_ids"]))
    assert {tuple(span["version"] for span in spans) for spans in told} == {(version,), (version, version + 1)}


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealFleet]:
    """An engine that tells no spans, as vLLM 0.26, and nothing of a stream before its end, as one that lags behind.

    Rollouts go on while a paused engine answers a canary, and would end before a second update: there is none.
    """
    monkeypatch.setattr(launch, "_SPANS", None)
    engine = engine_config(COMMITTED, tmp_path).model_copy(update={"stream_interval": LONG})
    with app({"policy": engine}, weights={"relay": "never", "canary": {"enabled": False}}) as running:
        yield running


def test_where_vllm_tells_no_spans_every_version_that_a_request_has_met_is_named(
    silent: RealFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer(silent, "keep", monkeypatch) as client, ThreadPoolExecutor(1) as pool:
        with gathered(silent, IN_FLIGHT):
            flying = pool.submit(asked, silent)
        with standing_amid(silent):
            assert silent.call("/pause?mode=keep", {})[0] == 200
            for seed in range(2):
                client.update_model_params(other_weights(seed=seed))
            assert silent.call("/resume", {})[0] == 200
        during = flying.result()
    may_be_of = [{"version": version, "start": None, "end": None} for version in range(3)]
    assert [choice["weight_versions"] for choice in during] == [may_be_of] * 5
    for choice in asked(silent):
        assert choice["weight_versions"] == [{"version": 2, "start": 0, "end": len(choice["token_ids"])}]
