"""The arguments of the installed engine, read from its own parser, to check `engine.extra` before a start."""

import difflib
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from engines.errors import ConfigError
from engines.process.interpreter import Interpreter

# The parser imports the engine, which takes tens of seconds on a busy machine.
_ASK_TIMEOUT_S = 120.0

# Print the options of `vllm serve` as JSON on the last line. Module names: 0.32 first, then earlier releases.
ASK_VLLM = """
import json
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
actions = make_arg_parser(FlexibleArgumentParser())._actions
print(json.dumps(sorted({option for action in actions for option in action.option_strings})))
"""

# The same for `sglang.launch_server` of 0.5.23.
ASK_SGLANG = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps(sorted({option for action in parser._actions for option in action.option_strings})))
"""


def check_extra(extra: Iterable[str], engine: str, known: frozenset[str] | None) -> None:
    """Raise `ConfigError` with the nearest name if `known` lacks a name of `extra`; None skips the check.

    `engine` is its name and version. A dotted name sets a key of a JSON argument, as in compilation_config.mode.
    """
    if known is None:
        return
    for name in extra:
        option = name.partition(".")[0].replace("_", "-")
        if option not in known:
            close = difflib.get_close_matches(option, sorted(known), n=1, cutoff=0.5)
            advice = f"; did you mean {close[0].replace('-', '_')}?" if close else ""
            raise ConfigError(f"engine.extra.{name}: {engine} has no such argument{advice}")


def installed_arguments(name: str, script: str, interpreter: Interpreter) -> frozenset[str] | None:
    """Return the long options printed by `script`, without dashes; None if it fails.

    The result is cached in the user's cache folder under `name`, engine and version.
    """
    environ = interpreter.environ
    folder = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout-gateway"
    kept = folder / f"arguments-{name}.json"
    try:
        return _long_options(kept.read_text())
    except (OSError, ValueError):
        pass
    try:
        found = interpreter.last_line(script, _ASK_TIMEOUT_S)
        options = _long_options(found)
    except (subprocess.SubprocessError, ValueError):
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Replaced atomically: two replicas may start together.
        own = kept.with_suffix(f".{os.getpid()}")
        own.write_text(found)
        own.replace(kept)
    except OSError:
        pass  # without a writable home there is no cache
    return options


def _long_options(text: str) -> frozenset[str]:
    """Return the names in a JSON list of options; raise ValueError for other text."""
    options = json.loads(text)
    if not isinstance(options, list) or not options:
        raise ValueError(f"not a list of options: {text[:100]}")
    return frozenset(option[2:] for option in map(str, options) if option.startswith("--"))
