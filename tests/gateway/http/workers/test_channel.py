"""Messages between two processes of the gateway arrive whole and in order, however their bytes come."""

import asyncio
import socket
from collections.abc import Sequence
from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.schema import Config
from gateway.http.workers.channel import Channel
from gateway.http.workers.crew import _document
from gateway.http.workers.messages import Done, FromOwner, FromWorker, Message, Over, Placed, Progress, Sync


class Ends:
    """Both ends of a channel: what has come at the right one, and whether it has ended."""

    def __init__(self) -> None:
        self.came: list[Message] = []
        self.has_ended = asyncio.Event()
        self.left: Channel[Message, Message] = Channel(FromOwner, self.came.append, lambda: None)
        self.right: Channel[Message, Message] = Channel(FromWorker, self._take, self.has_ended.set)
        self.raises = False

    async def open(self) -> "Ends":
        left, right = socket.socketpair()
        await self.left.open(left)
        await self.right.open(right)
        return self

    def _take(self, message: Message) -> None:
        if self.raises:
            raise ValueError("no")
        self.came.append(message)

    async def until(self, number: int) -> None:
        async with asyncio.timeout(20):
            while len(self.came) < number:
                await asyncio.sleep(0.001)


def framed(messages: Sequence[Message]) -> bytes:
    contents = map(msgspec.msgpack.encode, messages)
    return b"".join(len(content).to_bytes(4, "big") + content for content in contents)


NAMES = st.lists(st.text(max_size=9), max_size=3)
MESSAGES = st.one_of(
    st.builds(Over, st.integers(0, 2**62)),
    st.builds(Done, st.integers(0, 2**62)),
    st.builds(Progress, NAMES.map(tuple)),
)


@given(lists=st.lists(st.lists(MESSAGES, max_size=4), max_size=5), cuts=st.lists(st.integers(0, 300), max_size=8))
def test_messages_arrive_in_order_wherever_their_bytes_are_cut(lists: list[list[Message]], cuts: list[int]) -> None:
    came: list[Message] = []
    channel: Channel[Message, Message] = Channel(FromWorker, came.append, lambda: None)
    content = b"".join(map(framed, lists))
    places = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    for begin, end in pairwise(places):
        channel.data_received(content[begin:end])
    assert came == [message for messages in lists for message in messages]


async def test_the_end_of_one_process_ends_the_channel_of_the_other_after_its_last_message() -> None:
    ends = await Ends().open()
    ends.left.send(Done(7))
    ends.left.close()
    async with asyncio.timeout(20):
        await ends.has_ended.wait()
    assert ends.came == [Done(7)]
    ends.right.send(Sync(1))  # leads nowhere, and fails nothing


async def test_a_message_that_cannot_be_dealt_with_ends_the_channel() -> None:
    for broken in (b"\xff\xff\xff\xff", framed([Placed(1, "of the other direction")])):
        ends = await Ends().open()
        assert ends.left._transport is not None
        ends.left._transport.write(broken)
        async with asyncio.timeout(20):
            await ends.has_ended.wait()
        assert not ends.came
        ends.left.close()


def test_a_configuration_passes_to_a_worker_with_its_keys_and_without_a_bound() -> None:
    asked = {
        "engine": {"kind": "sim", "model": "m"},
        "gateway": {"queue_timeout_s": float("inf"), "admin_keys": ["secret"]},
    }
    config = Config.model_validate(asked)
    assert Config.model_validate_json(_document(config)) == config
