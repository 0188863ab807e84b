"""Updates that a real vLLM loads into its weights where they lie, as on GPUs: what is served is what was pushed."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM

from engines.errors import WeightUpdateFailed
from engines.process.port import free_port
from engines.store.manifest import check_bytes
from engines.transfer.gloo import WeightGroup
from engines.transfer.tensor_bytes import digest_on_host
from examples.tiny_model.task import COMMITTED
from tests.material import plain_layers
from tests.rigs.engines.real_trainer import TIMEOUT_S, announced
from tests.rigs.engines.real_vllm import RealFleet, app, engine_config, gathered, standing_amid, until_receiving
from trainer_client import BlockingRolloutClient, WeightSender

pytestmark = pytest.mark.vllm

SAME = 1e-3
SCORED = [2, 8, 6, 7, 3, 9, 12, 40, 77, 5, 6, 90, 3]
LONG = 480
LAYER = "model.layers.2"


@dataclass
class Plain:
    """One replica whose layers are plain behind a gateway, and the model that was last pushed to it."""

    real: RealFleet
    client: BlockingRolloutClient
    notes: Path
    model: Any

    def reloads(self) -> int:
        return plain_layers.reloads(self.notes)

    def moved(self, seed: int, of: str = "") -> Any:
        """A copy of the model, with noise on the tensors whose names begin with `of`."""
        model = AutoModelForCausalLM.from_config(self.model.config, dtype=torch.float32)
        model.load_state_dict(self.model.state_dict())
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.startswith(of):
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model

    def push(self, sender: WeightSender, model: Any) -> None:
        """In place, and found right by transformers' log-probs at the canary and here."""
        version, reloads = self.client.weight_version(), self.reloads()
        assert sender.push(model, canary_logprobs=logprobs(model, self.client.canary_token_ids())) == version + 1
        assert self.reloads() == reloads
        self.model = model
        self.says(model)

    def says(self, model: Any) -> None:
        assert self.scores() == pytest.approx(logprobs(model, SCORED), abs=SAME)

    def scores(self) -> list[float]:
        """The log-probs of `SCORED` but for its first, as it serves them."""
        body = {"model": str(COMMITTED), "prompt": [SCORED], "max_tokens": 1, "prompt_logprobs": 0}
        status, reply = self.real.call("/v1/completions", body)
        assert status == 200, reply
        (choice,) = reply["choices"]
        told = zip(SCORED[1:], choice["prompt_logprobs"][1:], strict=True)
        return [one[str(token_id)]["logprob"] for token_id, one in told]

    def checksums(self) -> Any:
        """Checksums of the engine's own parameters."""
        (replica,) = self.real.replicas
        engine = RealFleet(replica.url, [], self.real.restart)
        status, reply = engine.call("/weight_checker", {"action": "checksum"})
        assert status == 200, reply
        return reply

    def last_update(self) -> dict[str, Any]:
        report: dict[str, Any] = self.real.call("/v1/weight_updates")[1]["weight_updates"][0]
        return report

    def kept_copy(self, version: int) -> Path:
        """The folder of a version, once the store has it."""
        deadline = time.monotonic() + TIMEOUT_S
        while version not in (store := self.real.call("/status")[1]["weight_store"])["versions"]:
            assert time.monotonic() < deadline, store
            time.sleep(0.05)
        return next(Path(store["folder"]).glob(f"**/v{version}-*"))

    def until_restored(self, version: int) -> None:
        """Serving `version`, whose model is still `model`."""
        self.client.wait_ready(TIMEOUT_S)
        assert self.client.weight_version() == version
        self.says(self.model)


def logprobs(model: Any, token_ids: list[int]) -> list[float]:
    """transformers' own, of all token ids but the first."""
    with torch.no_grad():
        scored = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    told: list[float] = scored.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()
    return told


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    notes, logs = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("logs")
    engine = engine_config(COMMITTED, logs).model_copy(update={"env": plain_layers.environ(notes)})
    model = AutoModelForCausalLM.from_pretrained(COMMITTED, dtype=torch.float32)
    with app({"policy": engine}, weights={"relay": "never"}) as real, BlockingRolloutClient(real.url) as client:
        one = Plain(real, client, notes, model)
        one.says(model)
        yield one


@pytest.fixture
def sender(plain: Plain) -> Iterator[WeightSender]:
    with WeightSender(plain.client, timeout_s=TIMEOUT_S) as one:
        yield one


def test_a_reload_of_vllms_own_would_be_noticed(plain: Plain) -> None:
    before = plain.reloads()
    (replica,) = plain.real.replicas
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(COMMITTED)}}
    engine = RealFleet(replica.url, [], plain.real.restart)
    assert engine.call("/collective_rpc", body)[0] == 200
    assert plain.reloads() == before + 1
    plain.says(plain.model)


def test_an_update_and_the_next_are_loaded_in_place_and_served_as_pushed(plain: Plain, sender: WeightSender) -> None:
    for seed in (1, 2):
        before = plain.scores()
        plain.push(sender, plain.moved(seed))
        assert plain.scores() != pytest.approx(before, abs=0.1)


def test_after_the_first_update_the_models_loaders_are_not_asked_again(plain: Plain, sender: WeightSender) -> None:
    plain.push(sender, plain.moved(seed=20))
    runs = plain_layers.loader_runs(plain.notes)
    assert runs > 0
    plain.push(sender, plain.moved(seed=21))
    assert plain_layers.loader_runs(plain.notes) == runs


def test_of_a_push_of_one_layer_the_rest_stays_as_it_was(plain: Plain, sender: WeightSender) -> None:
    plain.push(sender, plain.moved(seed=3))
    version = plain.client.weight_version()
    plain.model = plain.moved(seed=4, of=f"{LAYER}.self_attn.q_proj")
    layer = {name: tensor for name, tensor in plain.model.named_parameters() if name.startswith(f"{LAYER}.")}
    assert sender.push(layer) == version + 1
    plain.says(plain.model)


def test_an_update_that_the_canary_refuses_is_taken_back_bit_by_bit(plain: Plain, sender: WeightSender) -> None:
    plain.push(sender, plain.moved(seed=5))
    version, checksums, scores = plain.client.weight_version(), plain.checksums(), plain.scores()
    of_another = logprobs(plain.moved(seed=60), plain.client.canary_token_ids())
    with pytest.raises(WeightUpdateFailed, match="tolerance"):
        sender.push(plain.moved(seed=6), canary_logprobs=of_another)
    plain.until_restored(version)
    record = plain.last_update()
    assert record["staged"]
    assert (plain.checksums(), plain.scores()) == (checksums, scores)
    plain.push(sender, plain.moved(seed=7))


def test_the_copy_of_a_staged_version_is_what_was_sent(plain: Plain, sender: WeightSender) -> None:
    model = plain.moved(seed=40)
    plain.push(sender, model)
    assert plain.last_update()["staged"]
    copied = check_bytes(plain.kept_copy(plain.client.weight_version()))
    sent = {name: digest_on_host(tensor) for name, tensor in model.named_parameters()}
    assert {name: tensor.digest for name, tensor in copied.tensors.items()} == sent


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_trainer_that_ends_between_tensors_leaves_the_old_version_and_its_room(
    plain: Plain, sender: WeightSender, is_killed: bool
) -> None:
    """One is killed within a transfer, which ends the engine's session too; one gives up, which leaves it open."""
    plain.push(sender, plain.moved(seed=8))
    sender.close()
    version = plain.client.weight_version()
    named = list(plain.moved(seed=9).state_dict().items())
    half = len(named) // 2
    with ThreadPoolExecutor(1) as beside:
        group = joined(plain.real, beside)
        assert plain.real.call("/start_weight_update", {})[0] == 200
        arrived = beside.submit(plain.real.call, "/update_weights", {"update_info": announced(named[:half])})
        group.send(iter(named[:half]))
        assert arrived.result(TIMEOUT_S)[0] == 200
        if is_killed:
            awaited = beside.submit(plain.real.call, "/update_weights", {"update_info": announced(named[half:])})
            until_receiving(plain.real)
            group.close("killed")
            status, reply = awaited.result(TIMEOUT_S)
            assert status == 424, reply
        else:
            plain.client.call("DELETE", "/v1/weight_updates", {"reason": "no room for the next layer"})
            group.close()
    plain.until_restored(version)
    plain.push(sender, plain.moved(seed=10))


def joined(real: RealFleet, beside: ThreadPoolExecutor) -> WeightGroup:
    port = free_port()
    group = WeightGroup("127.0.0.1", port, 0, 2, TIMEOUT_S)
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "packed": True}
    answer = beside.submit(real.call, "/init_weight_transfer_engine", {"init_info": info})
    group.join()
    assert answer.result(TIMEOUT_S)[0] == 200
    return group


def test_a_rollout_that_an_update_falls_into_tells_the_exact_token(plain: Plain, sender: WeightSender) -> None:
    def sure(seed: int) -> Any:
        """A model that is sure of its tokens, so that another model differs at once."""
        model = plain.moved(seed)
        with torch.no_grad():
            model.lm_head.weight *= 30
        return model

    def asked() -> Any:
        status, reply = plain.real.call("/v1/completions", body)
        assert status == 200, reply
        return reply["choices"]

    body = {
        "model": str(COMMITTED),
        "prompt": [SCORED[:5], SCORED[:8]],
        "max_tokens": LONG,
        "temperature": 1.0,
        "seed": 11,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    plain.push(sender, plain.moved(seed=11))  # so that the group is there
    version, before, reloads = plain.client.weight_version(), asked(), plain.reloads()
    weights = sure(seed=12)
    with ThreadPoolExecutor(1) as beside:
        with gathered(plain.real, 2):
            flying = beside.submit(asked)
        with standing_amid(plain.real):
            assert sender.push(weights, in_flight="keep") == version + 1
        after = flying.result(TIMEOUT_S)
    assert plain.reloads() == reloads
    for old, choice in zip(before, after, strict=True):
        first, second = choice["weight_versions"]
        print(choice["weight_versions"])
        assert (first["version"], second["version"]) == (version, version + 1)
        assert (first["start"], second["end"]) == (0, LONG)
        boundary = first["end"]
        assert 0 < boundary == second["start"] < LONG
        assert choice["token_ids"][:boundary] == old["token_ids"][:boundary]
        assert choice["token_ids"] != old["token_ids"]
