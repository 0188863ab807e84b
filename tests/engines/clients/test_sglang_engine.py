"""vLLM's dialect on top of SGLang's routes, against a small server that answers as SGLang 0.5.23 does."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from engines.clients.sglang_dialect import CompletionReply
from engines.clients.sglang_engine import SglangEngine
from engines.engine import Preparation, ReceiptCopy
from engines.errors import DeadlineExceeded, EngineError, EngineFailed, EngineRefused
from engines.transfer.worker_calls import call_of
from engines.types import PauseMode, TensorMeta
from tests.rigs.calls import chunks_of

TIMEOUT_S = 60.0
COMPLETIONS = "/v1/completions"
VOCAB_SIZE = 100
GROUP = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2}

Json = dict[str, Any]


def answer(ids: list[int], text: str = "", finish: Json | None = None, **more: Any) -> Json:
    """One sample as /generate tells it."""
    meta = {
        "id": "r",
        "finish_reason": finish,
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "cached_tokens": 1,
        "weight_versions": [{"version": "7", "start": 0, "end": len(ids)}] if finish else None,
        "input_token_logprobs": [[None, 1, None], [-0.5, 2, None], [-0.6, 3, None]],
        "input_top_logprobs": [None, [[-0.1, 9, None]], [[-0.6, 3, None]]],
        "output_token_logprobs": [[-float(i), token_id, None] for i, token_id in enumerate(ids)],
        "output_top_logprobs": [[[-0.0, 9, None]] for _ in ids],
    }
    return {"text": text, "output_ids": ids, "prompt_token_ids": [1, 2, 3], "meta_info": meta, **more}


LENGTH = {"type": "length", "length": 2}


class FakeSglang:
    """Remembers what it was asked. `answers` is what /generate says, `running` how many requests each look shows."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Json]] = []
        self.answers: Any = answer([5, 6], "ab", LENGTH)
        self.running: list[int] = []
        self.chat: Json | None = None  # the answer to a conversation, if it is another
        self.flush_status = 200
        self.workers: dict[str, list[Any]] | None = None  # answers of our plugin's methods; None without it
        self.knows_v1 = False
        self.is_breaking = False
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self._handle)

    @property
    def generated(self) -> Json:
        """The last body of /generate."""
        return [body for path, body in self.asked if path == "/generate"][-1]

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text() or "{}")
        if str(2**31 - 1) in body.get("sampling_params", {}).get("logit_bias", {}):
            message = f"logit_bias must has keys in [0, {VOCAB_SIZE - 1}], got {2**31 - 1}."
            return web.json_response({"error": {"message": message}}, status=400)
        self.asked.append((request.path, body))
        if self.is_breaking and request.transport is not None:
            request.transport.abort()
        match request.path:
            case "/generate" if body.get("stream"):
                return await self._stream(request)
            case "/generate":
                status = 400 if isinstance(self.answers, dict) and "error" in self.answers else 200
                return web.json_response(self.answers, status=status)
            case "/openapi.json":
                paths: dict[str, object] = {"/generate": {}, "/update_weight_version": {}}
                return web.json_response({"paths": paths})
            case "/server_info":
                info = {"version": "0.5.23", "tp_size": 2, "pp_size": 3, "model_path": "m", "served_model_name": "m"}
                return web.json_response(info)
            case "/v1/models":
                adapters = [{"id": "v1", "root": "/a/v1", "parent": "m"}] if self.knows_v1 else []
                loaded = [body["model_path"] for path, body in self.asked if path == "/update_weights_from_disk"]
                name = loaded[-1] if loaded else "m"  # as SGLang: by the folder that it has loaded last
                return web.json_response({"data": [{"id": name, "root": name}, *adapters]})
            case "/model_info":
                given = [body["new_version"] for path, body in self.asked if path == "/update_weight_version"]
                return web.json_response({"weight_version": given[-1] if given else "default"})
            case "/v1/loads":
                load = {"num_running_reqs": self.running.pop(0) if self.running else 0, "num_waiting_reqs": 0}
                return web.json_response({"loads": [load]})
            case "/flush_cache":
                return web.Response(text="Cache flushed.", status=self.flush_status)
            case "/weights_checker":
                return self._answer_of_workers(body["action"])
            case "/v1/detokenize":
                return web.json_response({"text": "hi"})
            case "/v1/chat/completions":
                choice = {"index": 0, "response_token_ids": [5], "prompt_token_ids": [1, 2]}
                return web.json_response(self.chat or {"choices": [choice]})
        return web.json_response({"success": True})

    def called(self) -> list[tuple[str, Json]]:
        """The calls of our plugin in the workers."""
        texts = [body["action"] for path, body in self.asked if path == "/weights_checker"]
        return [call for text in texts if (call := call_of(text)) is not None]

    def _answer_of_workers(self, action: str) -> web.Response:
        call = call_of(action)
        if self.workers is None or call is None:
            return web.json_response({"success": False, "message": f"Unsupported action={action!r}"}, status=400)
        answers = self.workers.get(call[0], [None, None])
        return web.json_response({"success": True, "message": json.dumps(answers)})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in (*map(json.dumps, self.answers), "[DONE]"):
            await response.write(f"data: {event}\n\n".encode())
        return response


@pytest.fixture
def server() -> FakeSglang:
    return FakeSglang()


@pytest.fixture
async def engine(server: FakeSglang) -> AsyncIterator[SglangEngine]:
    runner = web.AppRunner(server.app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    one = SglangEngine("r1", f"http://127.0.0.1:{runner.addresses[0][1]}")
    yield one
    await one.close()
    await runner.cleanup()


async def generate(engine: SglangEngine, **fields: Any) -> Json:
    return await engine.generate(COMPLETIONS, {"model": "m", "prompt": [1, 2, 3], **fields}, TIMEOUT_S)


async def streamed(engine: SglangEngine, **fields: Any) -> list[Json]:
    body = {"model": "m", "prompt": [1, 2, 3], "return_token_ids": True, **fields}
    return [chunk async for chunk in chunks_of(engine, COMPLETIONS, body, TIMEOUT_S)]


@pytest.mark.parametrize(
    ("field", "value", "asked"),
    [
        ("max_tokens", 9, {"max_new_tokens": 9}),
        ("min_tokens", 2, {"min_new_tokens": 2}),
        ("seed", 4, {"sampling_seed": 4}),
        ("ignore_eos", True, {"ignore_eos": True}),
        ("stop", ["x"], {"stop": ["x"]}),
        ("include_stop_str_in_output", True, {"no_stop_trim": True}),
        ("top_k", 0, {}),
        ("top_k", -1, {}),
        ("top_k", 5, {"top_k": 5}),
        ("temperature", None, {}),
        ("best_of", 1, {}),
        ("structured_outputs", {"regex": "a+", "json": None}, {"regex": "a+"}),
        ("structured_outputs", {"json": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
    ],
)
async def test_a_sampling_field_has_sglangs_name(
    engine: SglangEngine, server: FakeSglang, field: str, value: Any, asked: Json
) -> None:
    await generate(engine, **{field: value})
    assert server.generated["sampling_params"] == {"max_new_tokens": 16, **asked}


async def test_a_reply_is_in_vllms_form(engine: SglangEngine, server: FakeSglang) -> None:
    reply = await generate(engine, logprobs=1, prompt_logprobs=1, return_token_ids=True)
    (choice,) = reply["choices"]
    assert choice == {
        "index": 0,
        "text": "ab",
        "token_ids": [5, 6],
        "prompt_token_ids": [1, 2, 3],
        "logprobs": {
            "text_offset": [0, 10],
            "token_logprobs": [0.0, -1.0],
            "tokens": ["token_id:5", "token_id:6"],
            "top_logprobs": [{"token_id:5": 0.0, "token_id:9": 0.0}, {"token_id:6": -1.0, "token_id:9": 0.0}],
        },
        "finish_reason": "length",
        "stop_reason": None,
        "weight_versions": [{"version": "7", "start": 0, "end": 2}],
        "prompt_logprobs": [
            None,
            {
                "2": {"logprob": -0.5, "rank": None, "decoded_token": None},
                "9": {"logprob": -0.1, "rank": 1, "decoded_token": None},
            },
            {"3": {"logprob": -0.6, "rank": 1, "decoded_token": None}},
        ],
    }
    assert (reply["object"], reply["model"], reply["id"]) == ("text_completion", "m", "cmpl-r")
    cached = {"cached_tokens": 1}
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": cached,
    }
    assert server.generated["logprob_start_len"] == 0


def counted(event: Json, count: int) -> Json:
    """A chunk with new tokens alone: SGLang counts those of the whole sample."""
    event["meta_info"]["completion_tokens"] = count
    return event


WORDS = st.lists(st.integers(1, 26), min_size=1, max_size=12)


@given(WORDS, st.sets(st.integers(1, 11)), st.booleans(), st.booleans())
def test_a_stream_has_each_token_once_whatever_its_chunks(
    ids: list[int], cuts: set[int], repeats: bool, runs_ahead: bool
) -> None:
    """SGLang may add to the ids of a chunk that repeats its sample after it has counted them."""
    text = "".join(chr(96 + token_id) for token_id in ids)
    reply = CompletionReply({"prompt": "hello", "logprobs": 0, "return_token_ids": True})
    choices: list[Json] = []
    begin = 0
    for end in sorted({cut for cut in cuts if cut < len(ids)} | {len(ids)}):
        part = slice(0 if repeats else begin, end)
        event = answer(ids[part], text[part], LENGTH if end == len(ids) else None)
        if repeats and runs_ahead:
            event["output_ids"] = ids[: end + 1]
        chunk = reply.chunk(counted(event, end))
        choices += chunk["choices"] if chunk else []
        begin = end
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == ids
    assert "".join(choice["text"] for choice in choices) == text
    assert [name for choice in choices for name in choice["logprobs"]["tokens"]] == [f"token_id:{one}" for one in ids]
    assert [choice["prompt_token_ids"] for choice in choices] == [[1, 2, 3], *[None] * (len(choices) - 1)]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


async def test_samples_of_a_stream_are_told_apart_and_counted_together(
    engine: SglangEngine, server: FakeSglang
) -> None:
    server.answers = [answer([5], "a", LENGTH, index=0), answer([7, 8], "xy", LENGTH, index=1)]
    *chunks, last = await streamed(engine, n=2, stream_options={"include_usage": True})
    assert [(one["index"], one["token_ids"]) for chunk in chunks for one in chunk["choices"]] == [(0, [5]), (1, [7, 8])]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bogus": 1}, "bogus"),
        ({"echo": True}, "echo"),
        ({"logprobs": -1}, "logprobs"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_k": [1]}, "top_k"),
        ({"seed": True}, "seed"),
        ({"stop_token_ids": [1], "ignore_eos": True}, "stop_token_ids"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice"),
        ({"prompt": [1, VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1, 2]}, "prompt"),
    ],
)
async def test_what_sglang_has_no_word_for_is_refused_as_vllm_would(
    engine: SglangEngine, server: FakeSglang, fields: Json, param: str
) -> None:
    with pytest.raises(EngineRefused) as refused:
        await generate(engine, **fields)
    error = refused.value.body["error"]
    assert (refused.value.status, error["param"], error["code"]) == (400, param, 400)
    assert server.asked == []


def aborted(ids: list[int], text: str = "", status: int | None = None) -> Json:
    """The end of a sample that was aborted; with `status` SGLang has given it up."""
    return answer(ids, text, {"type": "abort", "message": "no grammar", "status_code": status, "err_type": None})


def queue_aborted(ids: list[int], text: str) -> Json:
    """The end of a sample that is aborted in SGLang's queue, by its tokens and text; its log-probs are not cut."""
    event = aborted(ids, text)
    event["output_ids"] = ids[-1:]
    return event


def coalesced(*events: Json) -> Json:
    """Chunks that waited to be written, as SGLang joins them."""
    last = events[-1]
    meta = dict(last["meta_info"])
    for key in ("output_token_logprobs", "output_top_logprobs"):
        meta[key] = [entry for event in events for entry in event["meta_info"][key]]
    ids = [token_id for event in events for token_id in event["output_ids"]]
    return last | {"text": "".join(event["text"] for event in events), "output_ids": ids, "meta_info": meta}


FIRST = answer([5], "a")
SECOND, THIRD = counted(answer([6], "bc"), 2), counted(answer([7], "d"), 3)
ABORTED = queue_aborted([5, 6, 7], "abcd")


@pytest.mark.parametrize(
    ("events", "kept"),
    [
        ([FIRST, SECOND, THIRD, ABORTED], 3),
        ([FIRST, SECOND, coalesced(THIRD, ABORTED)], 2),
        ([coalesced(FIRST, SECOND, THIRD, ABORTED)], 0),
        ([FIRST, SECOND, THIRD, counted(aborted([7], "d"), 0)], 3),
        ([FIRST, SECOND, THIRD, counted(aborted([], "abcd"), 3)], 3),
        ([FIRST, SECOND, counted(aborted([7], "d"), 3)], 3),
        ([FIRST, answer([5, 6, 7], "abcd"), ABORTED], 3),
    ],
    ids=["all read", "one unread", "none read", "not counted", "text alone", "at work", "repeating"],
)
@pytest.mark.parametrize("index", [None, 1])
async def test_an_abort_repeats_nothing(
    engine: SglangEngine, server: FakeSglang, events: list[Json], kept: int, index: int | None
) -> None:
    server.answers = [event if index is None else event | {"index": index} for event in events]
    choices = [chunk["choices"][0] for chunk in await streamed(engine, logprobs=1)]
    ids = [token_id for choice in choices for token_id in choice["token_ids"]]
    names = [name for choice in choices for name in choice["logprobs"]["tokens"]]
    assert "".join(choice["text"] for choice in choices) == "".join(["a", "bc", "d"][:kept])
    assert (ids, names) == ([5, 6, 7][:kept], ["token_id:5", "token_id:6", "token_id:7"][:kept])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["abort"]


REFUSAL: Json = {"error": {"message": "no grammar", "code": 400}}
DEATH: Json = {"error": {"message": "died", "code": 500}}


@pytest.mark.parametrize(
    ("events", "error", "status"),
    [
        ([REFUSAL], EngineRefused, 400),
        ([aborted([], status=400)], EngineRefused, 400),
        ([aborted([], status=429)], EngineRefused, 429),
        ([DEATH], EngineFailed, None),
        ([aborted([5], "a", 500)], EngineFailed, None),
        ([FIRST, aborted([5], "a", 503)], EngineFailed, None),
        ([FIRST, counted(answer([6], "b"), 3)], EngineFailed, None),
    ],
    ids=str,
)
async def test_a_stream_that_ends_badly_is_the_requests_fault_or_the_replicas(
    engine: SglangEngine, server: FakeSglang, events: list[Json], error: type[EngineError], status: int | None
) -> None:
    server.answers = events
    with pytest.raises(error) as failed:
        await streamed(engine)
    assert failed.value.replica_id == "r1"
    if status is not None:
        vllms = {"message": "no grammar", "type": "BadRequestError", "param": None, "code": status}
        assert failed.value.body == {"error": vllms}  # type: ignore[attr-defined]


async def test_the_tokens_before_a_failure_are_passed_on(engine: SglangEngine, server: FakeSglang) -> None:
    server.answers = [FIRST, aborted([5], "a", 503)]
    chunks = chunks_of(engine, COMPLETIONS, {"prompt": [1], "return_token_ids": True}, TIMEOUT_S)
    assert (await anext(chunks))["choices"][0]["token_ids"] == [5]
    with pytest.raises(EngineFailed, match="replica r1: it ended a sample with 503: no grammar"):
        await anext(chunks)


META = {"id": "r", "finish_reason": None, "completion_tokens": 1, "prompt_tokens": 3}


@pytest.mark.parametrize(
    "garbage",
    [
        {"text": "a", "output_ids": [5]},
        {"text": "a", "output_ids": [5], "meta_info": None},
        {"text": "a", "output_ids": [5], "meta_info": {"id": "r"}},
        {"text": "a", "output_ids": [5], "meta_info": META | {"finish_reason": "length"}},
        {"text": None, "output_ids": [5], "meta_info": META},
        {"text": "a", "output_ids": None, "meta_info": META},
        {"output_ids": [5], "meta_info": META},
        [],
        [3],
        3,
    ],
    ids=str,
)
async def test_an_answer_that_is_not_sglangs_is_the_replicas_failure(
    engine: SglangEngine, server: FakeSglang, garbage: Any
) -> None:
    server.answers = garbage
    with pytest.raises(EngineFailed, match=r"its answer .* cannot be read"):
        await generate(engine, return_token_ids=True)
    server.answers = [garbage]
    with pytest.raises(EngineFailed, match=r"its answer .* cannot be read") as failed:
        await streamed(engine)
    assert failed.value.replica_id == "r1"


async def test_a_conversation_is_sglangs_own(engine: SglangEngine, server: FakeSglang) -> None:
    body = {"messages": [], "cache_salt": "v1", "structured_outputs": {"json": {"a": 1}}}
    reply = await engine.generate("/v1/chat/completions", body, TIMEOUT_S)
    assert reply == {"choices": [{"index": 0, "token_ids": [5]}], "prompt_token_ids": [1, 2]}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"a": 1}}}
    assert server.asked[-1][1] == {"messages": [], "cache_salt": "v1", "response_format": schema, "stream": False}


async def test_the_routes_of_vllm_are_answered(engine: SglangEngine) -> None:
    async def get(path: str) -> Json:
        return await engine.ask("GET", path, None, TIMEOUT_S)

    assert await get("/version") == {"version": "0.5.23"}
    assert await get("/get_world_size") == {"world_size": 6}
    assert set((await get("/openapi.json"))["paths"]) == {COMPLETIONS, "/finish_weight_update"}
    config = (await get("/server_info?config_format=json"))["vllm_config"]
    assert config["weight_transfer_config"] is not None
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["lora_config"] is None
    assert await engine.ask("POST", "/detokenize", {"tokens": [1]}, TIMEOUT_S) == {"prompt": "hi"}
    assert (await engine.weight_label(TIMEOUT_S)).version == 0


async def test_a_waiting_pause_ends_in_time(engine: SglangEngine, server: FakeSglang) -> None:
    server.running = [1] * 1000
    with pytest.raises(DeadlineExceeded, match=r"replica r1: requests still run after 0\.2 s"):
        await engine.pause(PauseMode.WAIT, clear_cache=False, timeout_s=0.2)
    assert "/pause_generation" not in server.paths()


async def test_broadcasts_of_single_tensors_are_refused_before_anybody_waits(
    engine: SglangEngine, server: FakeSglang
) -> None:
    with pytest.raises(EngineRefused, match="SGLang receives packed chunks alone"):
        await engine.open_weight_group({**GROUP, "packed": False}, TIMEOUT_S)
    assert server.asked == []


def planned(*obstacles: str) -> list[Json]:
    """Answers of workers to the preparation of updates."""
    return [{"obstacle": obstacle} for obstacle in obstacles]


async def test_the_plugin_is_found_by_its_answer_and_not_used_where_it_cannot_update(
    engine: SglangEngine, server: FakeSglang
) -> None:
    tensors = (TensorMeta(name="w", dtype="bfloat16", shape=(2, 3)),)
    told = {"tensors": [{"name": "w", "dtype": "bfloat16", "shape": [2, 3]}], "config": "{}", "tied": []}
    for answers, has_tee, obstacle in (
        (None, False, ""),
        (planned("", "enable_lora: elsewhere"), False, "enable_lora: elsewhere"),
        (planned("", ""), True, ""),
    ):
        server.workers = None if answers is None else {"plan_updates": answers}
        found = await engine.prepare_updates(tensors, "{}", (), TIMEOUT_S)
        assert found == Preparation(has_tee=has_tee, obstacle=obstacle)
        assert server.called()[-1] == ("plan_updates", told)


async def test_with_the_plugin_workers_join_receive_and_report_digests(
    engine: SglangEngine, server: FakeSglang
) -> None:
    server.workers = {"plan_updates": planned("", ""), "close_receipt": [{"w": "1"}, {"w": "1"}]}
    await engine.prepare_updates((), "", (), TIMEOUT_S)
    server.asked.clear()
    await engine.open_weight_group(
        GROUP | {"packed": True, "packed_buffer_size_bytes": 9, "packed_num_buffers": 4}, TIMEOUT_S
    )
    copy = ReceiptCopy(draft="/d", model="m", base="/m", names=("w",), wait_s=1.0)
    await engine.open_receipt(copy, TIMEOUT_S)
    await engine.start_weight_update(TIMEOUT_S)
    await engine.update_weights({"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}, TIMEOUT_S)
    assert await engine.close_receipt(TIMEOUT_S) == {"w": "1"}
    await engine.finish_weight_update("4", TIMEOUT_S)
    await engine.keep_receipt(TIMEOUT_S)
    await engine.close_weight_group(TIMEOUT_S)
    info = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
    update = {"update_info": info, "timeout_s": 0.9 * TIMEOUT_S}
    group = {"address": "h", "port": 1, "rank_offset": 1, "world_size": 2, "chunk_bytes": 9, "buffers": 4}
    assert server.called() == [
        ("open_group", group | {"timeout_s": 0.9 * TIMEOUT_S}),
        ("open_receipt", {"draft": "/d", "model": "m", "base": "/m", "names": ["w"], "wait_s": 1.0}),
        ("receive", update),
        ("close_receipt", {}),
        ("keep_receipt", {}),
        ("close_group", {}),
    ]
    labels = [body["new_version"] for path, body in server.asked if path == "/update_weight_version"]
    assert labels == ["?0", "4?0"]
    server.asked.clear()
    server.workers |= {"room_to_stage": [True, True], "staged": [True, True]}
    assert await engine.room_to_stage(7, TIMEOUT_S)
    await engine.stage_weights(info, TIMEOUT_S)
    await engine.load_staged(TIMEOUT_S)
    assert server.called() == [
        ("room_to_stage", {"num_bytes": 7}), ("stage_weights", update), ("staged", {}), ("load_staged", {}),
    ]  # fmt: skip
    server.workers["close_receipt"] = [{"w": "1"}, {"w": "2"}]
    with pytest.raises(EngineFailed, match="workers 0 and 1 received different bytes"):
        await engine.close_receipt(TIMEOUT_S)


@pytest.mark.parametrize("loaded", [True, False])
async def test_a_version_is_loaded_by_the_plugin_or_else_by_sglang_whatever_it_was_started_with(
    engine: SglangEngine, server: FakeSglang, loaded: bool
) -> None:
    server.workers = {"plan_updates": planned(""), "load_snapshot": [loaded], "prepare_snapshot": [True]}
    await engine.prepare_updates((), "", (), TIMEOUT_S)
    await engine.prepare_snapshot("/store/v3", 3, TIMEOUT_S)
    await engine.load_snapshot("/store/v3", 3, TIMEOUT_S)
    loads = [body for path, body in server.asked if path == "/update_weights_from_disk"]
    own = {"model_path": "/store/v3", "load_format": "auto", "flush_cache": False, "abort_all_requests": False}
    assert loads == ([] if loaded else [own])
    await engine.label_weights("3", TIMEOUT_S, is_committed=True)
    labels = [body for path, body in server.asked if path == "/update_weight_version"]
    assert labels == [{"new_version": label, "abort_all_requests": False} for label in ("?0", "3")]


async def test_an_adapter_is_chosen_by_the_model_that_names_it_whoever_has_loaded_it(
    server: FakeSglang, engine: SglangEngine
) -> None:
    await generate(engine, model="v1")
    assert server.generated["lora_path"] == "v1"
    await generate(engine, model="m")
    assert "lora_path" not in server.generated
    chat = {"model": "v1", "messages": [{"role": "user", "content": "hi"}]}
    await engine.generate("/v1/chat/completions", chat, TIMEOUT_S)
    assert server.asked[-1][1]["lora_path"] == "v1"


async def test_the_first_requests_of_an_engine_ask_once_for_the_name_of_its_model(
    server: FakeSglang, engine: SglangEngine
) -> None:
    """SGLang answers /server_info after a step of its scheduler, one request after the other."""
    await asyncio.gather(*(generate(engine, model="m") for _ in range(20)))
    assert server.paths().count("/server_info") == 1


async def test_adapters_are_loaded_listed_and_unloaded(server: FakeSglang, engine: SglangEngine) -> None:
    await engine.load_lora_adapter("v1", "/a/v1", TIMEOUT_S)
    assert server.asked[-1] == ("/load_lora_adapter", {"lora_name": "v1", "lora_path": "/a/v1"})
    server.knows_v1 = True
    assert await engine.lora_adapters(TIMEOUT_S) == {"v1": "/a/v1"}
    await engine.unload_lora_adapter("v1", TIMEOUT_S)
    assert server.asked[-1] == ("/unload_lora_adapter", {"lora_name": "v1"})
    server.knows_v1 = False
    await engine.unload_lora_adapter("v1", TIMEOUT_S)
    assert server.paths().count("/unload_lora_adapter") == 1
