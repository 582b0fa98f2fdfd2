"""A trainer that is lost is started again; the generators stay, and serve nothing until the next version.

The last checkpoint is loaded by whoever asked for it: until then the trainer has the weights of the start.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from actors import launch
from actors.calls import ActorCallError, ActorGroup, ActorLostError, ActorTimeoutError
from actors.fleet import Fleet, Recovery
from actors.supervision import first_line
from rl.errors import RunError
from rl.worker_thread import run_aside

logger = logging.getLogger(__name__)

GRACE_S = 3.0
"""For the trainer's processes to be seen dead: somebody who misses their answer may be the first to tell."""
ANSWER_S = 10.0
"""For those on other hosts to say that they live."""


async def revive_trainer(fleet: Fleet, error: RunError, *, at_least: int = 1) -> Fleet:
    """The fleet with another trainer, set up as at the start, in the place of one that is lost.

    Everything that was pushed is gone, and generators have dropped what they did. The loop that `error` ended
    must be closed. `at_least` is how often the trainer was lost since the run has got anywhere.

    Raises:
        RunError: `error`, where the trainer is not lost or nothing is started again.
        RestartsUsedUpError: it was lost too often.
    """
    recovery = fleet.recovery
    if recovery is None:
        raise error
    reason = await _reason(recovery.trainer, error)
    if reason is None:
        raise error

    async def start() -> ActorGroup:
        return await _started_again(fleet, recovery)

    async with recovery.pool.without_weights():
        try:
            trainer = await recovery.supervisor.again(
                recovery.trainer.name,
                reason=reason,
                start=start,
                done="is set up again",
                at_least=at_least,
            )
        except RunError as used_up:
            raise used_up from error
    return replace(fleet, trainer=trainer, recovery=replace(recovery, trainer=trainer))


async def _started_again(fleet: Fleet, recovery: Recovery) -> ActorGroup:
    starter, pool = recovery.starter, recovery.pool
    await starter.end(starter.placement.trainer)
    # Its actors are dead; what it has in files may take a while to remove.
    fleet.store.forget()
    try:
        await run_aside(fleet.store.discard, name="weight store", limit_s=fleet.store.config.timeout_s)
    except TimeoutError as slow:
        raise RunError(f"what the lost trainer has pushed cannot be removed: {slow}") from slow
    fleet.check.forget()
    trainer = await starter.trainer()
    pool.trainer = trainer
    await pool.use_store()
    return trainer


async def _reason(trainer: ActorGroup, error: RunError) -> str | None:
    """Of what the trainer is lost; None if it is not."""
    told: BaseException | None = error
    while told is not None:
        if isinstance(told, ActorLostError) and told.role == trainer.name:
            return first_line(told)
        told = told.__cause__
    if dead := await trainer.seen_dead(GRACE_S):
        return f"rank {', '.join(map(str, dead))} of {trainer.mesh.size()} is dead: its process ended"
    if len(trainer.processes) < trainer.mesh.size():
        try:
            await launch.check_answers(trainer.name, timeout_s=ANSWER_S)
        except (ActorCallError, ActorTimeoutError) as lost:
            return first_line(lost)
    return None
