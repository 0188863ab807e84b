"""Alert rules and dashboard for Prometheus and Grafana: their expressions are right and ask for metrics that exist."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.rigs.rig import StartRig

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
PROMETHEUS_OWN = {"up"}
# Of engines that decode speculatively; tests/engines/inside_vllm/test_real_draft.py reads them.
_DRAFTS = {"vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"}
_WORDS = {"sum", "by", "min", "max", "rate", "increase", "histogram_quantile", "instance", "group", "replica", "le"}
_WORDS |= {"model", "step", "status", "reason", "behind", "label_values"}


def expressions() -> Iterator[str]:
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    board = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query")


def metrics_in(expression: str) -> set[str]:
    bare = re.sub(r'\{[^}]*\}|\[[^]]*\]|"[^"]*"', "", expression)
    return set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", bare)) - _WORDS


async def test_each_metric_of_an_expression_exists_on_a_live_page(start_rig: StartRig) -> None:
    rig = await start_rig(2, sim={"decode_step_s": 0.0})
    await rig.open_group()
    await rig.update()
    await rig.complete([[3, index] for index in range(32)], max_tokens=128, ignore_eos=True)
    async with rig.client.get(rig.url + "/metrics") as response:
        page = await response.text()
    exist = {line.partition("{")[0].partition(" ")[0] for line in page.splitlines() if not line.startswith("#")}
    asked = set().union(*map(metrics_in, expressions())) - PROMETHEUS_OWN - _DRAFTS
    assert len(asked) > 10
    assert asked <= exist, sorted(asked - exist)


def test_promtool_accepts_rules_configuration_and_every_expression(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    panels = [
        {"record": f"panel:{number}", "expr": one} for number, one in enumerate(expressions()) if "label_" not in one
    ]
    shown = tmp_path / "panels.yml"
    shown.write_text(json.dumps({"groups": [{"name": "panels", "rules": panels}]}).replace("$instance", ".*"))
    for words in (
        ["rules", str(FOLDER / "alerts.yml")],
        ["rules", str(shown)],
        ["config", str(FOLDER / "prometheus.yml")],
    ):
        done = subprocess.run([promtool, "check", *words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
