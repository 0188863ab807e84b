"""LoRA adapters on a fleet of simulated engines: on all replicas or on none, and each request on its own."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.output import print_fleet
from tests.material.adapters import write_adapter
from tests.rigs.calls import until
from tests.rigs.rig import Rig, StartRig

PROMPT = list(range(10, 50))
StartAdapters = Callable[..., Awaitable[Rig]]


@pytest.fixture
def start(start_rig: StartRig) -> StartAdapters:
    """Starts two replicas that take two adapters each."""

    async def started(num_replicas: int = 2, max_loras: int = 2, **sections: Any) -> Rig:
        engine = {"kind": "sim", "model": "sim", "num_replicas": num_replicas, "enable_lora": True}
        return await start_rig(engine=engine | {"max_loras": max_loras}, **sections)

    return started


@pytest.fixture
async def rig(start: StartAdapters) -> Rig:
    return await start()


async def greedy(rig: Rig, model: str, prompt: list[int] = PROMPT) -> list[int]:
    choice = (await rig.complete(prompt, model=model, temperature=0, max_tokens=12, ignore_eos=True))["choices"][0]
    return list(choice["token_ids"])


async def greedy_on_each(rig: Rig, model: str) -> list[list[int]]:
    """Return the answer of each replica's engine, asked directly."""
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    answers = []
    for replica in rig.replicas:
        async with rig.client.post(
            f"{replica.info.url}/v1/completions", json=body | {"return_token_ids": True}
        ) as response:
            assert response.status == 200, await response.text()
            answers.append((await response.json())["choices"][0]["token_ids"])
    return answers


async def adapters(rig: Rig) -> list[dict[str, Any]]:
    return list((await rig.get("/status"))[1]["adapters"])


async def test_an_adapter_changes_its_own_requests_on_every_replica_and_no_others(rig: Rig, tmp_path: Path) -> None:
    base = await greedy(rig, "sim")
    status, text = await rig.load("trl-policy-v1", write_adapter(tmp_path / "v1"))
    assert (status, text) == (200, "Success: LoRA adapter 'trl-policy-v1' added successfully.")
    adapted = await greedy(rig, "trl-policy-v1")
    assert adapted != base
    assert await greedy_on_each(rig, "trl-policy-v1") == [adapted, adapted]
    assert await greedy(rig, "sim") == base
    assert [replica.adapters for replica in rig.replicas] == [["trl-policy-v1"]] * 2


async def test_completions_say_the_adapters_version_and_the_models_beneath(rig: Rig, tmp_path: Path) -> None:
    await rig.load("trl-policy-v7", write_adapter(tmp_path / "v7"))
    await rig.open_group()
    await rig.update()
    choice = (await rig.complete(PROMPT, model="trl-policy-v7", max_tokens=4, ignore_eos=True))["choices"][0]
    assert choice["weight_versions"] == [
        {"version": 7, "start": 0, "end": 4, "base_version": 1, "adapter": "trl-policy-v7"}
    ]


async def test_every_dialect_asks_for_an_adapter_by_its_name(rig: Rig, tmp_path: Path) -> None:
    await rig.load("trl-policy-v7", write_adapter(tmp_path / "v7"))
    adapted, limit = await greedy(rig, "trl-policy-v7"), {"temperature": 0, "ignore_eos": True}
    by_name = {"model": "trl-policy-v7", "token_ids": PROMPT, "sampling_params": limit | {"max_tokens": 12}}
    _, tokens = await rig.post("/inference/v1/generate", by_name)
    assert tokens["choices"][0]["token_ids"] == adapted
    assert tokens["choices"][0]["weight_versions"][0]["version"] == "7"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    _, spoken = await rig.post("/v1/chat/completions", chat | {"model": "trl-policy-v7"})
    _, base = await rig.post("/v1/chat/completions", chat | {"model": "sim"})
    assert spoken["choices"][0]["message"]["content"] != base["choices"][0]["message"]["content"]
    assert spoken["choices"][0]["weight_versions"][0]["version"] == 7
    body = {"model": "trl-policy-v7", "prompt": PROMPT, "stream": True, "max_tokens": 4}
    async with rig.client.post(f"{rig.url}/v1/completions", json=body) as response:
        assert b'"weight_version":7' in await response.read()


async def test_a_name_without_a_number_counts_its_loads(rig: Rig, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "policy")
    for version in (1, 2):
        await rig.load("policy", folder)
        assert (await adapters(rig))[0]["version"] == version
        await rig.unload("policy")


async def test_models_and_status_list_adapters(rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_adapter(tmp_path / "v3")
    await rig.load("v3", folder)
    _, listed = await rig.get("/v1/models")
    cards = [(card["id"], card["parent"], card["root"]) for card in listed["data"]]
    assert cards == [("sim", None, "sim"), ("v3", "sim", str(folder))]
    status, card = await rig.get("/v1/models/v3")
    assert (status, card["parent"]) == (200, "sim")
    print_fleet((await rig.get("/status"))[1])
    assert f"v3: version 3, on 2 replicas, 0 rollouts, from {folder}" in capsys.readouterr().out


async def test_a_name_that_is_not_there_is_answered_with_those_that_are(rig: Rig, tmp_path: Path) -> None:
    await rig.load("v1", write_adapter(tmp_path / "v1"))
    status, reply = await rig.post("/v1/completions", {"model": "v2", "prompt": PROMPT})
    assert status == 404
    assert "there is sim" in reply["error"]["message"]
    assert "LoRA adapters: v1" in reply["error"]["message"]
    status, text = await rig.unload("v2")
    assert status == 404
    assert "loaded adapters: v1" in text


async def test_loading_twice_is_refused_in_vllms_words(rig: Rig, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "v1")
    await rig.load("v1", folder)
    status, text = await rig.load("v1", folder)
    assert status == 400
    assert "has already been loaded" in text


async def test_kv_of_one_load_is_not_read_by_the_next_of_the_same_name_and_folder(rig: Rig, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "v1")

    async def hits() -> float:
        async with rig.client.get(f"{rig.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))

    await rig.load("v1", folder)
    for _ in range(4):
        await greedy(rig, "v1")
    reused = await hits()
    assert reused > 0
    await rig.unload("v1")
    await rig.load("v1", folder)
    await greedy(rig, "v1")
    await greedy(rig, "v1")
    assert await hits() == reused


async def test_a_replica_that_fails_leaves_the_adapter_nowhere(rig: Rig, tmp_path: Path) -> None:
    rig.replicas[1].refuse_adapters()
    status, text = await rig.load("v1", write_adapter(tmp_path / "v1"))
    assert status == 424
    assert "replica engine-1 did not load the adapter" in text
    assert "max_lora_rank 1" in text
    assert [replica.adapters for replica in rig.replicas] == [[], []]
    status, _ = await rig.post("/v1/completions", {"model": "v1", "prompt": PROMPT})
    assert status == 404
    assert set((await rig.states()).values()) == {"SERVING"}


async def test_a_folder_that_no_engine_could_load_is_refused_before_any_is_asked(rig: Rig, tmp_path: Path) -> None:
    for folder, said in (
        (tmp_path / "nowhere", "does not exist here"),
        (write_adapter(tmp_path / "large", rank=32), "has rank 32, and engine.max_lora_rank is 16"),
    ):
        status, text = await rig.load("v1", folder)
        assert status == 400
        assert said in text
    assert [replica.adapters for replica in rig.replicas] == [[], []]


async def test_more_adapters_than_engines_hold_are_refused_with_those_that_are_loaded(rig: Rig, tmp_path: Path) -> None:
    for name in ("v1", "v2"):
        assert (await rig.load(name, write_adapter(tmp_path / name)))[0] == 200
    status, text = await rig.load("v3", write_adapter(tmp_path / "v3"))
    assert status == 409
    assert "the engines hold 2 LoRA adapters" in text
    assert "v1, v2 are loaded" in text
    await rig.unload("v1")
    assert (await rig.load("v3", tmp_path / "v3"))[0] == 200


async def test_engines_that_take_none_are_named_with_the_key_to_set(start_rig: StartRig, tmp_path: Path) -> None:
    rig = await start_rig()
    status, text = await rig.load("v1", write_adapter(tmp_path / "v1"))
    assert status == 409
    assert "set engine.enable_lora" in text


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_path": "/x"}, "lora_name"),
        ({"lora_name": "v1"}, "lora_path"),
        ({"lora_name": "v1", "lora_path": "/x", "load_inplace": True}, "load_inplace"),
        ({"lora_name": "sim", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "v1", "lora_path": "/x", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
    ],
)
async def test_a_wrong_body_is_refused_by_its_field(rig: Rig, body: dict[str, Any], field: str) -> None:
    status, reply = await rig.post("/v1/load_lora_adapter", body)
    assert status == 400
    assert reply["error"]["param"] == field


async def test_unloading_waits_for_the_rollouts_that_use_it_and_refuses_new_ones(
    start: StartAdapters, tmp_path: Path
) -> None:
    rig = await start()
    await rig.load("v1", write_adapter(tmp_path / "v1"))
    running = asyncio.create_task(rig.complete(PROMPT, model="v1", max_tokens=60, ignore_eos=True))
    await rig.begun()
    unloading = asyncio.create_task(rig.unload("v1"))
    await asyncio.sleep(0.1)
    assert not unloading.done()
    status, _ = await rig.post("/v1/completions", {"model": "v1", "prompt": PROMPT})
    assert status == 404
    assert sum(len(replica.adapters) for replica in rig.replicas) == 2
    rig.hurry()
    assert len((await running)["choices"][0]["token_ids"]) == 60
    assert (await unloading)[0] == 200
    assert [replica.adapters for replica in rig.replicas] == [[], []]


async def test_an_unload_that_waits_too_long_says_so_and_happens_when_the_rollouts_end(
    start: StartAdapters, tmp_path: Path
) -> None:
    rig = await start(weights={"adapter_unload_timeout_s": 0.1})
    await rig.load("v1", write_adapter(tmp_path / "v1"))
    running = asyncio.create_task(rig.complete(PROMPT, model="v1", max_tokens=60, ignore_eos=True))
    await rig.begun()
    status, text = await rig.unload("v1")
    assert status == 504
    assert "1 rollouts still use it" in text
    status, text = await rig.load("v1", tmp_path / "v1")
    assert status == 409
    assert "still use the LoRA adapter" in text
    rig.hurry()
    await running
    await until(lambda: not any(replica.adapters for replica in rig.replicas))


async def test_a_replica_that_cannot_load_them_stays_out_and_says_why(rig: Rig, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "v1")
    await rig.load("v1", folder)
    (folder / "adapter_config.json").rename(folder / "gone")
    await rig.replicas[1].kill()
    await rig.add_replica("engine-1", seed=1)
    await rig.until({"engine-0": "SERVING", "engine-1": "SYNCING"})
    async with asyncio.timeout(30):
        while "cannot load LoRA adapter v1" not in (reason := await _reason(rig, "engine-1")):
            assert "loads LoRA adapters: v1" in reason
            await asyncio.sleep(0.02)
    assert "adapter_config.json" in reason
    (folder / "gone").rename(folder / "adapter_config.json")
    await rig.until({"engine-0": "SERVING", "engine-1": "SERVING"})


async def test_a_gateway_that_starts_anew_serves_what_its_engines_hold(rig: Rig, tmp_path: Path) -> None:
    await rig.load("v3", write_adapter(tmp_path / "v3"))
    second = Rig(rig.config, rig.sim)
    second.replicas = rig.replicas
    await second.listen()
    try:
        await second.until({"engine-0": "SERVING", "engine-1": "SERVING"})
        found = await adapters(second)
        assert [(one["name"], one["version"], one["replicas"]) for one in found] == [
            ("v3", 3, ["engine-0", "engine-1"])
        ]
    finally:
        second.replicas = []
        await second.stop()


async def _reason(rig: Rig, replica_id: str) -> str:
    _, status = await rig.get("/status")
    return str(next(one["reason"] for one in status["replicas"] if one["replica_id"] == replica_id))
