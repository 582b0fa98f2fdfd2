"""What a run is going to be: everything that can be checked before anything starts or is written."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from actors.canary import LogprobCanary, make_canary
from actors.checks import (
    check_converters,
    check_end,
    check_load_source,
    check_memory,
    check_reference_weights,
    check_replicas,
    check_same_tokenizer,
    check_waits,
)
from actors.layout_checks import check_layout
from actors.roles import num_gpus
from actors.run_config import STARTING_POINTS, RunConfig
from actors.task_checks import check_demonstrations, check_sample_limit, check_task
from actors.trainer import PolicyTrainer
from rl.config.serialize import code_name, to_dict
from rl.config.tree import input_paths
from rl.models.spec import ModelSpec
from rl.observability.sinks.config import check_sinks
from rl.rollouts.demonstrations import demonstrated_now
from rl.rollouts.renderer import TemplateRenderer, make_renderer
from rl.rollouts.tried_environments import TriedEnvironments
from rl.starting_point import (
    NUM_KEYED_DEMONSTRATIONS,
    StartingPoint,
    given_folder,
    random_model,
    warmed_up_model,
)
from rl.tasks.task import Task
from rl.training.checkpoint_config import LoadSource, find_load_source, initial_source
from rl.training.experts import ExpertBalance
from rl.training.own_checkpoint import own_checkpoint
from rl.types import Prompt
from rl.weights.files import check_unused

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run needs to start, checked."""

    start: StartingPoint
    source: LoadSource | None
    """What the trainer loads instead of the starting point's weights."""
    resumed: LoadSource | None
    """What it loads instead of both, of a run that goes on: the run's own latest checkpoint."""
    reference: Path | None
    """What the trainer loads into the reference policy, where that is not the starting point."""
    task: Task
    environments: TriedEnvironments
    """Of the task, as they were tried; its threads are the run's."""
    renderer: TemplateRenderer
    canary: LogprobCanary | None

    def inputs(self, config: RunConfig) -> dict[str, Path]:
        """Files and folders that the run reads, by the field that they come from."""
        paths = {field: path for field, path in input_paths(config).items() if field != "dump_folder"}
        return paths | ({} if self.reference is None else {"trainer.reference": self.reference})


def make_plan(config: RunConfig, *, resumes: Path | None = None) -> Plan:
    """Check all that can be checked without starting or writing anything.

    Checkpoints that turn out to be damaged are set aside where the run can go on from another one.

    Args:
        resumes: folder of the checkpoints of a run that goes on; None: it is a new one.
    """
    check_sinks(config.sinks)
    task: Task = config.task.build()
    environments = tried_environments(config, task=task)
    resumed = None
    if resumes is not None and config.trainer.checkpoint.saves:
        resumed = own_checkpoint(resumes, num_steps=config.loop.num_steps)
    source = asked_source(config, resumed, repairs=not config.launch.dry_run)
    start = starting_point(config, task=task, environments=environments, source=source)
    check_same_tokenizer(resumed or source, start=start, fleet=config.fleet)
    check_load_source(
        resumed or source,
        fleet=config.fleet,
        model_spec=start.spec,
        num_steps=config.loop.num_steps,
        num_gpus=num_gpus(),
    )
    check_layout(config.fleet, model_spec=start.spec, loop=config.loop, num_gpus=num_gpus())
    check_converters(config.fleet, model_spec=start.spec, num_gpus=num_gpus())
    reference = check_reference_weights(
        resumed or source, start=start, fleet=config.fleet, num_gpus=num_gpus()
    )
    check_end(config.fleet, warms_up=config.warmup is not None, resumes=resumes is not None)
    check_waits(config.fleet, store=config.weights)
    check_unused(config.weights)
    if not config.launch.on_cluster and num_gpus() == 0:
        _check_machine(config, model_spec=start.spec)
    tokenizer, stop_ids = start.tokenizer()
    renderer = make_renderer(config.renderer, tokenizer=tokenizer, stop_token_ids=stop_ids)
    first_prompt = _first_prompt(
        config,
        task=task,
        environments=environments,
        renderer=renderer,
        warms_up=start.warmed_up is not None,
    )
    return Plan(
        start=start,
        source=source,
        resumed=resumed,
        reference=reference,
        task=task,
        environments=environments,
        renderer=renderer,
        canary=make_canary(
            config.canary,
            prompt=first_prompt,
            renderer=renderer,
            dtypes=(config.generator.dtype, config.trainer.training.param_dtype),
            max_tokens=config.generator.max_model_len - 1,
            batch_invariant=config.batch_invariant,
        ),
    )


def _check_machine(config: RunConfig, *, model_spec: ModelSpec) -> None:
    """Memory and cores of this one, which has no GPU."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    check_memory(config.fleet, model_spec=model_spec, memory_bytes=memory_bytes)
    num_cores = len(os.sched_getaffinity(0))
    check_replicas(config.fleet, num_cores=num_cores, memory_bytes=memory_bytes)


def asked_source(config: RunConfig, resumed: LoadSource | None, *, repairs: bool) -> LoadSource | None:
    """What the config says that the run starts from; `resumed` is its own latest checkpoint, `repairs` as
    `find_load_source`."""
    checkpoint = config.trainer.checkpoint
    if resumed is None:
        return find_load_source(checkpoint, repairs=repairs)
    try:
        return initial_source(checkpoint)
    except ValueError as error:
        # It may be gone: the run has a checkpoint of its own now.
        logger.info("not looked for any more: %s", error)
        return resumed


def _first_prompt(
    config: RunConfig,
    *,
    task: Task,
    environments: TriedEnvironments,
    renderer: TemplateRenderer,
    warms_up: bool,
) -> Prompt:
    """Of a task that passes all checks."""
    loop, max_model_len = config.loop, config.generator.max_model_len
    max_new = loop.sampling.max_tokens
    prompt = check_task(
        task,
        environments=environments,
        renderer=renderer,
        max_prompt_tokens=min(max_model_len, loop.episode.max_tokens or max_model_len) - max_new,
        seed=config.seed,
        time_limit_s=config.reward.time_limit_s,
        drops_long_prompts=loop.long_prompts == "drop",
        max_turns=loop.episode.max_turns,
        num_samples=loop.num_samples,
        evaluates=loop.eval_every > 0,
        rewards_may_fail=loop.max_failed_rewards > 0,
    )
    check_sample_limit(
        loop,
        task.train_problems(seed=config.seed),
        environments=environments,
        renderer=renderer,
        max_model_len=max_model_len,
    )
    if warms_up:
        check_demonstrations(
            task.warmup_problems(seed=config.seed),
            environments=environments,
            renderer=renderer,
            max_tokens=max_new,
            max_model_len=max_model_len,
        )
    return prompt


def tried_environments(config: RunConfig, *, task: Task) -> TriedEnvironments:
    """With the run's limit of a step."""
    return TriedEnvironments(make=task.environment, step_timeout_s=config.loop.episode.step_timeout_s)


def starting_point(
    config: RunConfig,
    *,
    task: Task,
    source: LoadSource | None,
    environments: TriedEnvironments | None = None,
) -> StartingPoint:
    """Where the run's weights come from, and the model with its kernels; nothing is written yet.

    `environments` are those in which demonstrations are played; None makes some.
    """
    spec = replace(config.model, batch_invariant=config.batch_invariant)
    if config.hf_assets_path is not None:
        return given_folder(config.hf_assets_path, spec=spec, any_size=config.any_model_size)
    cache = Path(config.dump_folder).expanduser().absolute() / STARTING_POINTS
    starts_here = source is None or source.needs_start(reference=config.trainer.reference.enable)
    if config.warmup is None or not starts_here:
        return random_model(cache, spec=spec, seed=config.seed)
    tokenizer, stop_ids = random_model(cache, spec=spec, seed=config.seed).tokenizer()
    renderer = make_renderer(config.renderer, tokenizer=tokenizer, stop_token_ids=stop_ids)
    return warmed_up_model(
        cache,
        spec=spec,
        seed=config.seed,
        warmup=config.warmup,
        demonstrations=demonstrated_now(
            islice(task.warmup_problems(seed=config.seed), NUM_KEYED_DEMONSTRATIONS),
            environments or tried_environments(config, task=task),
            renderer=renderer,
        ),
        arithmetic=warmup_arithmetic(config.trainer, batch_invariant=config.batch_invariant),
    )


def warmup_arithmetic(trainer: PolicyTrainer.Config, *, batch_invariant: bool = False) -> dict[str, Any]:
    """What of the trainer shapes the steps of the warm-up, whose own settings bring the rest.

    Of a subclass nobody here knows what its fields do, so all that it adds are part of it.
    """
    training = trainer.training
    arithmetic: dict[str, Any] = {
        "trainer": code_name(trainer.owner),
        "optimizer": [trainer.optimizer.name, trainer.optimizer.eps],
        "dtypes": [training.dtype, training.param_dtype, training.reduce_dtype],
    }
    if trainer.converters:
        arithmetic["converters"] = to_dict(trainer)["converters"]
    if trainer.experts != ExpertBalance.Config():
        arithmetic["experts"] = to_dict(trainer.experts)
    if batch_invariant:
        arithmetic["batch_invariant"] = True
    known = {f.name for f in fields(PolicyTrainer.Config)}
    added = {name: value for name, value in to_dict(trainer).items() if name not in known}
    return arithmetic | ({"added": added} if added else {})
