"""Entry point of our plugin for an SGLang that runs in another environment than the gateway.

`engines/process/launch.py` puts this folder on the PYTHONPATH of engines, with the metadata beside this file. It makes
the package `engines` importable there, and nothing else of the gateway's environment.
"""

import importlib.util
import multiprocessing
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[2]


def register() -> None:
    """Register our hooks in SGLang's workers. SGLang calls this in each of its processes."""
    if multiprocessing.parent_process() is None:
        return  # the launcher, which serves HTTP
    if _FOLDER.name not in sys.modules:
        _import_gateways()
    from engines.inside_sglang import plugin

    plugin.register()


def _import_gateways() -> None:
    """Import the package from the gateway's folder, also where another release of it is installed."""
    spec = importlib.util.spec_from_file_location(
        _FOLDER.name, _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{_FOLDER} is no package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_FOLDER.name] = module
    spec.loader.exec_module(module)
