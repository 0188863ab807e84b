"""Prints Hydra's own verdict on overrides of verl's example scripts, as the facts in hydra_verdicts.json.

    .venv-verl/bin/python tests/gateway/tuning/doctor/verl_trial/hydra_verdicts.py < commands.json

It runs with an interpreter that has Hydra. The input is

    [{"folder": FOLDER, "config": FILE, "choices": [...], "overrides": ["+a.b=1", ...]}, ...]

where `config` is the YAML file that a trainer of the verl in `folder` composes. For each it prints the overrides that
Hydra refuses, each by itself.
"""

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException


def refused(folder: str, config: Path, choices: list[str], overrides: list[str]) -> list[str]:
    os.chdir(folder)
    sys.path.insert(0, folder)
    with initialize_config_dir(str(config.parent.resolve()), version_base=None):
        tree: Any = compose(config.stem, overrides=choices)
    OmegaConf.set_struct(tree, True)
    parser = OverridesParser.create()
    return [override for override in overrides if _is_refused(parser, tree, override)]


def _is_refused(parser: OverridesParser, tree: Any, override: str) -> bool:
    # A value may change for those that come after; keys may not.
    own = copy.deepcopy(tree) if override[0] in "+~" else tree
    try:
        ConfigLoaderImpl._apply_overrides_to_config([parser.parse_override(override)], own)
    except (HydraException, OmegaConfBaseException):
        return True
    return False


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    answers = [refused(one["folder"], Path(one["config"]), one["choices"], one["overrides"]) for one in asked]
    json.dump(answers, sys.stdout)
