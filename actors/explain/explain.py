"""Explain a run without starting it: `python -m rl.simple_grpo_sum_digits --explain`.

Nothing is started and nothing is written. The explanation is one dict of sections, printed as JSON or as text (YAML).
Refusals come from the run's own checks: all of them, not only the first. A field without effect is declared beside
the field (`rl.config.effect`), or here where fields of different components decide together.

Environments are built and not opened. No reward function is called.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from actors.checks import Faults, Machine, check_source, config_faults, machine_faults
from actors.cluster import trains_on_gpu
from actors.config import RunConfig
from actors.explain.numbers import (
    degrees_of,
    layout,
    memory,
    or_unknown,
    publish_bytes,
    run_arithmetic,
    staleness,
    step_arithmetic,
)
from actors.plan import asked_source, find_resumed, renderer_of, untrained_start
from rl.config.effect import idle_options
from rl.config.json import differences, leaves, to_dict
from rl.config.registry import ExplanationForm, ResolvedRun, resolve
from rl.config.tree import walk
from rl.distributed.mesh import Degrees
from rl.models.spec import ModelSpec
from rl.observability.run_folder import RunFolder, check_free
from rl.starting_point import StartingPoint
from rl.tasks.task import Task
from rl.training.checkpoint_config import LoadSource

WIDTH = 110
ASSUMED_GPU_BYTES = 80 * 10**9
"""Memory of the GPUs that the shipped configs are made for."""
PROGRAMS = "rl.tasks.verifiers_task"
"""Module of tasks made of third-party programs, which loading might start."""
NOT_TRIED = (
    "whether prompts fit, and environments and reward functions work: a run tries them before it starts, also "
    "with --launch.dry_run"
)


def show(run: ResolvedRun, *, form: ExplanationForm, here: Machine) -> int:
    """Print the explanation of a run and return the exit status.

    The status is 2 for a config that is refused on any machine (the reasons also go to stderr), else 0.
    """
    explanation = explain(run, here=here)
    print(json.dumps(explanation, indent=2, allow_nan=False) if form == "json" else as_text(explanation))
    for reason in explanation["options"]["refused"]:
        print(f"error: {reason}", file=sys.stderr)
    return 2 if explanation["options"]["refused"] else 0


def explain(run: ResolvedRun, *, here: Machine) -> dict[str, Any]:
    """Explain a run of a `RunConfig` that would be started on the machine `here`."""
    config, parts = run.config, find_parts(run.config, resumes=run.resumes)
    spec, single_turn = parts.spec, parts.has_single_turns(seed=run.config.seed)
    machine, devices = explained_on(config, spec=spec, here=here)
    on_gpu = trains_on_gpu(config.launch, num_gpus=machine.num_gpus)
    values, registry = to_dict(config), to_dict(resolve(run.module, run.function).config)
    changes = {
        path: {"value": value, "registry": before, "source": _source(run, path)}
        for path, (before, value) in differences(values, registry).items()
    }
    in_run = run_arithmetic(config, task=parts.task, done_steps=parts.done_steps, single_turn=single_turn)
    return {
        "config": f"{run.module}.{run.function}",
        "model": f"{spec.name} {spec.flavor}",
        "devices": devices,
        "values": dict(leaves(values)),
        "changes": changes,
        "step": or_unknown(lambda: step_arithmetic(config, spec=spec, single_turn=single_turn)),
        "run": in_run,
        "layout": or_unknown(lambda: layout(config, num_gpus=machine.num_gpus)),
        "memory": memory(config, spec=spec, machine=machine, on_gpu=on_gpu),
        "staleness": staleness(config.loop),
        "publish": publish_bytes(config, spec=spec, publishes=in_run["publishes"]),
        "options": {
            **refusals(config, parts, machine=machine, resumes=run.resumes is not None),
            **ineffective(config, parts, on_gpu=on_gpu, changed=changes),
        },
        "not_checked": parts.not_checked,
    }


def _source(run: ResolvedRun, path: str) -> str:
    # An option may turn off a component, and a list of components is one leaf.
    if any(_is_below(path, {option}) or _is_below(option, {path}) for option in run.options):
        return "command line"
    return "code" if run.file is None else str(run.file)


@dataclass(kw_only=True, slots=True)
class FoundParts:
    """Parts of a run as far as this machine has them; None stands for a missing one."""

    spec: ModelSpec
    start: StartingPoint | None = None
    task: Task | None = None
    source: LoadSource | None = None
    """The checkpoint that the run would load before its first step."""
    faults: Faults = field(default_factory=Faults)
    """Reasons to refuse the run on this machine."""
    not_checked: list[str] = field(default_factory=list)

    @property
    def done_steps(self) -> int:
        """Steps after which the loop goes on."""
        position = None if self.source is None else self.source.position
        return 0 if position is None else position.step

    def has_single_turns(self, *, seed: int) -> bool:
        """Return whether an episode is known to be one question and one reply."""
        if self.task is None:
            return False
        environment = self.task.environment(next(self.task.train_problems(seed=seed)))
        return getattr(environment, "single_turn", False)


def find_parts(config: RunConfig, *, resumes: Path | None = None) -> FoundParts:
    """Look for everything that the config names; `resumes` is the folder of a resumed run."""
    parts = FoundParts(spec=replace(config.model, batch_invariant=config.batch_invariant))
    with parts.faults.caught(f"hf_assets_path={config.hf_assets_path!r}: "):
        # A warm-up changes no shape; an earlier run's warm-up is found when the run starts.
        parts.start = untrained_start(config)
        parts.spec = parts.start.spec
    with parts.faults.caught():
        if parts.start is not None:
            renderer_of(config, parts.start)
    if any(cls.__module__ == PROGRAMS for cls in config.task.owner.__mro__):
        parts.not_checked.append("problems of the task, which runs third-party programs")
    else:
        with parts.faults.caught("task: "):
            task: Task = config.task.build()
            next(iter(task.train_problems(seed=config.seed)), None)
            if config.loop.eval_every:
                task.eval_sets()
            parts.task = task
    with parts.faults.caught():
        if resumes is not None:
            folder = RunFolder.to_read(resumes, checkpoints=config.trainer.checkpoint.shared_folder)
            parts.source = find_resumed(
                config,
                folder,
                skip=lambda path, error: parts.not_checked.append(
                    f"{path.name} would be set aside, and an earlier one taken: {error}"
                ),
            )
        elif config.name is not None:  # without a name the run gets a free one
            check_free(
                Path(config.dump_folder).expanduser().absolute() / config.name, overwrite=config.overwrite
            )
        parts.source = parts.source or asked_source(config, None, repairs=False)
    parts.not_checked.append(NOT_TRIED)
    return parts


def explained_on(config: RunConfig, *, spec: ModelSpec, here: Machine) -> tuple[Machine, str]:
    """Return the machine to explain for, with its devices in words.

    GPUs are assumed where the config names GPUs, has hosts that bring them, or needs more memory than a machine
    without GPUs has.
    """
    launch, trainer, generator = config.launch, config.trainer, config.generator
    size = here.gpu_bytes or ASSUMED_GPU_BYTES
    named = (*(launch.trainer_gpus or ()), *(launch.generator_gpus or ()))
    of_role = (trainer.num_procs, generator.num_replicas * generator.tensor_parallel_degree)
    needed = max(max(of_role) if launch.share_gpus else sum(of_role), 1 + max(named, default=-1))
    if launch.on_cluster:
        if trains_on_gpu(launch, num_gpus=here.num_gpus):
            return replace(
                here, gpu_bytes=size
            ), f"GPUs of {size / 1e9:.0f} GB on the hosts of {launch.hosts}"
    elif needed > here.num_gpus and (here.num_gpus or named or _exceeds_memory(config, spec, here)):
        devices = f"{needed} GPUs of {size / 1e9:.0f} GB: this machine has {here.num_gpus}"
        return replace(here, num_gpus=needed, gpu_bytes=size), devices
    return here, f"{'GPUs' if trains_on_gpu(launch, num_gpus=here.num_gpus) else 'CPU cores'} of this machine"


def _exceeds_memory(config: RunConfig, spec: ModelSpec, machine: Machine) -> bool:
    """Return whether the trainer would need more memory on CPUs than there is."""
    with suppress(ValueError):  # of a layout that is refused anyway
        rank = config.trainer.estimate_memory(spec, degrees=degrees_of(config), on_gpu=False)
        return config.trainer.num_procs * rank.total > machine.memory_bytes
    return False


def refusals(
    config: RunConfig, parts: FoundParts, *, machine: Machine, resumes: bool
) -> dict[str, list[str]]:
    """Return the reasons to refuse the run on any machine, and on this one."""
    spec, num_gpus = parts.spec, machine.num_gpus
    refused = list(dict.fromkeys(config_faults(config, spec=spec, num_gpus=num_gpus, resumes=resumes)))
    here = Faults(parts.faults)
    if not refused:
        here += machine_faults(config, spec=spec, machine=machine)
        with here.caught():
            if parts.start is not None:
                check_source(parts.source, start=parts.start, config=config, num_gpus=num_gpus)
    return {"refused": refused, "refused_here": [*here]}


def ineffective(
    config: RunConfig, parts: FoundParts, *, on_gpu: bool, changed: Collection[str]
) -> dict[str, list[str]]:
    """Return the options without effect, those set in vain apart from the others, in the order of the config.

    Args:
        changed: paths of the fields that differ from the registry function.
    """
    entries = {entry.path: entry for entry in walk(config)}
    idle = {*idle_options(config), *idle_beside_others(config, parts, on_gpu=on_gpu)}
    listed = [path for path in entries if path in idle and not _is_below(path, idle - {path})]
    names = {path: f"{path}.*" if entries[path].kind == "node" else path for path in listed}
    in_vain = [path for path in listed if any(_is_below(change, {path}) for change in changed)]
    return {
        "set_without_effect": [names[path] for path in in_vain],
        "without_effect": [names[path] for path in listed if path not in in_vain],
    }


def _is_below(path: str, components: Collection[str]) -> bool:
    """Return whether a path is one of the components or a field of one."""
    return any(f"{path}.".startswith(f"{component}.") for component in components)


def idle_beside_others(config: RunConfig, parts: FoundParts, *, on_gpu: bool) -> set[str]:
    """Return the fields without effect because of other components, the machine or the task."""
    trainer, loop, launch = config.trainer, config.loop, config.launch
    degrees = Degrees(dp_replicate=1, dp_shard=1, tp=1)
    with suppress(ValueError):  # The layout is refused anyway.
        degrees = degrees_of(config)
    is_whole = degrees.dp_replicate * degrees.fsdp == 1 and not trainer.training.cpu_offload
    packs_alone = degrees.cp > 1 or trainer.compile.includes("model") or parts.spec.model.has_experts
    on_policy = loop.max_off_policy_steps == 0
    ratios_are_1 = config.batch_invariant and on_policy and loop.num_minibatches == 1
    loss = [f.name for f in fields(trainer.loss) if f.name.startswith("clip_")]  # type: ignore[arg-type]
    task = parts.task
    has_async_rewards = task is None or task.rubric(seed=config.seed).has_async_functions
    in_one_machine = config.weights.transport == "auto" and launch.hosts in ("this", "process")
    rules = {
        "generator.on_update": on_policy,  # nothing is generated while weights change
        "generator.cpu_kv_cache_gib": on_gpu,
        "generator.gpu_memory_utilization": not on_gpu,
        "generator.enforce_eager": not on_gpu,
        "generator.can_sleep": not launch.share_gpus,
        "trainer.comm": trainer.num_procs == 1,
        "trainer.parallelism.reshard_after_forward": is_whole,
        "trainer.training.cpu_offload": not on_gpu,
        "trainer.training.reduce_dtype": is_whole,
        "trainer.training.share_prompts": packs_alone,
        "reward.max_concurrency": not has_async_rewards,
        "weights.rdma": in_one_machine,
    }
    rules |= {f"trainer.loss.{name}": ratios_are_1 for name in loss}
    if parts.has_single_turns(seed=config.seed):
        rules |= dict.fromkeys(
            (f"loop.episode.{name}" for name in ("max_turns", "step_timeout_s", "timeout_s")), True
        )
    return {path for path, is_idle in rules.items() if is_idle}


class _Text(yaml.SafeDumper):
    """YAML with lists of numbers in one line each."""

    def represent_list(self, data: list[Any]) -> yaml.Node:
        is_short = not any(isinstance(item, str | dict) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=is_short)


_Text.add_representer(list, _Text.represent_list)
_Text.add_representer(tuple, _Text.represent_list)


def as_text(explanation: Mapping[str, Any]) -> str:
    """Return all sections as YAML, one after another, with readable numbers outside of the config."""
    sections = [
        {name: section if name in ("values", "changes") else _readable(section)}
        for name, section in explanation.items()
    ]
    return "\n".join(
        yaml.dump(section, Dumper=_Text, sort_keys=False, default_flow_style=False, width=WIDTH)
        for section in sections
    )


def _readable(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _readable(inner, key) for key, inner in value.items()}
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name.endswith("_bytes"):
        return size(value)
    return f"{value:,}" if value >= 1000 else value


def size(num_bytes: int) -> str:
    """Return bytes with three digits: 2.38 MB."""
    for unit, of_unit in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= of_unit:
            digits = max(0, 3 - len(str(num_bytes // of_unit)))
            return f"{num_bytes / of_unit:.{digits}f} {unit}"
    return f"{num_bytes} bytes"
