"""vLLM general plugin: what our engines need inside vLLM's own processes."""


def register() -> None:
    """Called by vLLM in every process it starts."""
