"""Plan of a run: everything that can be checked before anything starts or is written."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from actors.checks import Machine, check_config, check_source
from actors.config import RunConfig
from actors.parity import ParityText, make_parity_text
from actors.placement import count_gpus, trains_on_gpu
from actors.task_checks import check_problems, check_task
from actors.trainer import PolicyTrainer
from rl.config.json import code_name, to_dict
from rl.config.tree import input_paths
from rl.models.assets import resolve_assets
from rl.models.spec import ModelSpec
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import STARTING_POINTS, RunFolder
from rl.observability.sinks import check_sinks
from rl.rollouts.environment import Environments
from rl.rollouts.renderer import Renderer, make_renderer
from rl.rollouts.samples import demonstrated_now
from rl.starting_point import (
    NUM_KEYED_DEMONSTRATIONS,
    StartingPoint,
    given_folder,
    random_model,
    warmed_up_model,
)
from rl.tasks.fingerprint import fingerprint_problems
from rl.tasks.task import Task
from rl.training.checkpoint_config import (
    LoadSource,
    find_load_source,
    initial_source,
    own_checkpoint,
)
from rl.training.checkpoint_files import DamagedCheckpointError, Skip, saved_steps
from rl.types import ProblemsFingerprint
from rl.utils.printing import say

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Checked parts from which a run starts."""

    start: StartingPoint
    source: LoadSource | None
    """Checkpoint that the trainer loads instead of the starting point's weights."""
    resumed: LoadSource | None
    """Latest checkpoint of a resumed run, which replaces both."""
    task: Task
    environments: Environments
    """Environments of the task, tried before the run; the run uses their thread."""
    renderer: Renderer
    parity: ParityText | None
    problems: ProblemsFingerprint | None = None
    """Fingerprint of the task's problems, for checkpoints."""
    differences: tuple[str, ...] = ()
    """Differences from the problems of the checkpoint that the run goes on from."""

    def inputs(self, config: RunConfig) -> dict[str, Path]:
        """Return the files and folders that the run reads, by the field that they come from."""
        return {
            field: path for field, path in input_paths(config).items() if field != "dump_folder"
        }


def make_plan(config: RunConfig, *, resumes: RunFolder | None = None) -> Plan:
    """Check all that can be checked without starting or writing anything.

    Checkpoints that turn out to be damaged are set aside where the run can go on from another one.
    `resumes` is the folder of a run that goes on.
    """
    check_sinks(config.sinks)
    task: Task = config.task.build()
    environments = Environments(
        make=task.environment, step_timeout_s=config.loop.episode.step_timeout_s
    )
    skip = _would_set_aside if config.launch.dry_run else None
    resumed = None if resumes is None else find_resumed(config, resumes, skip=skip)
    source = asked_source(config, resumed, repairs=not config.launch.dry_run)
    start = starting_point(config, task=task, environments=environments, source=source)
    check_source(resumed or source, start=start, config=config, num_gpus=count_gpus())
    exclude = config.trainer.checkpoint.exclude_from_loading
    differences = check_problems(resumed or source, task, seed=config.seed, exclude=exclude)
    check_config(config, spec=start.spec, machine=Machine.here(), resumes=resumes is not None)
    renderer = renderer_of(config, start)
    on_gpu = trains_on_gpu(config.launch, num_gpus=count_gpus())
    first_prompt = check_task(
        task,
        loop=config.loop,
        max_model_len=config.generator.max_model_len,
        time_limit_s=config.reward.time_limit_s,
        seed=config.seed,
        environments=environments,
        renderer=renderer,
        warms_up=start.warmed_up is not None,
        rewards_in_actors=config.reward.num_procs > 0,
        start_timeout_s=config.reward.start_timeout_s,
    )
    return Plan(
        start=start,
        source=source,
        resumed=resumed,
        task=task,
        problems=fingerprint_problems(task, seed=config.seed),
        differences=tuple(differences),
        environments=environments,
        renderer=renderer,
        parity=make_parity_text(
            config.parity,
            prompt=first_prompt,
            renderer=renderer,
            dtypes=compute_dtypes(config),
            max_tokens=config.generator.max_model_len - 1,
            same_kernels=bool(config.batch_invariant) and not on_gpu,
        ),
    )


def describe_skip(path: Path, error: DamagedCheckpointError) -> str:
    """Return what a run would do with a damaged checkpoint."""
    return f"{path.name} would be set aside, and an earlier one taken: {error}"


def _would_set_aside(path: Path, error: DamagedCheckpointError) -> None:
    say(describe_skip(path, error))


def compute_dtypes(config: RunConfig) -> tuple[str, ...]:
    """Return the dtypes in which generator and trainer multiply, with those that converters round
    to.
    """
    of_converters = (converter.owner.compute_dtype for converter in config.trainer.converters)
    dtypes = (config.generator.dtype, config.trainer.training.param_dtype, *of_converters)
    return tuple(dtype for dtype in dtypes if dtype is not None)


def describe_source(plan: Plan) -> list[str]:
    """Return lines on what a run would load before its first step; none for the starting point's
    weights.
    """
    source = plan.resumed or plan.source
    if source is None:
        return []
    if source.position is not None:
        lines = [f"going on after step {source.position.step} from {source.path}, which fits"]
    else:
        lines = [f"loading {source.path}, which fits"]
    return [*lines, *plan.differences]


def find_resumed(
    config: RunConfig, folder: RunFolder, *, skip: Skip | None = None
) -> LoadSource | None:
    """Return the latest checkpoint of a run that goes on, or None.

    `skip` is called for each damaged checkpoint; None sets them aside.

    Raises:
        ValueError: the run is finished and has no steps left, or no checkpoint, so that its results
            would be lost.
    """
    num_steps, resumed = config.loop.num_steps, None
    records = read_metrics(folder.metrics) if folder.metrics.exists() else []
    steps = (int(record["step"]) for record in records)
    done = max([0, *steps, *saved_steps(folder.checkpoints)])
    if folder.is_finished and done >= num_steps:
        raise ValueError(
            f"{folder.path} holds a finished run of {done} steps: raise loop.num_steps={num_steps} "
            "to go on with it"
        )
    if config.trainer.checkpoint.saves:
        resumed = own_checkpoint(folder.checkpoints, num_steps=num_steps, skip=skip)
    if folder.is_finished and (resumed is None or resumed.position is None):
        raise ValueError(
            f"{folder.path} holds a finished run and no checkpoint that it could go on from"
        )
    return resumed


def asked_source(
    config: RunConfig, resumed: LoadSource | None, *, repairs: bool
) -> LoadSource | None:
    """Return the checkpoint that the config starts from, or None.

    `resumed` is the run's own latest checkpoint; `repairs` is that of `find_load_source`.
    """
    checkpoint = config.trainer.checkpoint
    if resumed is None:
        return find_load_source(checkpoint, repairs=repairs)
    try:
        return initial_source(checkpoint)
    except ValueError as error:
        # It may be gone: the run has a checkpoint of its own now.
        logger.info("not looked for any more: %s", error)
        return resumed


def untrained_start(config: RunConfig, *, prepares: bool = True) -> StartingPoint:
    """Return the starting point before a warm-up; `prepares` is that of `resolve_assets`.

    Raises:
        ValueError: the folder does not fit, or there is neither a folder nor a model.
    """
    cache = starting_points(config.dump_folder)
    spec = None if config.model is None else spec_for(config, config.model)
    if config.hf_assets_path is not None:
        folder = resolve_assets(
            config.hf_assets_path, cache=cache, revision=config.hf_revision, prepares=prepares
        )
        start = given_folder(folder, spec=None if config.any_model_size else spec)
        return replace(start, spec=spec_for(config, start.spec))
    if spec is None:
        raise ValueError(
            "hf_assets_path=None: must name a model to start from, because this config has none of "
            "its own"
        )
    return random_model(cache, spec=spec, seed=config.seed)


def spec_for(config: RunConfig, spec: ModelSpec) -> ModelSpec:
    """Return the spec with the run's choice of arithmetic."""
    return replace(
        spec, batch_invariant=bool(config.batch_invariant), float32_head=config.float32_head
    )


def starting_points(dump_folder: str) -> Path:
    return Path(dump_folder).expanduser().absolute() / STARTING_POINTS


def renderer_of(config: RunConfig, start: StartingPoint) -> Renderer:
    """Return the renderer of a run with the tokenizer of its starting point."""
    tokenizer, stop_ids = start.tokenizer()
    return make_renderer(config.renderer, tokenizer=tokenizer, stop_token_ids=stop_ids)


def starting_point(
    config: RunConfig, *, task: Task, source: LoadSource | None, environments: Environments
) -> StartingPoint:
    """Return the starting point of a run; `environments` play the warm-up's demonstrations. Nothing
    is written yet.
    """
    untrained = untrained_start(config)
    if config.hf_assets_path is not None or config.warmup is None or source is not None:
        return untrained
    return warmed_up_model(
        starting_points(config.dump_folder),
        spec=untrained.spec,
        seed=config.seed,
        warmup=config.warmup,
        demonstrations=demonstrated_now(
            islice(task.warmup_problems(seed=config.seed), NUM_KEYED_DEMONSTRATIONS),
            environments,
            renderer=renderer_of(config, untrained),
        ),
        arithmetic=warmup_arithmetic(
            config.trainer,
            batch_invariant=bool(config.batch_invariant),
            float32_head=config.float32_head,
        ),
    )


def warmup_arithmetic(
    trainer: PolicyTrainer.Config, *, batch_invariant: bool = False, float32_head: bool = False
) -> dict[str, Any]:
    """Return the trainer settings that change the warm-up, as part of the key of its result.

    The effect of a subclass's fields is unknown, so all of them are included.
    """
    training, values = trainer.training, to_dict(trainer)
    known = {f.name for f in fields(PolicyTrainer.Config)}
    return {
        "trainer": code_name(trainer.owner),
        "optimizer": [trainer.optimizer.name, trainer.optimizer.eps],
        "dtypes": [training.dtype, training.param_dtype, training.reduce_dtype],
        "converters": values["converters"],
        "experts": values["experts"],
        "batch_invariant": batch_invariant,
        **({"float32_head": True} if float32_head else {}),  # Keys of earlier results stay.
        "added": {name: value for name, value in values.items() if name not in known},
    }
