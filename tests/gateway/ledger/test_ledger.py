"""The ledger: it gives back what was written, whatever is cut or spoilt, and a disk that fails ends it alone."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.ledger import ledger as ledger_module
from gateway.ledger.folder import Folder, Left
from gateway.ledger.ledger import Ledger, Record, remove_unless_needed
from tests.rigs.calls import until

_HOLDER = """
import sys, time
from pathlib import Path
from gateway.ledger.folder import Folder
folder = Folder(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


class Word(msgspec.Struct):
    text: bytes


def texts(left: Left) -> list[bytes]:
    head, *later = left.frames
    steps = [step for frame in later for step in msgspec.msgpack.decode(frame, type=list[Word])]
    return [word.text for word in (msgspec.msgpack.decode(head, type=Word), *steps)]


class User:
    """A user with one record."""

    kind = "word"

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.record = Record.new(ledger, self.kind)
        self.left: dict[str, list[bytes]] = {}
        ledger.add(self)

    def bring_back(self, left: Sequence[Left]) -> None:
        self.left |= {one.name: texts(one) for one in left}

    async def begin(self) -> None:
        await self.ledger.open()
        self.record.begin(Word(b"first"))
        await self.write(b"second")

    async def write(self, text: bytes) -> None:
        """Return once it was written, or given up."""
        self.record.add(Word(text))
        async with asyncio.timeout(20):
            await self.ledger.written()

    @property
    def failure(self) -> str:
        return str(self.ledger.report()["failure"])


async def found(path: Path) -> list[list[bytes]]:
    """The records of a gateway before this one."""
    user = User(Ledger(path))
    await user.ledger.open()
    await user.ledger.close()
    assert user.failure == ""
    return list(user.left.values())


@pytest.fixture
async def user(tmp_path: Path) -> User:
    user = User(Ledger(tmp_path / "mine" / "ledger"))
    await user.begin()
    return user


def path_of(user: User) -> Path:
    return Path(str(user.ledger.report()["file"]))


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


async def test_the_next_gateway_has_what_was_written(user: User) -> None:
    await user.ledger.close()
    assert await found(path_of(user)) == [[b"first", b"second"]]


async def test_a_record_of_no_user_is_dropped(user: User) -> None:
    await user.ledger.close()
    folder = Folder(path_of(user))
    folder.replace("submission-1", Word(b"of another release"))
    folder.close()
    assert await found(path_of(user)) == [[b"first", b"second"]]
    assert not (path_of(user) / "submission-1").exists()


async def test_a_record_that_is_written_anew_has_nothing_of_before_and_a_removed_one_is_gone(user: User) -> None:
    other = Record.new(user.ledger, "word")
    other.begin(Word(b"other"))
    user.record.begin(Word(b"anew"))
    other.remove()
    await user.write(b"more")
    await user.ledger.close()
    assert await found(path_of(user)) == [[b"anew", b"more"]]


@settings(max_examples=60)
@given(cut=st.integers(0, 200), spoilt=st.integers(0, 200), bit=st.integers(0, 7))
def test_frames_before_a_cut_or_a_spoilt_byte_are_read_and_go_on(
    tmp_path_factory: pytest.TempPathFactory, cut: int, spoilt: int, bit: int
) -> None:
    folder = Folder(tmp_path_factory.mktemp("ledger") / "ledger")
    words = [Word(b"%d" % number * 4) for number in range(10)]
    folder.replace("word-1", words[0])
    for word in words[1:]:
        folder.append("word-1", [word])
    file = folder.path / "word-1"
    content = bytearray(file.read_bytes())
    place = spoilt % len(content)
    content[place] ^= 1 << bit
    del content[max(place + 1, cut) :]
    file.write_bytes(content)
    [left] = folder.load()
    whole = [msgspec.msgpack.encode(value) for value in (words[0], *([word] for word in words[1:]))]
    assert left.frames == whole[: len(left.frames)]
    assert file.stat().st_size <= place
    folder.append("word-1", [Word(b"more")])
    [again] = folder.load()
    assert again.frames == [*left.frames, msgspec.msgpack.encode([Word(b"more")])]
    folder.close()


async def test_a_full_disk_ends_the_ledger_and_nobody_waits(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Folder, "append", full)
    await user.write(b"lost")
    assert "No space left" in user.failure
    await until(lambda: not path_of(user).exists())
    await user.write(b"lost too")
    assert not user.ledger.is_durable


async def test_a_disk_that_takes_no_write_is_given_up(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_STUCK_S", 0.05)
    monkeypatch.setattr(ledger_module, "_WATCH_S", 0.01)
    disk = threading.Event()
    monkeypatch.setattr(Folder, "append", lambda *_: disk.wait())
    watching = asyncio.create_task(user.ledger.run())
    await user.write(b"lost")
    assert "took no write" in user.failure
    disk.set()
    await until(lambda: not path_of(user).exists())
    watching.cancel()


async def test_a_disk_that_fails_at_the_start_leaves_the_records(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    await user.ledger.close()
    with monkeypatch.context() as disk:
        disk.setattr(Folder, "load", full)
        late = User(Ledger(path_of(user)))
        await late.ledger.open()
        assert "cannot be opened" in late.failure
    assert await found(path_of(user)) == [[b"first", b"second"]]


async def test_a_disk_that_hangs_at_the_start_holds_nobody_up(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    await user.ledger.close()
    goes_on, load = threading.Event(), Folder.load

    def hang(folder: Folder) -> list[Left]:
        goes_on.wait(60)
        return load(folder)

    with monkeypatch.context() as disk:
        disk.setattr(Folder, "load", hang)
        disk.setattr(ledger_module, "_READ_S", 0.1)
        late = User(Ledger(path_of(user)))
        async with asyncio.timeout(20):
            await late.begin()
        assert "not read within 0.1 s" in late.failure
        goes_on.set()
        await late.ledger.close()
    assert await found(path_of(user)) == [[b"first", b"second"]]


@pytest.fixture
def hold() -> Iterator[Callable[[Path], None]]:
    """Has another process hold a folder."""
    holders: list[subprocess.Popen[bytes]] = []

    def start(path: Path) -> None:
        holders.append(subprocess.Popen([sys.executable, "-c", _HOLDER, str(path)], stdout=subprocess.PIPE))
        assert holders[-1].stdout is not None
        assert holders[-1].stdout.readline() == b"held\n"

    yield start
    for holder in holders:
        holder.kill()
        holder.communicate()


async def test_the_folder_of_another_process_is_left_alone(
    user: User, monkeypatch: pytest.MonkeyPatch, hold: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(ledger_module, "_LOCKED_S", 0.2)
    await user.ledger.close()
    await asyncio.to_thread(hold, path_of(user))
    second = User(Ledger(path_of(user)))
    await second.begin()
    assert second.left == {}
    assert "another process has it open" in second.failure
    with pytest.raises(BlockingIOError):
        remove_unless_needed(path_of(user), "word")
    assert len(os.listdir(path_of(user))) == 2  # the record and the lock


async def test_it_is_removed_unless_a_record_is_needed(user: User) -> None:
    await user.ledger.close()
    path = path_of(user)
    assert remove_unless_needed(path, "word") == 1
    assert remove_unless_needed(path, "other") == 0
    assert not path.parent.exists()


async def test_a_path_that_is_no_folder_of_ours_is_no_ledger(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    user = User(Ledger(tmp_path / "taken" / "ledger"))
    await user.begin()
    assert "cannot be opened" in user.failure


def test_others_can_neither_read_nor_replace_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "mine" / "ledger")
    folder.replace("word-1", Word(b"a prompt"))
    assert [path.stat().st_mode & 0o77 for path in (folder.path, folder.path / "word-1", folder.path.parent)] == [0] * 3
    folder.close()
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="all users may replace files"):
        Folder(tmp_path / "ledger")
    tmp_path.chmod(0o1777)  # as /var/tmp: a folder there is its owner's
    Folder(tmp_path / "ledger").close()
    us, real = os.getuid(), Path.lstat
    theirs = os.stat_result([us + 1 if place == 4 else value for place, value in enumerate(real(tmp_path / "ledger"))])
    monkeypatch.setattr(Path, "lstat", lambda path: theirs if path.name == "ledger" else real(path))
    with pytest.raises(PermissionError, match=f"ledger belongs to user {us + 1}"):
        Folder(tmp_path / "ledger")
