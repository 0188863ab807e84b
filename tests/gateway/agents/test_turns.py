"""Turns are generated on the path of token ids where an engine renders them, and else as conversations."""

from dataclasses import replace
from typing import Any

from tests.rigs.rig import Json, Rig

# The simulated engine answers this with 81 tokens at temperature 0.
HELLO: Any = [{"role": "user", "content": "three"}]
ASKED: Json = {"model": "sim", "max_tokens": 8, "temperature": 0.0, "messages": HELLO}


async def test_engines_that_do_not_render_are_asked_for_the_chat(rig: Rig) -> None:
    _, rendered = await rig.post("/v1/messages", ASKED)
    for replica in rig.fleet.replicas:
        routes = (route for route in replica.info.capabilities if not route.endswith("render"))
        replica.info = replace(replica.info, capabilities=frozenset(routes))
    status, reply = await rig.post("/v1/messages", ASKED)
    assert (status, reply["content"], reply["usage"]) == (200, rendered["content"], rendered["usage"])
    status, reply = await rig.post("/v1/messages/count_tokens", ASKED)
    assert (status, reply["error"]["type"]) == (404, "not_found_error")


async def test_an_answer_ends_before_its_stop_string(rig: Rig) -> None:
    _, whole = await rig.post("/v1/messages", ASKED)
    text = whole["content"][0]["text"]
    status, reply = await rig.post("/v1/messages", ASKED | {"stop_sequences": [text[3:6]]})
    assert (status, reply["stop_reason"], reply["stop_sequence"]) == (200, "stop_sequence", text[3:6])
    assert reply["content"][0]["text"] == text[:3]
    assert reply["usage"]["output_tokens"] == 6
