"""What a run goes on from after it was stopped, or after it has lost its trainer: what it saved itself."""

from __future__ import annotations

from pathlib import Path

from rl.training.checkpoint_config import LoadSource
from rl.training.checkpoint_files import check_small_files, read_state
from rl.training.damaged import Skip, newest_usable, put_aside


def own_checkpoint(folder: Path, *, num_steps: int, skip: Skip = put_aside) -> LoadSource | None:
    """The latest that a run has saved in its folder and can go on from, for `num_steps` steps in all; None
    where there is none. `skip` is told of damaged ones: they are set aside. The tensors themselves are not
    read.

    Raises:
        ValueError: it cannot be continued.
    """
    return newest_usable(folder, lambda path: _continued(path, num_steps=num_steps), skip=skip)


def _continued(path: Path, *, num_steps: int) -> LoadSource:
    check_small_files(path)
    state = read_state(path)
    position = state.position
    if position is None:
        raise ValueError(f"{path} was not saved by a loop, so no run can go on from it; move it away")
    if position.step > num_steps:
        raise ValueError(
            f"loop.num_steps={num_steps}: {path} has done {position.step} steps already; must be at least as "
            "many"
        )
    if state.model_only and position.step < num_steps:
        raise ValueError(
            f"{path} holds the model alone (last_save_model_only), so it cannot be continued; move it away "
            "to go on from the step that was saved before it"
        )
    return LoadSource(
        path=path,
        model_only=state.model_only,
        in_hf=False,
        position=position,
        started_from=state.started_from,
        whole=True,
    )
