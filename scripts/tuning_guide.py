"""Prints docs/tuning.md from the doctor's rules: `python -m scripts.tuning_guide > docs/tuning.md`."""

import sys
import textwrap
from collections.abc import Sequence

from gateway.tuning.doctor.rules.engine import ENGINE_RULES
from gateway.tuning.doctor.rules.lengths import LENGTH_RULES
from gateway.tuning.doctor.rules.live import LIVE_RULES
from gateway.tuning.doctor.rules.rule import Rule
from gateway.tuning.doctor.rules.trl import TRL_RULES
from gateway.tuning.doctor.rules.verl import VERL_RULES
from gateway.tuning.doctor.rules.verl_values import VERL_VALUE_RULES

_WIDTH = 120
_HEAD = """# Tuning

What `rollout-gateway doctor` asks of a configuration, why, and where the answer comes from. This page is printed by
`python -m scripts.tuning_guide > docs/tuning.md` from the tables of rules in `gateway/tuning/doctor/`.

    rollout-gateway doctor -c FILE.yaml                       # ours
    rollout-gateway doctor --verl train.sh                    # verl: YAML, or a script with Hydra overrides
    rollout-gateway doctor -c FILE.yaml --trl train.py --trl-processes 4
    rollout-gateway doctor --url http://127.0.0.1:8100        # what runs: settings of engines and what they did

Files are read. A shell script is expanded by a restricted bash with an empty environment, which finds no program and
writes no file; values that only a run has are listed. A finding `hurts`, is one to `consider`, or is `fine` (`--all`
shows those), and the findings with the most to gain come first. It names the value, its file and line or `default`, the
value to set, and the expected effect where one was measured. The exit code is 1 when something hurts and 2 when a file
cannot be read; `--json` prints all findings. `--verl-version` names the release of verl that will run it.
`--against FILE` compares lengths with a verl configuration that is known to be good; `--gpu-gib` is the memory of a GPU
(80 unless given).

Figures are those of [benchmarks.md](benchmarks.md): they hold for its models and machines, elsewhere they show the
direction.
"""
_SECTIONS = (
    ("Lengths", LENGTH_RULES),
    ("Engines", ENGINE_RULES),
    ("verl", (*VERL_RULES, *VERL_VALUE_RULES)),
    ("TRL", TRL_RULES),
    ("A running gateway", LIVE_RULES),
)


def page() -> str:
    """The whole of docs/tuning.md."""
    return "\n".join([_HEAD, *(line for title, rules in _SECTIONS for line in _section(title, rules))])


def _section(title: str, rules: Sequence[Rule]) -> list[str]:
    lines = [f"## {title}", ""]
    for rule in rules:
        lines += [f"### {rule.id}: {rule.asks}", ""]
        wrong = [f"Wrong is: {rule.corrects}"] if rule.corrects else []
        for text in (f"Reads {rule.reads}. {rule.why}", *wrong, f"Source: {rule.source}."):
            lines += [textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False), ""]
    return lines


if __name__ == "__main__":
    sys.stdout.write(page())
