"""The weights it came with, and updates over the transport that it declares, seen in what it scores and says."""

import pytest

from engines.errors import EngineError, EngineRefused
from engines.types import PauseMode
from engines.weight_label import WeightLabel
from tests.engines.conformance.lacks import declared, lack_of, not_run
from tests.engines.conformance.subject import REQUEST_S, Subject
from tests.engines.conformance.trainers import SEQUENCE, Trainer, mean_distance

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_it_starts_with_the_weights_of_its_checkpoint(engine: Subject, someone_with_weights: Trainer) -> None:
    if engine.info.tensors is None or engine.config.load_format == "dummy":
        not_run("the engine was started without a checkpoint")
    told = await engine.logprobs_of(SEQUENCE)
    expected = someone_with_weights.weights.logprobs_at_start(SEQUENCE)
    assert mean_distance(told, expected) < engine.tolerance
    others = someone_with_weights.logprobs_of(SEQUENCE, seed=11, version=1)
    assert mean_distance(told, expected) < mean_distance(told, others) / 4


async def test_after_an_update_it_scores_as_the_weights_sent(engine: Subject, trainer: Trainer) -> None:
    for version, seed, other in ((1, 11, 12), (2, 12, 11), (3, 11, 12)):
        await trainer.update(seed=seed, version=version)
        await _scores_as(engine, trainer, version=version, seed=seed, other=other)


async def test_it_says_which_version_it_holds(engine: Subject, trainer: Trainer) -> None:
    await trainer.update(seed=11, version=7)
    assert await engine.engine.weight_label(REQUEST_S) == WeightLabel("7-0000000a", "0")
    await engine.engine.label_weights("7-0000000a", REQUEST_S, is_committed=True)
    assert (await engine.engine.weight_label(REQUEST_S)).is_committed


async def test_a_kept_request_goes_on_with_the_new_weights(engine: Subject, trainer: Trainer) -> None:
    old = await engine.token_ids(max_tokens=engine.long)
    async with engine.running() as request:
        await trainer.update(seed=12, version=8)
        await request.finished()
    assert len(request.token_ids) == engine.long
    assert request.finish_reason == "length"
    assert request.token_ids != old


async def test_a_kept_request_tells_which_version_made_which_tokens(engine: Subject, trainer: Trainer) -> None:
    await trainer.update(seed=11, version=9)
    async with engine.running() as request:
        await trainer.update(seed=12, version=10)
        await request.finished()
    spans = request.choices[-1].get("weight_versions")
    if lack := lack_of("spans", engine):
        assert spans is None
        declared(lack)
    assert spans is not None
    (one, start, middle), (other, also_middle, end) = [(span["version"], span["start"], span["end"]) for span in spans]
    assert (WeightLabel.read(one).version, WeightLabel.read(other).version) == (9, 10)
    assert (start, end) == (0, engine.long)
    assert 0 < middle == also_middle < end


async def test_an_abandoned_update_does_not_hinder_the_next(engine: Subject, trainer: Trainer) -> None:
    async with engine.paused(PauseMode.KEEP):
        await engine.engine.start_weight_update(REQUEST_S)
        await engine.engine.abandon_weight_update(REQUEST_S)
    await trainer.update(seed=12, version=11)
    await _scores_as(engine, trainer, version=11, seed=12, other=11)


async def test_an_update_of_an_unknown_tensor_fails_and_the_next_is_good(engine: Subject, trainer: Trainer) -> None:
    if not trainer.is_let_go:
        not_run("over this transport nobody can tell a sender that its receiver gave up")
    names = trainer.weights.announced()["names"]
    async with engine.paused(PauseMode.KEEP):
        await engine.engine.start_weight_update(REQUEST_S)
        sending = trainer.send(11, names=["no_such_tensor", *names[1:]])
        if lack := lack_of("unknown tensors", engine):
            await sending
            await engine.engine.abandon_weight_update(REQUEST_S)
            declared(lack)
        with pytest.raises(EngineError):
            await sending
        await engine.engine.abandon_weight_update(REQUEST_S)
    await trainer.join()
    await trainer.update(seed=11, version=12)
    await _scores_as(engine, trainer, version=12, seed=11, other=12)


async def test_a_trainer_may_leave_and_another_come(engine: Subject, trainer: Trainer) -> None:
    if lack := lack_of("close_group", engine):
        with pytest.raises(EngineRefused):
            await engine.engine.close_weight_group(REQUEST_S)
        declared(lack)
    await trainer.leave()
    await trainer.join()
    await trainer.update(seed=12, version=13)
    await _scores_as(engine, trainer, version=13, seed=12, other=11)


async def _scores_as(engine: Subject, trainer: Trainer, *, version: int, seed: int, other: int) -> None:
    """Its log-probabilities are nearer to those of the weights sent than a quarter of the way to other weights'."""
    told = await engine.logprobs_of(SEQUENCE)
    expected = trainer.logprobs_of(SEQUENCE, seed=seed, version=version)
    elsewhere = trainer.logprobs_of(SEQUENCE, seed=other, version=version + 1)
    assert mean_distance(told, expected) < mean_distance(elsewhere, expected) / 4
    assert mean_distance(told, expected) < engine.tolerance
