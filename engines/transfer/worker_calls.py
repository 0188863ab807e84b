"""Calls of our methods in SGLang's workers, as text.

SGLang has no route that reaches all workers with a call. Its `/weights_checker` passes the text of `action` to each;
our plugin (`engines/inside_sglang`) takes texts of ours there, and answers with the answers of all workers.
"""

import json
from typing import Any

_MARK = "rollout_gateway "

Call = tuple[str, dict[str, Any]]
"""Method and arguments."""


def call_text(method: str, arguments: dict[str, Any]) -> str:
    return _MARK + json.dumps([method, arguments])


def call_of(text: str) -> Call | None:
    """Return the call of a text; None for a text that is not ours."""
    if not text.startswith(_MARK):
        return None
    method, arguments = json.loads(text.removeprefix(_MARK))
    return method, arguments
