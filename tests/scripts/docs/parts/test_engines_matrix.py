"""docs/engines.md: what the results say, and nothing else."""

from scripts.docs.parts.engines_matrix import page

RESULT = {
    "kind": "vllm",
    "engine_version": "0.1",
    "device": "CPU",
    "model": "tiny",
    "dtype": "float32",
    "date": "2026-01-01",
    "checks": {
        "it runs": "yes",
        "it sings": "no: it has no voice",
        "it jumps": "not run: no ground",
        "it ends": "FAIL",
    },
}


def test_each_check_has_its_outcome_for_each_engine_and_reasons_stand_below() -> None:
    other = RESULT | {"kind": "sim", "device": "CPU", "engine_version": "1", "checks": {"it runs": "FAIL"}}
    told = page([other, RESULT], [])
    assert "| check | simulated 1 on CPU | vLLM 0.1 on CPU |" in told
    assert "| it runs | FAIL | yes |" in told
    assert "| it sings | not run | no |" in told
    assert "* vLLM 0.1 on CPU, “it sings”: **no: it has no voice**" in told
    assert "| vLLM 0.1 | CPU | tiny | float32 | 2026-01-01 | 1 yes, 1 no, 1 not run, 1 FAIL |" in told
