"""Weights that a trainer goes on from: those of a checkpoint, or of the warm-up.

Without either, a trainer keeps the weights of the starting point, with which it was set up. A
script's run starts here (`actors.run.open_run`), and so does each attempt of `actors.training`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from actors.backend import TrainerClient
from actors.calls import ActorCallError
from actors.config import RunConfig
from actors.plan import Plan
from rl.loop.warmup import SupervisedWarmup
from rl.observability.console import progress
from rl.training.checkpoint_config import LoadSource
from rl.training.checkpoint_files import DamagedCheckpointError, put_aside
from rl.training.checkpoint_tensors import exclusions_of_own

logger = logging.getLogger(__name__)


async def load_start(
    trainer: TrainerClient,
    *,
    config: RunConfig,
    plan: Plan,
    find: Callable[[], LoadSource | None] | None = None,
    may_set_aside: Callable[[LoadSource], bool] = lambda source: False,
) -> LoadSource | None:
    """Load the checkpoint to continue from, and return it; without one, make the warm-up and return
    None.

    A checkpoint with damaged tensors is set aside, and `find` is called again.

    Args:
        find: looks for the checkpoint; None takes the one of the config.

    Raises:
        DamagedCheckpointError: the checkpoint may not be set aside.
    """
    find = find or (lambda: plan.source)
    patterns = config.trainer.checkpoint.exclude_from_loading
    while (source := find()) is not None:
        exclude = (
            exclusions_of_own(patterns, model_only=source.model_only) if source.whole else None
        )
        try:
            version = await trainer.load_checkpoint(
                str(source.path), model_only=source.model_only, exclude=exclude
            )
        except DamagedCheckpointError as error:
            if not may_set_aside(source):
                raise
            put_aside(source.path, error)
        else:
            logger.info("loaded %s, policy version %d", source.path, version)
            return source
    if plan.start.warmed_up is not None:
        await _warm_up(trainer, config=config, plan=plan, destination=plan.start.warmed_up)
    return None


async def _warm_up(
    trainer: TrainerClient, *, config: RunConfig, plan: Plan, destination: Path
) -> None:
    """Train supervised steps, save them as a Hugging Face folder, and load it, as every later run
    does.
    """
    assert config.warmup is not None
    if not destination.exists():  # else a trainer that was lost since has made it
        warmup: SupervisedWarmup = config.warmup.build(
            trainer=trainer, renderer=plan.renderer, environments=plan.environments
        )
        with progress("warm-up", total=config.warmup.num_steps) as advance:
            await warmup.run(
                plan.task.warmup_problems(seed=config.seed),
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
