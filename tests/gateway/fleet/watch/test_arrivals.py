"""Places of engines: who takes which, and what counts as a restart."""

from dataclasses import replace

from engines.types import EngineKind, ReplicaInfo
from gateway.fleet.watch.arrivals import Places

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


def take(places: Places, info: ReplicaInfo, present: set[str]) -> tuple[int, int]:
    """The number of the engine's place, and the restarts there."""
    place = places.take(info, present)
    return place.number, place.restarts


def test_a_successor_takes_the_place_of_an_engine_that_is_gone_and_counts_as_its_restart() -> None:
    places = Places()
    assert take(places, engine("a"), {"engine-a", "engine-b"}) == (0, 0)
    assert take(places, engine("b"), {"engine-a", "engine-b"}) == (1, 0)
    assert take(places, engine("c"), {"engine-b", "engine-c"}) == (0, 1)
    assert take(places, engine("d"), {"engine-b", "engine-d"}) == (0, 2)
    assert take(places, engine("e"), {"engine-d", "engine-e"}) == (1, 1)


def test_an_engine_that_comes_back_keeps_its_place_and_only_a_new_start_counts() -> None:
    places = Places()
    take(places, engine("a"), {"engine-a"})
    assert take(places, engine("a"), {"engine-a"}) == (0, 0)
    assert take(places, engine("a", start=2), {"engine-a"}) == (0, 1)
