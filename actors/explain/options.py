"""Refused options and options without effect.

Refusals come from the run's own checks: all of them, not only the first. A field without effect is declared beside
the field (`rl.config.effect`), or here where fields of different components decide together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any

from actors.checks import Machine, check_source, config_faults, machine_faults, messages
from actors.explain.known import Known
from rl.config.effect import idle_options
from rl.config.tree import walk
from rl.distributed.mesh import Degrees


def option_notes(
    known: Known, *, machine: Machine, on_gpu: bool, resumes: bool, changed: Collection[str]
) -> dict[str, Any]:
    """Return refused and ineffective options, in the order of the config.

    Args:
        machine: the machine that the run is explained for.
        changed: paths of the fields that differ from the registry function.
    """
    config, spec = known.config, known.spec
    refused = list(
        dict.fromkeys(config_faults(config, spec=spec, num_gpus=machine.num_gpus, resumes=resumes))
    )
    refused_here = list(known.faults)
    if not refused:
        refused_here += machine_faults(config, spec=spec, machine=machine)
        if known.start is not None:
            check = partial(check_source, start=known.start, config=config, num_gpus=machine.num_gpus)
            refused_here += messages([partial(check, known.source)])
    entries = {entry.path: entry for entry in walk(config)}
    idle = {*idle_options(config), *idle_beside_others(known, on_gpu=on_gpu)}
    listed = [path for path in entries if path in idle and not _is_below(path, idle - {path})]
    in_vain = [path for path in listed if any(_is_below(change, {path}) for change in changed)]
    names = {path: f"{path}.*" if entries[path].kind == "node" else path for path in listed}
    return {
        "refused": refused,
        "refused_here": refused_here,
        "set_without_effect": [names[path] for path in in_vain],
        "without_effect": [names[path] for path in listed if path not in in_vain],
    }


def _is_below(path: str, components: Collection[str]) -> bool:
    """Return whether a path is one of the components or a field of one."""
    return any(f"{path}.".startswith(f"{component}.") for component in components)


def idle_beside_others(known: Known, *, on_gpu: bool) -> set[str]:
    """Return the fields without effect because of other components, the machine or the task."""
    config, trainer, loop = known.config, known.config.trainer, known.config.loop
    degrees = Degrees(dp_replicate=1, dp_shard=1, tp=1)
    with suppress(ValueError):  # The layout is refused anyway.
        degrees = trainer.parallelism.degrees(trainer.num_procs)
    is_whole = degrees.dp_replicate * degrees.fsdp == 1 and not trainer.training.cpu_offload
    packs_alone = degrees.cp > 1 or trainer.compile.includes("model") or known.spec.model.has_experts
    on_policy = loop.max_off_policy_steps == 0 and loop.num_minibatches == 1
    clips = [f"trainer.loss.{f.name}" for f in fields(trainer.loss) if f.name.startswith("clip_")]  # type: ignore[arg-type]
    has_async_rewards = known.task is None or known.task.rubric(seed=config.seed).has_async_functions
    in_one_machine = config.weights.transport == "auto" and config.launch.hosts in ("this", "process")
    rules: list[tuple[bool, Sequence[str]]] = [
        (
            loop.max_off_policy_steps == 0,
            ["generator.on_update"],
        ),  # nothing is generated while weights change
        (on_gpu, ["generator.cpu_kv_cache_gib"]),
        (not on_gpu, ["generator.gpu_memory_utilization", "generator.enforce_eager"]),
        (not on_gpu, ["trainer.training.cpu_offload"]),
        (not config.launch.share_gpus, ["generator.can_sleep"]),
        (config.generator.tensor_parallel_degree == 1, ["generator.rank_timeout_s"]),
        (trainer.num_procs == 1, ["trainer.comm"]),
        (is_whole, ["trainer.parallelism.reshard_after_forward", "trainer.training.reduce_dtype"]),
        (degrees.tp == 1, ["trainer.parallelism.loss_parallel"]),
        (packs_alone, ["trainer.training.share_prompts"]),
        (config.batch_invariant and on_policy, clips),  # every ratio is 1
        (
            known.single_turn,
            [f"loop.episode.{name}" for name in ("max_turns", "step_timeout_s", "timeout_s")],
        ),
        (not has_async_rewards, ["reward.max_concurrency"]),
        (in_one_machine, ["weights.rdma"]),
        (not config.sinks.enabled, ["sinks.write_s", "sinks.close_s"]),
    ]
    return {path for has_none, paths in rules if has_none for path in paths}
