"""The weights that a run starts from: a checkpoint, or a supervised warm-up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from actors.launch.calls import ActorCallError
from rl.loop.warmup import SupervisedWarmup
from rl.observability.console import show_progress
from rl.training.checkpoints.config import LoadSource
from rl.training.checkpoints.files import DamagedCheckpointError, put_aside
from rl.training.checkpoints.tensors import select_own_exclusions

if TYPE_CHECKING:
    from actors.run import Run  # which loads these weights

logger = logging.getLogger(__name__)


async def load_weights(
    run: Run,
    *,
    find: Callable[[], LoadSource | None] | None = None,
    may_set_aside: Callable[[LoadSource], bool] | None = None,
) -> LoadSource | None:
    """Load the checkpoint to continue from and return it; make the warm-up if there is none.

    The warm-up of an earlier run with the same settings is the starting point already. Without a
    checkpoint and a warm-up the trainer keeps the starting point's weights, with which it was set
    up. A checkpoint with damaged tensors is set aside, and `find` is called again.

    Args:
        find: looks for the checkpoint; None takes that of the config.
        may_set_aside: says whether a damaged checkpoint is the run's own; None: none is.

    Raises:
        DamagedCheckpointError: the checkpoint may not be set aside.
    """
    patterns = run.config.trainer.checkpoint.exclude_from_loading
    while True:
        source = run.plan.source if find is None else find()
        if source is None:
            break
        exclude = None
        if source.whole:
            # A run leaves less out of its own: what is only compared, or could not be read.
            exclude = select_own_exclusions(patterns, model_only=source.model_only)
        try:
            version = await run.trainer.load_checkpoint(
                str(source.path), model_only=source.model_only, exclude=exclude
            )
        except DamagedCheckpointError as error:
            if may_set_aside is None or not may_set_aside(source):
                raise
            put_aside(source.path, error)
        else:
            logger.info("loaded %s, policy version %d", source.path, version)
            return source

    if run.plan.start.warmed_up is not None:
        await _warm_up(run, destination=run.plan.start.warmed_up)
    return None


async def _warm_up(run: Run, *, destination: Path) -> None:
    """Train supervised steps and save them as a Hugging Face folder.

    The folder is then loaded, as every later run does, so that all of them start alike.
    """
    config, trainer = run.config.warmup, run.trainer
    assert config is not None
    if not destination.exists():  # else a trainer that was lost since has made it
        warmup: SupervisedWarmup = config.build(
            trainer=trainer, renderer=run.renderer, environments=run.plan.environments
        )
        with show_progress("warm-up", total=config.num_steps) as advance:
            await warmup.run(
                run.task.warmup_problems(seed=run.config.seed),
                on_step=lambda loss: advance(note=f"loss {loss:.3f}"),
            )
        try:
            await trainer.export_hf(str(destination), dtype="float32")
        except ActorCallError:
            # Another run with the same starting point may have finished its own first.
            if not destination.exists():
                raise
    await trainer.load_checkpoint(str(destination))
    logger.info("warmed up; starting from %s", destination)
