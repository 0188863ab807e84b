"""The files that are examined together."""

from dataclasses import dataclass
from pathlib import Path

from gateway.config.load import Setting
from gateway.config.schema import Config
from tuning.doctor.engine_view import EngineView, gateway_engines, trl_engine, trl_server, verl_engine
from tuning.doctor.files.trl import TrlFile, read_trl
from tuning.doctor.files.verl import VerlFile, read_verl
from tuning.doctor.live import Live
from tuning.doctor.workload import Workload, trl_workload, verl_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """`against` is the workload of a configuration that is known to be good; `gpu_gib` the memory of one GPU;
    `trl_processes` is None where nothing says how many train."""

    engines: tuple[EngineView, ...]
    workload: Workload
    config: Config | None = None
    verl: VerlFile | None = None
    trl: TrlFile | None = None
    trl_processes: int | None = None
    against: Workload | None = None
    live: Live | None = None
    gpu_gib: float = 80.0

    @property
    def model(self) -> str:
        """The model that is trained, else that of the first engine; "" where no file has it."""
        trained = [self.verl.values.text("actor_rollout_ref.model.path")] if self.verl else []
        trained += [self.trl.values.text("model_name_or_path")] if self.trl else []
        return next(filter(None, [*trained, *(engine.model for engine in self.engines)]), "")

    def samples_per_replica(self, engine: EngineView) -> int | None:
        """Return the completions of a step for one replica of `engine`, if the whole step goes to its group."""
        if not self.workload.samples or not engine.replicas:
            return None
        return -(-self.workload.samples // engine.replicas)


def subject_of(
    *,
    config: Config | None = None,
    settings: list[Setting] | None = None,
    verl: Path | None = None,
    trl: Path | None = None,
    trl_processes: int | None = None,
    against: Path | None = None,
    live: Live | None = None,
    gpu_gib: float = 80.0,
) -> Subject:
    """Read the files. Raise `ConfigError` where a file cannot be read. With verl and TRL the workload is verl's."""
    verl_file = read_verl(verl) if verl else None
    trl_file = read_trl(trl) if trl else None
    found = [verl_engine(verl_file) if verl_file else None]
    found += [live.engine() if live else None]
    if trl_file:
        trl_processes = trl_file.processes or trl_processes
        found += [trl_engine(trl_file.values, trl_processes or 1), trl_server(trl_file)]
    workload = Workload()
    if trl_file and trl_file.has_trainer:
        workload = trl_workload(trl_file.values, trl_processes or 1)
    if verl_file:
        workload = verl_workload(verl_file)
    return Subject(
        engines=(*(gateway_engines(config, settings or []) if config else ()), *(engine for engine in found if engine)),
        workload=workload,
        config=config,
        verl=verl_file,
        trl=trl_file,
        trl_processes=trl_processes,
        against=verl_workload(read_verl(against)) if against else None,
        live=live,
        gpu_gib=gpu_gib,
    )
