"""Two conversations have one digest where a client has sent back what an answer said, and else two."""

from typing import Any

import pytest

from gateway.agents.history import message_digests

Json = dict[str, Any]
HELLO: Json = {"role": "user", "content": "Hello."}


def digest(*messages: Json) -> bytes:
    *_, last = message_digests(list(messages))
    return last


def said(content: Any = None, *arguments: Any, **more: Any) -> Json:
    calls = [{"id": "1", "type": "function", "function": {"name": "ls", "arguments": given}} for given in arguments]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {}), **more}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (said("Hi."), said("\nHi. ")),
        (said("Hi."), said([{"type": "text", "text": "Hi."}])),
        (said("Hi there."), said([{"type": "text", "text": "Hi "}, {"type": "text", "text": "there."}])),
        (said("Hi.", reasoning="Hm."), said("Hi.")),
        (said(None, "{}"), said("", "{}")),
        (said(None, '{"a": 1, "b": [2]}'), said(None, '{"b":[2],"a":1}')),
        (said(None, '{"a": "\\u00fc"}'), said(None, '{"a": "ü"}')),
        (said(None, '{"a": {"b": 1.0}}'), said(None, '{"a": {"b": 1}}')),
        (said(None, '{"a": 123456789012345678901234567890}'), said(None, '{"a":123456789012345678901234567890}')),
        (said(None, '{"a": 1}'), said(None, {"a": 1})),
        (said(None, ""), said(None, "{}")),
        (said(None, '{"a": '), said(None, '{"a": ')),
        (said("Hi.", tool_calls=[]), said("Hi.", tool_calls=None)),
    ],
)
def test_what_clients_change_of_an_answer_is_not_in_its_digest(one: Json, other: Json) -> None:
    assert digest(HELLO, one) == digest(HELLO, other)


def test_ids_of_calls_are_not_in_a_digest() -> None:
    other = said(None, "{}")
    other["tool_calls"][0]["id"] = "2"
    assert digest(HELLO, said(None, "{}")) == digest(HELLO, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (said("Hi."), said("Hi!")),
        (said("Hi."), {"role": "user", "content": "Hi."}),
        (said("Hi."), said("Hi.", "{}")),
        (said(None, "{}"), said(None, "{}", "{}")),
        (said(None, '{"a": 1}'), said(None, '{"a": "1"}')),
        (said(None, '{"a": 1}'), said(None, '{"a": true}')),
        (said(None, '{"a": '), said(None, '{"a":')),
        (said("", name="x"), said("x")),
    ],
)
def test_another_answer_has_another_digest(one: Json, other: Json) -> None:
    assert digest(HELLO, one) != digest(HELLO, other)


def test_images_are_in_a_digest_without_their_cache_marks() -> None:
    def seen(url: str, **more: Any) -> Json:
        return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}, **more}]}

    assert digest(seen("data:a")) != digest(seen("data:b"))
    assert digest(seen("data:a")) == digest(seen("data:a", cache_control={"type": "ephemeral"}))
