"""Values that a config leaves to the devices at hand; a run's config.json and `--explain` show what they became."""

from __future__ import annotations

from typing import Any

from actors.cluster import trains_on_gpu
from actors.config import ClusterConfig, RunConfig
from actors.placement import place_actors
from rl.config.tree import rebuild


def on_devices(config: RunConfig, *, num_gpus: int) -> RunConfig:
    """Return the config with the values that fit a machine with `num_gpus` where the config leaves them open.

    The batch-invariant mode is on where both sides have the same kernels: on CPUs. Trainer and generators share GPUs
    that are too few for both, if they may take turns.
    """
    on_gpu = trains_on_gpu(config.launch, num_gpus=num_gpus)
    changes: dict[str, Any] = {}
    if config.batch_invariant is None:
        changes["batch_invariant"] = not on_gpu
    shares = config.launch.share_gpus
    if shares is None:
        takes_turns = config.loop.max_off_policy_steps == 0 and num_gpus > 0
        shares = (
            takes_turns and not _fits(config, num_gpus=num_gpus) and fits_shared(config, num_gpus=num_gpus)
        )
        changes["launch.share_gpus"] = shares
    if shares:
        changes["generator.can_sleep"] = True
    return rebuild(config, changes)


def fits_shared(config: ClusterConfig, *, num_gpus: int) -> bool:
    """Return whether trainer and generators fit on this machine's GPUs if they take turns."""
    try:
        return _fits(rebuild(config, {"launch.share_gpus": True}), num_gpus=num_gpus)
    except ValueError:  # of other hosts, or of devices that were chosen
        return False


def _fits(config: ClusterConfig, *, num_gpus: int) -> bool:
    try:
        place_actors(config, num_gpus=num_gpus)
    except ValueError:
        return False
    return True
