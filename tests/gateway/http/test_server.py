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


async def test_text_is_tokenised_and_back(rig: Rig) -> None:
    _, tokens = await rig.post("/tokenize", {"model": "sim", "prompt": "abc"})
    _, text = await rig.post("/detokenize", {"model": "sim", "tokens": tokens["tokens"]})
    assert text["prompt"] == "abc"


async def test_the_request_id_is_echoed(rig: Rig) -> None:
    body = {"model": "sim", "prompt": [5], "max_tokens": 1}
    async with rig.client.post(rig.url + "/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as response:
        assert response.headers["X-Request-Id"] == "mine"
        assert (await response.json())["id"] == "cmpl-mine"


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


async def test_an_unknown_route_answers_in_the_dialects_form(rig: Rig) -> None:
    status, reply = await rig.get("/nonsense")
    assert (status, reply["error"]["type"]) == (404, "NotFoundError")
