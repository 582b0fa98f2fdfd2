"""Explain a run without starting or writing anything: `python -m rl.simple_grpo_sum_digits
--explain`.

The explanation is one dict of sections, printed whole as JSON or as YAML, or as the twelve lines of
`actors.preflight.summary`; sizes are in GB of 10^9 bytes. Refusals come from the run's own checks:
all of them, not only the first. An option without effect is declared beside its field
(`rl.config.configurable`).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from actors.config import RunConfig
from actors.launch.placement import fit_to_devices, trains_on_gpu
from actors.preflight.arithmetic import (
    bound_staleness,
    check_fits,
    check_gpu_memory,
    compute_step_arithmetic,
    describe_layout,
    describe_memory,
    try_to_find,
)
from actors.preflight.checks import (
    Faults,
    Machine,
    check_disk,
    check_source,
    find_config_faults,
    find_machine_faults,
)
from actors.preflight.plan import (
    describe_data,
    describe_skip,
    find_resumed_source,
    find_source,
    find_untrained_start,
    make_run_renderer,
    set_arithmetic,
)
from actors.preflight.summary import summarize
from actors.preflight.task import check_problems
from rl.config.configurable import Configurable, find_idle_options
from rl.config.json import find_differences, to_dict, walk_leaves
from rl.config.registry import ExplanationForm, RunRequest
from rl.config.tree import walk
from rl.models.files.assets import UnpreparedError, read_unprepared_config
from rl.models.model_cost import count_work
from rl.models.spec import ModelSpec, spec_from_hf
from rl.observability.run_folder import RunFolder, check_free
from rl.run_rules import RULES
from rl.starting_point import StartingPoint
from rl.tasks.task import Task
from rl.training.checkpoints.config import LoadSource
from rl.utils.printing import print_error, print_text

WIDTH = 110
ASSUMED_GPU_BYTES = 80 * 10**9
"""Memory of the GPUs that the shipped configs are made for."""
PROGRAMS = "rl.tasks.verifiers_task"
"""Module of tasks made of third-party programs, which loading might start."""
NOT_TRIED = (
    "whether prompts fit, and environments and reward functions work: a run tries them before it "
    "starts, also with --launch.dry_run"
)


def show(request: RunRequest, *, form: ExplanationForm, here: Machine) -> int:
    """Print the explanation of a run and return the exit status.

    The status is 2 for a run that could not start, on any machine or on this one (the reasons also
    go to stderr), else 0.
    """
    explanation = explain(request, here=here)
    if form == "text":
        print_text(summarize(explanation))
    else:
        as_json = json.dumps(explanation, indent=2, allow_nan=False)
        as_yaml = yaml.safe_dump(json.loads(as_json), sort_keys=False, width=WIDTH)
        print_text(as_json if form == "json" else as_yaml)
    options = explanation["options"]
    for reason in options["refused"]:
        print_error(f"error: {reason}")
    for reason in options["refused_here"]:
        print_error(f"error: this run could not start here: {reason}")
    return 2 if options["refused"] or options["refused_here"] else 0


def explain(request: RunRequest, *, here: Machine) -> dict[str, Any]:
    """Explain a run of a `RunConfig` that would be started on the machine `here`."""
    config = request.config
    found = _search(config, resumes=request.resumes)

    # The machine first: values that the config leaves to the devices, and so all checks, follow
    # from it.
    machine, devices = choose_machine(config, spec=found.spec, here=here)
    config = fit_to_devices(config, num_gpus=machine.num_gpus)
    spec = set_arithmetic(
        found.spec, batch_invariant=config.batch_invariant, float32_head=config.float32_head
    )
    on_gpu = trains_on_gpu(config.launch, num_gpus=machine.num_gpus)
    refused = find_config_faults(
        config, spec=spec, num_gpus=machine.num_gpus, resumes=request.resumes is not None
    )
    _find_faults_here(
        found,
        config,
        spec=spec,
        machine=machine,
        here=here,
        on_gpu=on_gpu,
        is_refused=bool(refused),
    )

    values, changes = to_dict(config), _find_changes(request)
    return {
        "config": request.origin,
        "model": f"{spec.name} {spec.flavor}",
        "parameters": count_work(spec.model).parameters,
        "devices": devices,
        "values": dict(walk_leaves(values)),
        "changes": changes,
        "data": _describe_data(found.task),
        "step": compute_step_arithmetic(config.loop, max_model_len=config.generator.max_model_len),
        "staleness": bound_staleness(config.loop),
        "layout": try_to_find(lambda: describe_layout(config, num_gpus=machine.num_gpus)),
        "memory": describe_memory(
            config.trainer, config.generator, spec=spec, machine=machine, on_gpu=on_gpu
        ),
        "options": {
            # Two checks can find the same fault, such as a pipeline that cannot be divided.
            "refused": list(dict.fromkeys(refused)),
            "refused_here": list(found.faults),
            **list_idle_options(config, changed=changes),
        },
        "rules": {str(rule): rule.judge(config) for rule in RULES},
        "not_checked": found.not_checked,
    }


def _find_faults_here(
    found: _Found,
    config: RunConfig,
    *,
    spec: ModelSpec,
    machine: Machine,
    here: Machine,
    on_gpu: bool,
    is_refused: bool,
) -> None:
    """Add the reasons for which the run could not start on this machine to those found before."""
    faults = found.faults
    if machine.num_gpus > here.num_gpus:
        needed = f"{machine.num_gpus} GPU{'s' * (machine.num_gpus > 1)}"
        faults.append(f"it needs {needed}, and this machine has {here.num_gpus}")
    # Estimates of a refused layout would be errors of their own, about nothing new.
    if is_refused:
        return

    faults += find_machine_faults(config, spec=spec, machine=machine)
    if machine == here:
        with faults.collect():
            check_disk(config, spec=spec)
    # Memory of GPUs that are elsewhere, or not there, is not known.
    if on_gpu and machine == here and here.gpu_bytes and not config.launch.on_cluster:
        with faults.collect():
            check_gpu_memory(config.trainer, spec=spec, gpu_bytes=here.gpu_bytes)
    with faults.collect():
        if found.start is not None:
            check_source(
                found.source,
                start=found.start,
                trainer=config.trainer,
                num_steps=config.loop.num_steps,
                on_gpu=on_gpu,
            )
    with faults.collect():
        if found.task is not None:
            exclude = config.trainer.checkpoint.exclude_from_loading
            check_problems(found.source, found.task, seed=config.seed, exclude=exclude)


def _describe_data(task: Task | None) -> str:
    if task is None:
        return "unknown"
    return describe_data(task) or f"problems of {type(task).__name__}"


def _find_changes(request: RunRequest) -> dict[str, dict[str, Any]]:
    """Return the values that differ from those of the registry's config, with both."""
    if request.defaults is None:  # a script made the config
        return {}
    changes: dict[str, dict[str, Any]] = {}
    for path, pair in find_differences(to_dict(request.config), to_dict(request.defaults)).items():
        changes[path] = {"value": pair[1], "registry": pair[0]}
    return changes


def find_options_set_in_vain(request: RunRequest) -> list[str]:
    """Return the options without effect that differ from those of the registry's config."""
    return list_idle_options(request.config, changed=_find_changes(request))["set_without_effect"]


@dataclass(kw_only=True, slots=True)
class _Found:
    """Parts of a run as far as this machine has them."""

    spec: ModelSpec
    start: StartingPoint | None = None
    task: Task | None = None
    """The task, unless it runs third-party programs."""
    source: LoadSource | None = None
    """Checkpoint that the run would load before its first step."""
    faults: Faults = field(default_factory=Faults)
    """Reasons to refuse the run on this machine."""
    not_checked: list[str] = field(default_factory=list)


def _search(config: RunConfig, *, resumes: Path | None) -> _Found:
    """Look for everything that the config names; `resumes` is the folder of a resumed run."""
    if config.model is None:
        try:
            found = _Found(spec=find_untrained_start(config, prepares=False).spec)
        except UnpreparedError:
            assert config.hf_assets_path is not None  # nothing else is prepared
            settings = read_unprepared_config(config.hf_assets_path, revision=config.hf_revision)
            found = _Found(spec=spec_from_hf(settings))
    else:
        spec = set_arithmetic(
            config.model, batch_invariant=config.batch_invariant, float32_head=config.float32_head
        )
        found = _Found(spec=spec)
    with found.faults.collect(f"hf_assets_path={config.hf_assets_path!r}: "):
        # A warm-up changes no shape; an earlier run's warm-up is found when the run starts.
        try:
            found.start = find_untrained_start(config, prepares=False)
            found.spec = found.start.spec
        except UnpreparedError as unprepared:
            found.not_checked.append(str(unprepared))
    with found.faults.collect():
        if found.start is not None:
            make_run_renderer(config.renderer, found.start)

    # To open such a task may start programs, which an explanation must not do.
    if any(cls.__module__ == PROGRAMS for cls in config.task.owner.__mro__):
        found.not_checked.append("problems of the task, which runs third-party programs")
    else:
        with found.faults.collect("task: "):
            task: Task = config.task.build()
            next(iter(task.train_problems(seed=config.seed)), None)
            if config.loop.eval_every:
                task.eval_sets()
            found.task = task

    checkpoint = config.trainer.checkpoint
    with found.faults.collect():
        if resumes is not None:
            folder = RunFolder.to_read(resumes, checkpoints=checkpoint.shared_folder)
            found.source = find_resumed_source(
                checkpoint,
                folder,
                num_steps=config.loop.num_steps,
                skip=lambda path, error: found.not_checked.append(describe_skip(path, error)),
            )
        elif config.name is not None:
            # A run without a name gets a free one.
            path = Path(config.dump_folder).expanduser().absolute() / config.name
            check_free(path, overwrite=config.overwrite)
        found.source = found.source or find_source(checkpoint, None, repairs=False)
    found.not_checked.append(NOT_TRIED)
    return found


def choose_machine(config: RunConfig, *, spec: ModelSpec, here: Machine) -> tuple[Machine, str]:
    """Return the machine to explain for, with its devices in words.

    GPUs are assumed where the config names GPUs, has hosts that bring them, or needs more memory
    than a machine without GPUs has.
    """
    launch, trainer, generator = config.launch, config.trainer, config.generator
    # Memory of GPUs that are elsewhere, or not there, cannot be measured.
    on_gpu = trains_on_gpu(launch, num_gpus=here.num_gpus)
    with_gpus = replace(here, gpu_bytes=here.gpu_bytes or ASSUMED_GPU_BYTES)
    size = f"{(with_gpus.gpu_bytes or 0) / 1e9:.0f} GB"
    if launch.on_cluster and on_gpu:
        return with_gpus, f"GPUs of {size} on the hosts of {launch.hosts}"

    named = (*(launch.trainer_gpus or ()), *(launch.generator_gpus or ()))
    of_role = (trainer.num_procs, generator.num_replicas * generator.tensor_parallel_degree)
    takes_turns = launch.share_gpus or (
        launch.share_gpus is None and not config.loop.max_off_policy_steps
    )
    needed = max(max(of_role) if takes_turns else sum(of_role), 1 + max(named, default=-1))

    # A config that fits this machine's memory is explained as it would run here: on its CPUs.
    lacks_gpus = not launch.on_cluster and needed > here.num_gpus
    if lacks_gpus and (
        here.num_gpus
        or named
        or not check_fits(trainer, spec=spec, available=here.memory_bytes, on_gpu=False)
    ):
        devices = f"{needed} GPU{'s' * (needed > 1)} of {size}: this machine has {here.num_gpus}"
        return replace(with_gpus, num_gpus=needed), devices
    return here, f"{'GPUs' if on_gpu else 'CPU cores'} of this machine"


def list_idle_options(
    config: Configurable.Config, *, changed: Collection[str]
) -> dict[str, list[str]]:
    """Return the options without effect in the order of the config, those that are set (`changed`)
    first.
    """
    idle = set(find_idle_options(config))
    set_in_vain: list[str] = []
    others: list[str] = []
    for entry in walk(config):
        if entry.path not in idle:
            continue
        name = f"{entry.path}.*" if entry.kind == "node" else entry.path
        is_set = any(_is_below(change, entry.path) for change in changed)
        (set_in_vain if is_set else others).append(name)
    return {"set_without_effect": set_in_vain, "without_effect": others}


def _is_below(path: str, component: str) -> bool:
    return f"{path}.".startswith(f"{component}.")
