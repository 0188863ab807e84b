"""The prompts of a completions request."""

from engines.errors import EngineRefused
from gateway.dialects.completion_prompt import _naming_prompt


def test_an_error_that_names_its_prompt_keeps_the_engines_word_about_a_retry() -> None:
    error = EngineRefused("busy", status=429, body={"error": {"message": "busy"}}, replica_id="engine-0")
    error.retry_after_s = 5.0
    named = _naming_prompt(error, 1)
    assert (named.retry_after_s, named.replica_id) == (5.0, "engine-0")
    assert named.body["error"]["message"] == "prompt[1]: busy"
