"""A plugin of the tests in a real vLLM, beside the product's own: vLLM finds it by its metadata on the PYTHONPATH."""

import os
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def python_path(folder: Path, name: str, function: str) -> str:
    """The PYTHONPATH for an engine that shall call `function`, "module:name", in each of its processes.

    Writes the plugin's metadata into `folder`.
    """
    told = folder / f"{name}-0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (told / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {function}\n")
    return f"{folder}{os.pathsep}{_ROOT}"
