"""The remaining routes of the dialect, and what every route shares."""

from tests.rigs.rig import MAX_MODEL_LEN, Rig


async def test_what_trl_reads_at_the_start_is_there(rig: Rig) -> None:
    assert (await rig.get("/health"))[0] == 200
    _, models = await rig.get("/v1/models")
    assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("sim", MAX_MODEL_LEN)
    _, info = await rig.get("/server_info", params={"config_format": "json"})
    assert info["vllm_config"]["weight_transfer_config"] is not None
    assert info["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert info["vllm_config"]["parallel_config"]["data_parallel_size"] == 1


async def test_metrics_hold_ours_and_each_engines_with_its_name(rig: Rig) -> None:
    await rig.complete([[5], [6]], max_tokens=4, ignore_eos=True)
    async with rig.client.get(rig.url + "/metrics") as response:
        page = await response.text()
    assert 'rollout_gateway_completion_tokens_total{model="sim"} 8.0' in page
    assert 'rollout_gateway_replicas{model="sim",state="SERVING"} 2.0' in page
    for replica in ("engine-0", "engine-1"):
        assert any(
            line.startswith("vllm:generation_tokens_total") and f'replica="{replica}"' in line and line.endswith(" 4.0")
            for line in page.splitlines()
        )
