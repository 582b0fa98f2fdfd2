"""What a run would load before its first step: looked for as a run does, with nothing set aside or locked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from actors.loading import check_resumes, check_unfinished
from actors.plan import asked_source
from actors.run_config import RunConfig
from rl.observability.run_folder import RunFolder, check_free
from rl.training.checkpoint_config import LoadSource
from rl.training.checkpoint_files import DamagedCheckpointError
from rl.training.damaged import Skip
from rl.training.own_checkpoint import own_checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    source: LoadSource | None
    """None: nothing, or what a run would be refused for."""
    faults: tuple[str, ...]
    """Why a run would be refused."""
    damaged: tuple[str, ...]
    """Checkpoints that are passed over, each with its reason."""

    @property
    def done_steps(self) -> int:
        """After which the loop goes on."""
        position = None if self.source is None else self.source.position
        return 0 if position is None else position.step


def find_loaded(config: RunConfig, *, resumes: Path | None) -> Loaded:
    """`resumes` is the folder of a run that goes on."""
    damaged: list[str] = []

    def skip(path: Path, error: DamagedCheckpointError) -> None:
        damaged.append(f"{path.name} would be set aside, and an earlier one taken: {error}")

    source, faults = None, []
    try:
        if resumes is None:
            _check_place(config)
            source = asked_source(config, None, repairs=False)
        else:
            resumed = _resumed(config, resumes, skip=skip)
            source = resumed or asked_source(config, None, repairs=False)
    except (ValueError, OSError) as error:
        faults.append(str(error))
    return Loaded(source=source, faults=tuple(faults), damaged=tuple(damaged))


def _check_place(config: RunConfig) -> None:
    if config.name is not None:  # else it gets one that is free
        folder = Path(config.dump_folder).expanduser().absolute() / config.name
        check_free(folder, overwrite=config.overwrite)


def _resumed(config: RunConfig, path: Path, *, skip: Skip) -> LoadSource | None:
    """The run's own latest checkpoint."""
    checkpoint, num_steps = config.trainer.checkpoint, config.loop.num_steps
    folder = RunFolder.to_read(path, checkpoints=checkpoint.shared_folder)
    check_unfinished(folder, num_steps=num_steps)
    resumed = None
    if checkpoint.saves:
        resumed = own_checkpoint(folder.checkpoints, num_steps=num_steps, skip=skip)
    check_resumes(resumed, folder=folder, num_steps=num_steps)
    return resumed
