"""Model, tokenizer, task and checkpoint of a run that is not started, and the machine to explain it for.

Environments are built and not opened, except for single-turn environments, which only hold a question. No reward
function is called, and nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from actors.checks import Machine
from actors.cluster import trains_on_gpu
from actors.config import ClusterConfig, RunConfig
from actors.plan import asked_source, find_resumed, renderer_of, untrained_start
from rl.models.spec import ModelSpec
from rl.observability.run_folder import RunFolder, check_free
from rl.rollouts.environment import SingleTurn
from rl.rollouts.renderer import Renderer
from rl.starting_point import StartingPoint
from rl.tasks.task import Task
from rl.training.checkpoint_config import LoadSource
from rl.training.checkpoint_files import DamagedCheckpointError

ASSUMED_GPU_BYTES = 80 * 10**9
"""Memory of the GPUs that the shipped configs are made for."""
PROGRAMS = "rl.tasks.verifiers_task"
"""Module of tasks made of third-party programs, which loading might start."""
MOST_LONG_PROMPTS = 1000
"""Prompts that are skipped in search of the prompts of step 1."""


@dataclass(kw_only=True, slots=True)
class Known:
    """Everything that is known of a run before its start; None stands for what is missing here."""

    config: RunConfig
    spec: ModelSpec
    start: StartingPoint | None = None
    renderer: Renderer | None = None
    task: Task | None = None
    source: LoadSource | None = None
    """The checkpoint that the run would load before its first step."""
    faults: list[str]
    """Reasons to refuse the run on this machine."""
    unknown: list[str]
    """Points that are not checked."""

    @property
    def done_steps(self) -> int:
        """Steps after which the loop goes on."""
        position = None if self.source is None else self.source.position
        return 0 if position is None else position.step

    @property
    def single_turn(self) -> bool:
        """True if an episode is known to be one question and one reply."""
        if self.task is None:
            return False
        problem = next(self.task.train_problems(seed=self.config.seed))
        return is_single_turn(self.task.environment(problem))

    @property
    def rollout_limit(self) -> int:
        """Most tokens of a rollout, which may be too long to be trained on."""
        limit = self.config.generator.max_model_len
        return min(limit, self.config.loop.episode.max_tokens or limit)

    @property
    def sample_limit(self) -> int:
        """Most tokens of a sample that is trained on."""
        return min(self.rollout_limit, self.config.loop.max_sample_tokens or self.rollout_limit)

    def prompts(self, number: int) -> list[np.ndarray] | None:
        """Return the first training prompts, [N] int32 each; None where they cannot be known."""
        if self.task is None or self.renderer is None:
            return None
        room = self.rollout_limit - self.config.loop.sampling.max_tokens
        found: list[np.ndarray] = []
        for problem in islice(self.task.train_problems(seed=self.config.seed), number + MOST_LONG_PROMPTS):
            environment = self.task.environment(problem)
            if not is_single_turn(environment):
                return None
            prompt = self.renderer.opening(environment.opening())
            if len(prompt) <= room:
                found.append(prompt)
            elif self.config.loop.long_prompts == "stop":
                return None  # The run would stop there.
            if len(found) == number:
                return found
        return None


def is_single_turn(environment: object) -> bool:
    """Return whether the environment is one question and one reply, without blocking code."""
    return isinstance(environment, SingleTurn) and environment.single_turn and environment.runs_inline


def find_out(config: RunConfig, *, resumes: Path | None = None) -> Known:
    """Look for the files that the config names; `resumes` is the folder of a resumed run."""
    spec = replace(config.model, batch_invariant=config.batch_invariant)
    known = Known(config=config, spec=spec, faults=[], unknown=[])
    _find_start(known)
    _find_task(known)
    _find_source(known, resumes)
    known.unknown.append(
        "whether prompts fit, and environments and reward functions work: a run tries them before it starts, "
        "also with --launch.dry_run"
    )
    return known


def _find_start(known: Known) -> None:
    config = known.config
    try:
        # A warm-up changes no shape; an earlier run's warm-up is found when the run starts.
        known.start = untrained_start(config)
        known.spec, known.renderer = known.start.spec, renderer_of(config, known.start)
    except ValueError as error:
        given = f"hf_assets_path={config.hf_assets_path!r}: " if known.start is None else ""
        known.faults.append(f"{given}{error}")
        known.unknown.append("the lengths of prompts, for which there is no tokenizer")
        if known.start is None and config.any_model_size:
            known.unknown.append(
                f"the model's sizes: all numbers are of {known.spec.name} {known.spec.flavor}"
            )


def _find_task(known: Known) -> None:
    config = known.config
    if any(cls.__module__ == PROGRAMS for cls in config.task.owner.__mro__):
        known.unknown.append("problems of the task, which runs third-party programs")
        return
    try:
        task: Task = config.task.build()
        next(iter(task.train_problems(seed=config.seed)), None)
        if config.loop.eval_every:
            task.eval_sets()
        known.task = task
    except (ValueError, OSError, ImportError) as error:
        known.faults.append(f"task: {error}")


def _find_source(known: Known, resumes: Path | None) -> None:
    config = known.config

    def skip(path: Path, error: DamagedCheckpointError) -> None:
        known.unknown.append(f"{path.name} would be set aside, and an earlier one taken: {error}")

    source = None
    try:
        if resumes is None and config.name is not None:  # without a name the run gets a free one
            check_free(
                Path(config.dump_folder).expanduser().absolute() / config.name, overwrite=config.overwrite
            )
        if resumes is not None:
            run_folder = RunFolder.to_read(resumes, checkpoints=config.trainer.checkpoint.shared_folder)
            source = find_resumed(config, run_folder, skip=skip)
        known.source = source or asked_source(config, None, repairs=False)
    except (ValueError, OSError) as error:
        known.faults.append(str(error))


def explained_on(fleet: ClusterConfig, *, spec: ModelSpec, here: Machine) -> tuple[Machine, str]:
    """Return the machine to explain for, and why it is not `here` (empty if it is).

    GPUs are assumed where the config names GPUs, has hosts that bring them, or needs more memory than a machine
    without GPUs has.
    """
    launch, needed = fleet.launch, gpus_needed(fleet)
    size = here.gpu_bytes or ASSUMED_GPU_BYTES
    if launch.on_cluster:
        if not trains_on_gpu(launch, num_gpus=here.num_gpus):
            return here, ""
        return replace(here, gpu_bytes=size), f"GPUs of {size / 1e9:.0f} GB on the hosts of {launch.hosts}"
    if needed <= here.num_gpus:
        return here, ""
    if here.num_gpus:
        why = f"this machine has {here.num_gpus}"
    elif launch.trainer_gpus is not None or launch.generator_gpus is not None:
        why = "the config names GPUs and this machine has none"
    elif (trainer_bytes := _bytes_on_cpus(fleet, spec)) > here.memory_bytes:
        why = (
            f"this machine has none, and {here.memory_bytes / 1e9:.0f} GB of memory for the "
            f"{trainer_bytes / 1e9:.0f} GB that the trainer would need on CPUs"
        )
    else:
        return here, ""
    gpus = f"{needed} GPU{'s' * (needed > 1)} of {size / 1e9:.0f} GB"
    return replace(here, num_gpus=needed, gpu_bytes=size), f"{gpus}, as {why}"


def gpus_needed(fleet: ClusterConfig) -> int:
    """Return the GPUs that the run needs on one machine."""
    trainer = fleet.trainer.num_procs
    generators = fleet.generator.num_replicas * fleet.generator.tensor_parallel_degree
    together = max(trainer, generators) if fleet.launch.share_gpus else trainer + generators
    named = (*(fleet.launch.trainer_gpus or ()), *(fleet.launch.generator_gpus or ()))
    return max(together, max(named, default=-1) + 1)


def _bytes_on_cpus(fleet: ClusterConfig, spec: ModelSpec) -> int:
    """Return the memory of all trainer ranks, or 0 for a layout that is refused anyway."""
    trainer = fleet.trainer
    try:
        degrees = trainer.parallelism.degrees(trainer.num_procs)
        return trainer.num_procs * trainer.estimate_memory(spec, degrees=degrees, on_gpu=False).total
    except ValueError:
        return 0
