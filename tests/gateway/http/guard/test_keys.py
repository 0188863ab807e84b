"""Keys in files, which rotate while the gateway runs."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.http.guard.keys import Keys, SessionKey


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def keys(clock: Clock, *items: str) -> Keys:
    return Keys("admin_keys", [SecretStr(item) for item in items], clock)


def test_a_key_has_the_name_of_its_place(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\nsecond\n")
    found = keys(Clock(), "written", f"file:{tmp_path}/keys")
    assert found.name_of("written") == "admin_keys[0]"
    assert found.name_of("second") == f"admin_keys[1], key 2 of {tmp_path}/keys"
    assert found.name_of("third") == ""
    assert found.name_of("") == ""


@pytest.mark.parametrize("spoil", [Path.unlink, lambda file: file.write_text(" \n")], ids=["gone", "empty"])
def test_a_file_without_keys_leaves_the_keys_before(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    clock, file = Clock(), tmp_path / "keys"
    file.write_text("old")
    found = keys(clock, f"file:{file}")
    spoil(file)
    clock.now = 1.0
    assert found.name_of("old")
    file.write_text("new")
    clock.now = 2.0
    assert found.name_of("new")
    assert not found.name_of("old")


def test_a_sessions_key_is_known_by_the_key_that_signed_it(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\nsecond\n")
    found = keys(Clock(), "written", f"file:{tmp_path}/keys")
    for signer in ("written", "second"):
        signed = SessionKey.read(str(SessionKey.signed("a-session_1", signer)))
        assert signed is not None
        assert (signed.session, found.signer_of(signed)) == ("a-session_1", signer)
        assert found.signer_of(signed._replace(session="another")) is None
    assert found.signer_of(SessionKey.signed("a", "third")) is None
    assert SessionKey.read("written") is None
