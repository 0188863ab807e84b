"""Mistakes that the tools once made, each with the test that keeps it from coming back."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from engines.errors import UsageError
from gateway.cli.main import app
from tuning.doctor.rules.all import examine
from tuning.doctor.subject import subject_of


@pytest.mark.parametrize(
    ("length", "says"), [("", "512 tokens, the default"), ("=400", "400 tokens, given"), ("=-1", "-1")]
)
def test_a_given_length_is_not_called_the_default(tmp_path: Path, length: str, says: str) -> None:
    path = tmp_path / "train.sh"
    given = f"data.max_response_length{length}" if length else "data.train_batch_size=1024"
    path.write_text(f"python -m verl.trainer.main_ppo {given} actor_rollout_ref.rollout.name=vllm\n", encoding="utf-8")
    (found,) = [one for one in examine(subject_of(verl=path)) if one.rule == "response-length"]
    assert says in found.message


def test_watching_needs_a_url_and_a_time(tmp_path: Path) -> None:
    for arguments, says in (
        (["-c", "no.yaml", "--watch", "30s"], "--watch 30s: nothing to watch: give --url URL"),
        (["--url", "http://127.0.0.1:1", "--watch", "soon"], "--watch 'soon': expected a number of seconds"),
    ):
        done = CliRunner().invoke(app, ["doctor", *arguments])
        assert isinstance(done.exception, UsageError)
        assert says in str(done.exception)
