"""examples/verl_qwen2_7b.sh as people have it who know no gateway, with two keys that verl has renamed since."""

from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "verl_qwen2_7b.sh"
_OF_THE_GATEWAY = ("trainer.v1.trainer_mode=", "+trainer.v1.gateway.", "+ray_kwargs.ray_init.address=")


def write_production(folder: Path) -> Path:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not line.strip().startswith(_OF_THE_GATEWAY)]
    assert len(kept) == len(lines) - len(_OF_THE_GATEWAY)
    path = folder / "production.sh"
    path.write_text("".join(kept).replace("critic.fsdp.", "critic.model.fsdp_config."), encoding="utf-8")
    return path
