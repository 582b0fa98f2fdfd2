"""What a run goes on from, and whether its rollouts may be trained on."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from actors.run_config import RunConfig
from rl.config.serialize import to_dict
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import RunFolder
from rl.training.checkpoint_config import LoadSource
from rl.training.checkpoint_files import DamagedCheckpointError
from rl.training.damaged import put_aside

logger = logging.getLogger(__name__)

_NOT_OF_ROLLOUTS = {
    "num_steps", "num_minibatches", "publish_every", "max_failed_rewards", "max_empty_steps",
    "max_logprob_diff", "eval_every", "evaluation", "advantage",
}  # fmt: skip
"""Fields of the loop that the rollouts of training do not depend on."""


def drawn_with(config: RunConfig) -> str:
    """Of the settings that rollouts depend on: those of others cannot be trained on."""
    values = to_dict(config)
    loop = {name: value for name, value in values["loop"].items() if name not in _NOT_OF_ROLLOUTS}
    used = {name: values[name] for name in ("seed", "hf_assets_path", "task", "renderer", "batch_invariant")}
    text = json.dumps({**used, "loop": loop}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Loads(Protocol):
    """What of a learner is needed to load."""

    async def load_checkpoint(
        self, folder: str, *, model_only: bool = False, exclude: Sequence[str] | None = None
    ) -> int:
        """As `ActorLearner.load_checkpoint`."""
        ...


async def load_newest(
    learner: Loads,
    find: Callable[[], LoadSource | None],
    *,
    may_set_aside: Callable[[LoadSource], bool],
    exclude_of_own: Sequence[str] = (),
) -> LoadSource | None:
    """Load what `find` finds, and return it; None where there is nothing.

    A checkpoint whose tensors turn out to be damaged is set aside, and `find` is asked again. Of a run's own
    everything is loaded but `exclude_of_own`.

    Raises:
        DamagedCheckpointError: of one that may not be set aside.
    """
    while (source := find()) is not None:
        try:
            exclude = exclude_of_own if source.whole else None
            version = await learner.load_checkpoint(
                str(source.path), model_only=source.model_only, exclude=exclude
            )
        except DamagedCheckpointError as error:
            if not may_set_aside(source):
                raise
            put_aside(source.path, error)
        else:
            logger.info("loaded %s, policy version %d", source.path, version)
            return source
    return None


def check_unfinished(folder: RunFolder, *, num_steps: int) -> None:
    """Raise ValueError if a run has done these steps, by its records: whatever its checkpoints are."""
    if folder.is_finished and folder.metrics.exists():
        done = max((int(record["step"]) for record in read_metrics(folder.metrics)), default=0)
        if done >= num_steps:
            raise ValueError(_no_steps_left(folder, done=done, num_steps=num_steps))


def check_resumes(resumed: LoadSource | None, *, folder: RunFolder, num_steps: int) -> None:
    """Whether a run has steps left to do; `resumed` is its own latest checkpoint.

    Raises:
        ValueError: it is finished, or its results would be lost.
    """
    if not folder.is_finished:
        return
    position = None if resumed is None else resumed.position
    if position is None:
        raise ValueError(f"{folder.path} holds a finished run and no checkpoint that it could go on from")
    if position.step >= num_steps:
        raise ValueError(_no_steps_left(folder, done=position.step, num_steps=num_steps))


def _no_steps_left(folder: RunFolder, *, done: int, num_steps: int) -> str:
    return (
        f"{folder.path} holds a finished run of {done} steps: raise loop.num_steps={num_steps} to go on "
        "with it"
    )
