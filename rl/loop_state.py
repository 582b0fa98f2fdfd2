"""All of a loop between two steps, besides the learner's own state: what a checkpoint keeps of it.

    state = LoopState(position=..., held=..., ...)      the loop, after a step
    save_checkpoint(folder, position=state.position, attachments={ATTACHMENT: packed(state)})
    read_loop_state(folder)                             a later start of the run, or the same after a loss

The position is in the checkpoint's state.json too, and is enough to go on with: without the rest, finished
groups are drawn again and counts start anew.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rl.rollouts.producer import Held
from rl.training.checkpoint_files import DamagedCheckpointError, read_state
from rl.types import LoopPosition

ATTACHMENT = "loop.pickle"
FORMAT = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoopState:
    """Of a loop that has done `position.step` steps."""

    position: LoopPosition
    held: Held = field(default_factory=Held)
    """Groups that are finished; those under way are in `position.outstanding`, and drawn again."""
    num_empty_steps: int = 0
    """Steps in a row without a policy gradient."""
    step_of_version: Mapping[int, int] = field(default_factory=dict)
    """Step after which each policy version was published that tokens of `held` may be of."""
    drawn_with: str = ""
    """Of the settings that rollouts depend on: a loop of others has no use for `held`."""
    random_states: Mapping[str, bytes] = field(default_factory=dict)
    """By name of the process."""

    @property
    def to_draw(self) -> LoopPosition:
        """The position of a loop's problems: without those that are held finished."""
        finished = {group.number for group, _ in self.held.finished}
        left = tuple(number for number in self.position.outstanding if number not in finished)
        return replace(self.position, outstanding=left)

    def fit(self, drawn_with: str) -> LoopState:
        """For a loop of these settings: as it is, or without groups that were drawn with others."""
        if drawn_with == self.drawn_with:
            return self
        if self.held.finished or self.held.dropped:
            logger.warning(
                "%d finished groups of the checkpoint were drawn with other settings than this run's: they "
                "are drawn again", len(self.held.finished)
            )  # fmt: skip
        return replace(self, held=Held(), drawn_with=drawn_with)


def packed(state: LoopState) -> bytes:
    """For `read_loop_state`."""
    return pickle.dumps({"format": FORMAT, "state": state}, protocol=pickle.HIGHEST_PROTOCOL)


def read_loop_state(folder: str | Path) -> LoopState | None:
    """Of a checkpoint; its position alone where no more was saved, None where no loop saved it.

    The file is trusted, as all of a checkpoint is; whoever calls this has compared its checksum.

    Raises:
        DamagedCheckpointError: names the file.
    """
    position = read_state(folder).position
    if position is None:
        return None
    file = Path(folder) / ATTACHMENT
    if not file.is_file():
        return LoopState(position=position)
    try:
        content = pickle.loads(file.read_bytes())
        if content["format"] != FORMAT:
            raise TypeError(f"format {content['format']!r}, this version reads {FORMAT}")
        state = content["state"]
        assert isinstance(state, LoopState)
        return replace(state, position=position)
    except (AttributeError, ImportError, TypeError) as error:
        # Whole, but of classes that have changed since.
        logger.warning(
            "%s is of another version of the code (%s): finished groups are drawn again", file, error
        )
        return LoopState(position=position)
    except Exception as error:  # a pickle may raise anything
        raise DamagedCheckpointError(f"checkpoint file {file} is corrupted: {error!r}") from error
