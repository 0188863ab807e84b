"""Places of engines: who takes which, what counts as a restart, and what outlives the gateway."""

from dataclasses import replace
from pathlib import Path

from engines.types import EngineKind, ReplicaInfo
from gateway.fleet.places import Places

_ANY = ReplicaInfo(
    replica_id="engine-a",
    incarnation="a@1",
    group="engine",
    kind=EngineKind.SIM,
    url="",
    model="sim",
    world_size=1,
    max_model_len=128,
    max_num_seqs=8,
    engine_version="",
)


def engine(name: str, start: int = 1) -> ReplicaInfo:
    return replace(_ANY, replica_id=f"engine-{name}", incarnation=f"{name}@{start}")


def test_a_successor_takes_the_place_of_an_engine_that_is_gone_and_counts_as_its_restart() -> None:
    places = Places()
    assert places.take(engine("a"), {"engine-a", "engine-b"}) == (0, 0)
    assert places.take(engine("b"), {"engine-a", "engine-b"}) == (1, 0)
    assert places.take(engine("c"), {"engine-b", "engine-c"}) == (0, 1)
    assert places.take(engine("d"), {"engine-b", "engine-d"}) == (0, 2)
    assert places.take(engine("e"), {"engine-d", "engine-e"}) == (1, 1)


def test_an_engine_that_comes_back_keeps_its_place_and_only_a_new_start_counts() -> None:
    places = Places()
    places.take(engine("a"), {"engine-a"})
    assert places.take(engine("a"), {"engine-a"}) == (0, 0)
    assert places.take(engine("a", start=2), {"engine-a"}) == (0, 1)


def test_an_engine_that_was_removed_on_purpose_leaves_no_restart_behind() -> None:
    places = Places()
    places.take(engine("a"), {"engine-a"})
    places.take(engine("b"), {"engine-b"})
    places.leave("engine", 0)
    assert places.take(engine("c"), {"engine-c"}) == (0, 0)


def test_places_and_restarts_outlive_the_gateway_in_whatever_order_engines_join_again(tmp_path: Path) -> None:
    first = Places()
    first.keep_in(tmp_path, "as deployed")
    for name in "abc":
        first.take(engine(name), {"engine-a", "engine-b"})
    first.flush(20.0)
    second = Places()
    second.keep_in(tmp_path, "as deployed")
    present = {"engine-d", "engine-b", "engine-c"}
    assert second.take(engine("d"), present) == (0, 1), "it was started while no gateway was there"
    assert second.take(engine("c"), present) == (2, 0)
    assert second.take(engine("b"), present) == (1, 0)


def test_another_configuration_counts_from_0(tmp_path: Path) -> None:
    first = Places()
    first.keep_in(tmp_path, "before")
    first.take(engine("a"), {"engine-a"})
    first.flush(20.0)
    second = Places()
    second.keep_in(tmp_path, "after")
    assert second.take(engine("b"), {"engine-b"}) == (0, 0)


def test_a_file_that_cannot_be_read_or_written_costs_nothing_but_the_count(tmp_path: Path) -> None:
    (tmp_path / "places.json").write_text('{"groups": {"engine": [')
    damaged, nowhere = Places(), Places()
    damaged.keep_in(tmp_path, "as deployed")
    nowhere.keep_in(tmp_path / "nowhere", "as deployed")
    for places in (damaged, nowhere):
        assert places.take(engine("a"), {"engine-a"}) == (0, 0)
        assert places.take(engine("b"), {"engine-b"}) == (0, 1)
