"""Plan of a run: everything that can be checked before anything starts or is written."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from actors.cluster.parity import ParityText, make_parity_text
from actors.config import RunConfig
from actors.launch.placement import count_gpus, trains_on_gpu
from actors.preflight.checks import Machine, check_run, check_source
from actors.preflight.task import check_problems, check_task
from actors.trainer import PolicyTrainer
from rl.config.json import name_code, to_dict
from rl.config.rules import check_rules
from rl.models.files.assets import resolve_assets
from rl.models.spec import ModelSpec
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import STARTING_POINTS, RunFolder
from rl.observability.sinks import check_sinks
from rl.rollouts.environment import Environments
from rl.rollouts.renderer import Renderer, RendererConfig, make_renderer
from rl.rollouts.samples import make_demonstration_samples_now
from rl.run_rules import RULES
from rl.starting_point import (
    NUM_KEYED_DEMONSTRATIONS,
    StartingPoint,
    describe_random_model,
    find_warm_model,
    open_model_folder,
)
from rl.tasks.fingerprint import make_fingerprint
from rl.tasks.task import Task
from rl.training.checkpoints.config import (
    CheckpointConfig,
    LoadSource,
    find_initial_source,
    find_load_source,
    find_own_checkpoint,
)
from rl.training.checkpoints.files import DamagedCheckpointError, Skip, list_steps
from rl.types import ProblemsFingerprint, Prompt
from rl.utils.printing import print_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Checked parts from which a run starts."""

    start: StartingPoint
    """Model folder that trainer and generators are set up from: a user's, or random weights of this
    run's seed, with the folder of the warm-up that replaces them (`load_weights`)."""
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


def make_plan(config: RunConfig, *, resumes: RunFolder | None = None) -> Plan:
    """Check all that can be checked without starting or writing anything.

    Checkpoints that turn out to be damaged are set aside where the run can go on from another one.
    `resumes` is the folder of a run that goes on.
    """
    # First the rules: what follows reads files for options that they may refuse.
    check_rules(config, RULES)
    check_sinks(config.sinks)
    task: Task = config.task.build()
    environments = Environments(
        make=task.environment, step_timeout_s=config.loop.episode.step_timeout_s
    )

    # Where the weights come from. A dry run changes nothing, not even a damaged checkpoint's place.
    is_dry, checkpoint = config.launch.dry_run, config.trainer.checkpoint
    resumed = None
    if resumes is not None:
        skip = _report_skip if is_dry else None
        resumed = find_resumed_source(
            checkpoint, resumes, num_steps=config.loop.num_steps, skip=skip
        )
    source = find_source(checkpoint, resumed, repairs=not is_dry)
    start = find_starting_point(config, task=task, environments=environments, source=source)
    check_source(
        resumed or source,
        start=start,
        trainer=config.trainer,
        num_steps=config.loop.num_steps,
        on_gpu=trains_on_gpu(config.launch, num_gpus=count_gpus()),
    )
    exclude = checkpoint.exclude_from_loading
    differences = check_problems(resumed or source, task, seed=config.seed, exclude=exclude)

    # The config before the task: to try the rubric starts a process, which takes seconds.
    check_run(config, spec=start.spec, machine=Machine.here(), resumes=resumes is not None)
    renderer = make_run_renderer(config.renderer, start)
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
        problems=make_fingerprint(task, seed=config.seed),
        differences=tuple(differences),
        environments=environments,
        renderer=renderer,
        parity=_make_parity(config, prompt=first_prompt, renderer=renderer),
    )


def _make_parity(config: RunConfig, *, prompt: Prompt, renderer: Renderer) -> ParityText | None:
    """Return the text on which trainer and generators are compared."""
    on_gpu = trains_on_gpu(config.launch, num_gpus=count_gpus())
    return make_parity_text(
        config.parity,
        prompt=prompt,
        renderer=renderer,
        dtypes=compute_dtypes(config.trainer, generator_dtype=config.generator.dtype),
        max_tokens=config.generator.max_model_len - 1,
        # On GPUs the batch-invariant mode has other kernels in vLLM than in the trainer.
        same_kernels=bool(config.batch_invariant) and not on_gpu,
    )


def describe_data(task: Task) -> str | None:
    """Return what a task has read from its files; None for one without files."""
    summary = getattr(task, "summary", None)
    return summary if isinstance(summary, str) else None


def describe_skip(path: Path, error: DamagedCheckpointError) -> str:
    """Return what a run would do with a damaged checkpoint."""
    return f"{path.name} would be set aside, and an earlier one taken: {error}"


def _report_skip(path: Path, error: DamagedCheckpointError) -> None:
    print_text(describe_skip(path, error))


def compute_dtypes(trainer: PolicyTrainer.Config, *, generator_dtype: str) -> tuple[str, ...]:
    """Return the dtypes in which generator and trainer multiply, with those that converters round
    to.
    """
    dtypes: list[str] = [generator_dtype, trainer.training.param_dtype]
    for converter in trainer.converters:
        # A converter without a dtype of its own computes in that of the layers which it changes.
        if converter.owner.compute_dtype is not None:
            dtypes.append(converter.owner.compute_dtype)
    return tuple(dtypes)


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


def find_resumed_source(
    config: CheckpointConfig, folder: RunFolder, *, num_steps: int, skip: Skip | None = None
) -> LoadSource | None:
    """Return the latest checkpoint of a run that goes on, or None.

    `skip` is called for each damaged checkpoint; None sets them aside.

    Raises:
        ValueError: the run is finished and has no steps left, or no checkpoint, so that its results
            would be lost.
    """
    # The metrics too, since a run without checkpoints has no other trace of its steps.
    done = max([0, *list_steps(folder.checkpoints)])
    if folder.metrics.exists():
        for record in read_metrics(folder.metrics):
            done = max(done, int(record["step"]))
    if folder.is_finished and done >= num_steps:
        raise ValueError(
            f"{folder.path} holds a finished run of {done} steps: raise loop.num_steps={num_steps} "
            "to go on with it"
        )

    resumed = None
    if config.saves:
        resumed = find_own_checkpoint(folder.checkpoints, num_steps=num_steps, skip=skip)
    if folder.is_finished and (resumed is None or resumed.position is None):
        raise ValueError(
            f"{folder.path} holds a finished run and no checkpoint that it could go on from"
        )
    return resumed


def find_source(
    config: CheckpointConfig, resumed: LoadSource | None, *, repairs: bool
) -> LoadSource | None:
    """Return the checkpoint that the config starts from, or None.

    `resumed` is the run's own latest checkpoint; `repairs` is that of `find_load_source`.
    """
    if resumed is None:
        return find_load_source(config, repairs=repairs)
    try:
        return find_initial_source(config)
    except ValueError as error:
        # It may be gone: the run has a checkpoint of its own now.
        logger.info("not looked for any more: %s", error)
        return resumed


def find_untrained_start(config: RunConfig, *, prepares: bool = True) -> StartingPoint:
    """Return the starting point before a warm-up; `prepares` is that of `resolve_assets`.

    Raises:
        ValueError: the folder does not fit, or there is neither a folder nor a model.
    """
    cache = find_starting_points(config.dump_folder)
    spec = config.model
    if spec is not None:
        spec = set_arithmetic(
            spec, batch_invariant=config.batch_invariant, float32_head=config.float32_head
        )
    if config.hf_assets_path is not None:
        folder = resolve_assets(
            config.hf_assets_path, cache=cache, revision=config.hf_revision, prepares=prepares
        )
        start = open_model_folder(folder, spec=None if config.any_model_size else spec)
        spec = set_arithmetic(
            start.spec, batch_invariant=config.batch_invariant, float32_head=config.float32_head
        )
        return replace(start, spec=spec)

    # Random weights, which a warm-up may train; they need sizes, since no folder has them.
    if spec is None:
        raise ValueError(
            "hf_assets_path=None: must name a model to start from, because this config has none of "
            "its own"
        )
    return describe_random_model(cache, spec=spec, seed=config.seed)


def set_arithmetic(
    spec: ModelSpec, *, batch_invariant: bool | None, float32_head: bool
) -> ModelSpec:
    """Return the spec with the run's choice of arithmetic."""
    return replace(spec, batch_invariant=bool(batch_invariant), float32_head=float32_head)


def find_starting_points(dump_folder: str) -> Path:
    return Path(dump_folder).expanduser().absolute() / STARTING_POINTS


def make_run_renderer(config: RendererConfig, start: StartingPoint) -> Renderer:
    """Return the renderer of a run with the tokenizer of its starting point."""
    tokenizer, stop_ids = start.tokenizer()
    return make_renderer(config, tokenizer=tokenizer, stop_token_ids=stop_ids)


def find_starting_point(
    config: RunConfig, *, task: Task, source: LoadSource | None, environments: Environments
) -> StartingPoint:
    """Return the starting point of a run; `environments` play the warm-up's demonstrations. Nothing
    is written yet.
    """
    untrained = find_untrained_start(config)
    # A checkpoint replaces the weights, so that a warm-up before it would be for nothing.
    if config.hf_assets_path is not None or config.warmup is None or source is not None:
        return untrained
    return find_warm_model(
        find_starting_points(config.dump_folder),
        spec=untrained.spec,
        seed=config.seed,
        warmup=config.warmup,
        demonstrations=make_demonstration_samples_now(
            islice(task.warmup_problems(seed=config.seed), NUM_KEYED_DEMONSTRATIONS),
            environments,
            renderer=make_run_renderer(config.renderer, untrained),
        ),
        arithmetic=collect_warmup_arithmetic(
            config.trainer,
            batch_invariant=bool(config.batch_invariant),
            float32_head=config.float32_head,
        ),
    )


def find_engine_start(config: RunConfig) -> StartingPoint:
    """Return the starting point of a run whose trainer alone is made, so that its task, which takes
    seconds, is not tried.
    """
    task: Task = config.task.build()
    return find_starting_point(
        config,
        task=task,
        source=find_source(config.trainer.checkpoint, None, repairs=False),
        environments=Environments(make=task.environment),
    )


def collect_warmup_arithmetic(
    trainer: PolicyTrainer.Config, *, batch_invariant: bool = False, float32_head: bool = False
) -> dict[str, Any]:
    """Return the trainer settings that change the warm-up, as part of the key of its result.

    The effect of a subclass's fields is unknown, so all of them are included.
    """
    training, values = trainer.training, to_dict(trainer)
    fields_of_others = dict(values)
    for f in fields(PolicyTrainer.Config):
        fields_of_others.pop(f.name, None)

    # Part of the key under which a warm-up's result is stored: with other names here, results of
    # earlier runs would not be found.
    return {
        "trainer": name_code(trainer.owner),
        "optimizer": [trainer.optimizer.name, trainer.optimizer.eps],
        "dtypes": [training.dtype, training.param_dtype, training.reduce_dtype],
        "converters": values["converters"],
        "experts": values["experts"],
        "batch_invariant": batch_invariant,
        # Results from before the option have no such key, and stay valid.
        **({"float32_head": True} if float32_head else {}),
        "added": fields_of_others,
    }
