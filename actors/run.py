"""One way in for a script: all actors of a run, from their start to a clean end.

    async with open_run(config) as run:
        await run.publisher.serve(await run.publisher.push())
        groups = await run.generator.generate(prompts, sampling=sampling)
        await run.trainer.forward_backward(samples)
        await run.trainer.optim_step()

docs/scripts.md has a whole loop. The controller uses the same two steps: `checked_run`, then
`started_run`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass
from functools import partial

import torch

from actors.backend import GeneratorClient, RewardClient, TrainerClient
from actors.calls import ActorCallError
from actors.checks import converted_model
from actors.cluster import Cluster
from actors.config import ClusterConfig, RunConfig, Strategy
from actors.explain import set_without_effect
from actors.guard import temporary_files
from actors.launch import Launcher, supervised
from actors.members import LogSettings, record_process
from actors.placement import count_gpus, fit_to_devices
from actors.plan import Plan, make_plan
from actors.pool import GeneratorPool
from actors.router import CallSeeds, Router
from actors.starting_weights import load_start
from rl.config.json import changed_fields, to_dict, write_defaults, write_json
from rl.config.registry import ResolvedRun
from rl.config.tree import check_fields, rebuild
from rl.loop.stop_request import StopRequest
from rl.models.model_cost import model_work
from rl.models.spec import ModelSpec
from rl.observability.console import print_line, progress
from rl.observability.events import Events, write_environment
from rl.observability.logs import setup_logging
from rl.observability.machine import RunLimits
from rl.observability.run_folder import RunFolder
from rl.observability.spans import RECORDER, STATE_FOLDER
from rl.observability.stacks import catch_signal, stop_writing_stacks
from rl.protocols import Rewarder
from rl.rollouts.renderer import Renderer
from rl.rollouts.rewards import RewardProcess, longest_s
from rl.rollouts.rubric import Rubric
from rl.tasks.task import Task
from rl.training.checkpoint_config import CheckpointConfig
from rl.training.failures import unwritten
from rl.utils.files import folder_errors, locked_folder
from rl.utils.proxies import exempt_loopback

logger = logging.getLogger(__name__)

FROM_THE_BEGINNING = "starting from the beginning: there is no checkpoint to go on from"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRun:
    """A run whose config is checked and whose folder is open; nothing is started yet."""

    config: RunConfig
    plan: Plan
    folder: RunFolder
    events: Events


@dataclass(frozen=True, kw_only=True, slots=True)
class Run(CheckedRun):
    """The actors of a run, ready to be called."""

    cluster: Cluster
    rubric: Rubric
    generator: Router
    trainer: TrainerClient
    publisher: GeneratorPool
    rewarder: Rewarder
    limits: RunLimits | None
    """Measured limits of the machine, with which steps are compared; None if unknown or turned off.
    """

    @property
    def task(self) -> Task:
        return self.plan.task

    @property
    def renderer(self) -> Renderer:
        return self.plan.renderer


@asynccontextmanager
async def open_run(config: RunConfig) -> AsyncIterator[Run]:
    """Check a config, start its actors, load the starting weights, and end everything with the
    block.

    Nothing is published yet: the first call is a push. A process that dies is replaced as in a
    controller run; only the loss of the trainer is an error, after which
    `run.cluster.restart_trainer(error)` starts a new one with the starting weights.

    Raises:
        ValueError: the config cannot run, as in `checked_run`.
        RunError: a process did not come up, or ran into an error.
    """
    if Launcher.current is not None:
        raise RuntimeError(
            "this process runs actors already: leave the block of the other run first"
        )
    exempt_loopback()
    config = fit_to_devices(config, num_gpus=count_gpus())
    source = ResolvedRun(module="script", function="open_run", config=config)
    with checked_run(config, source=source) as checked:
        async with started_run(checked) as run:
            await load_start(run.trainer, config=config, plan=run.plan)
            yield run


@contextmanager
def checked_run(config: RunConfig, *, source: ResolvedRun) -> Iterator[CheckedRun]:
    """Check a config, then open the folder of a new or resumed run, with its log and its events.

    Raises:
        ValueError: the config cannot run; an earlier run of that name is as it was. Nothing was
            written, except that a checkpoint folder outside of the run's folder was made and has a
            lock file.
    """
    check_fields(config)
    with ExitStack() as stack:
        _lock_shared_checkpoints(config.trainer.checkpoint, stack)
        opened = _new_folder if source.resumes is None else _resumed_folder
        folder, plan, changes = opened(config, source, stack)
        if config.print_config:
            print_line(json.dumps(to_dict(config), indent=2))
        print_line(f"run folder: {folder.path}")
        if config.launch.share_gpus:
            print_line("trainer and generators take turns on the same GPUs (launch.share_gpus)")
        with _logging(folder, config):
            logger.info("config %s.%s", source.module, source.function)
            for path in set_without_effect(source, spec=plan.start.spec):
                logger.warning("set without effect: %s", path)
                print_line(f"set without effect: {path}")
            for change in changes:
                logger.info("changed: %s", change)
                print_line(f"changed: {change}")
            for difference in plan.differences:
                logger.warning("%s", difference)
                print_line(difference)
            logger.info("starting from %s", plan.start.folder)
            write_environment(folder.environment)
            with recorded(config, plan, folder, resumes=source.resumes is not None) as events:
                yield CheckedRun(config=config, plan=plan, folder=folder, events=events)
            logger.info("finished")
        folder.mark_finished()


def _lock_shared_checkpoints(config: CheckpointConfig, stack: ExitStack) -> None:
    """Lock a checkpoint folder outside of the run's folder before anything in it is read."""
    if config.shared_folder is not None and config.saves:
        otherwise = (
            "only one run at a time may save there: choose another trainer.checkpoint.folder, or "
            "trainer.checkpoint.load_only"
        )
        stack.enter_context(
            locked_folder(
                config.shared_folder, as_what="trainer.checkpoint.folder", otherwise=otherwise
            )
        )


def _new_folder(
    config: RunConfig, source: ResolvedRun, stack: ExitStack
) -> tuple[RunFolder, Plan, Sequence[str]]:
    plan = make_plan(config)
    folder = RunFolder.create(
        config.dump_folder,
        config.name or f"{source.module.replace('.', '-')}-{source.function}",
        time_stamp=config.name is None,
        overwrite=config.overwrite,
        inputs=plan.inputs(config),
        checkpoints=config.trainer.checkpoint.shared_folder,
    )
    stack.enter_context(folder)
    try:
        _write_start(folder, plan, source)
    except BaseException:
        folder.discard()
        raise
    return folder, plan, ()


def _resumed_folder(
    config: RunConfig, source: ResolvedRun, stack: ExitStack
) -> tuple[RunFolder, Plan, Sequence[str]]:
    assert source.resumes is not None
    folder = RunFolder.resume(source.resumes, checkpoints=config.trainer.checkpoint.shared_folder)
    stack.enter_context(folder)
    changes = changed_fields(folder.config_json, config)
    with _logging(folder, config):
        plan = make_plan(config, resumes=folder)
    _write_start(folder, plan, source)
    folder.reopen()
    return folder, plan, changes


def _write_start(folder: RunFolder, plan: Plan, source: ResolvedRun) -> None:
    """Write what the run is; raise ValueError if a file cannot be written, as nothing is started
    yet.
    """
    with folder_errors(folder.config_json, "written"):
        write_json(source, folder.config_json)
    if source.defaults is not None:
        with folder_errors(folder.defaults_json, "written"):
            write_defaults(source, folder.defaults_json)
    with unwritten(str(plan.start.folder)):
        plan.start.make()


@contextmanager
def _logging(folder: RunFolder, config: RunConfig) -> Iterator[None]:
    undo_logging = setup_logging(
        "controller", folder=folder.logs, console_level=config.console_level
    )
    try:
        yield
    finally:
        undo_logging()


@contextmanager
def recorded(
    config: RunConfig, plan: Plan, folder: RunFolder, *, resumes: bool
) -> Iterator[Events]:
    """Record the controller's events and spans in the folder."""
    for file in (folder.logs / STATE_FOLDER).glob("*"):
        file.unlink()  # processes of the earlier attempt would count as dead
    catch_signal()
    record_process(folder.logs, role="controller", rank=0, timeline=config.timeline)
    events, position = (
        Events(folder.events),
        None if plan.resumed is None else plan.resumed.position,
    )
    if not resumes:
        events.add("started")
    elif position is None:
        events.add("resumed", step=0)
        print_line(FROM_THE_BEGINNING)
    else:
        events.add("resumed", step=position.step)
        print_line(f"going on after step {position.step}")
    try:
        yield events
        events.add("finished")
    except BaseException as error:
        # The log gets the traceback; who called for the run prints the message.
        logger.info("the run stopped: %s", type(error).__name__, exc_info=True)
        events.add("stopped", reason=f"{type(error).__name__}: {error}")
        raise
    finally:
        RECORDER.stop()  # the state file keeps the last moment
        stop_writing_stacks()


@asynccontextmanager
async def started_run(
    checked: CheckedRun, *, stop: StopRequest | None = None
) -> AsyncIterator[Run]:
    """Start the actors of a run, and end them with the block, however it ends.

    The trainer holds the starting point's weights; `load_start` loads the checkpoint of the config
    or makes the warm-up.

    Args:
        stop: gets the first Ctrl-C, SIGTERM or SIGHUP while a loop listens to it.
    """
    config, plan, folder = checked.config, checked.plan, checked.folder
    store = config.weights.build(dtype=config.generator.dtype, run_folder=folder.path)
    # On policy nothing runs during a pull that it would wait for.
    drains = config.loop.max_off_policy_steps > 0 and config.generator.on_update == "drain"
    # The folder of temporary files is on this machine only.
    on_disk: AbstractContextManager[None] = (
        nullcontext() if config.launch.on_cluster else temporary_files()
    )
    try:
        with on_disk:
            async with supervised(stop=stop) as launcher:
                rubric = plan.task.rubric(seed=config.seed)
                cluster = Cluster(
                    _with_steps(config),
                    launcher=launcher,
                    model_spec=plan.start.spec,
                    hf_assets_path=str(plan.start.folder),
                    store=store,
                    logs=LogSettings(
                        folder=folder.logs,
                        console_level=config.console_level,
                        timeline=config.timeline,
                    ),
                    parity=plan.parity,
                    drains=drains,
                    rubric=rubric,
                    trainer_arguments={
                        "model_spec": plan.start.spec,
                        "failure_folder": str(folder.path),
                    },
                    events=checked.events.add,
                )
                with progress("starting the actors (import, load, compile)"):
                    await cluster.start()
                print_line(cluster.network)
                async with _rewarder(cluster, config=config, rubric=rubric) as rewarder:
                    yield Run(
                        config=config,
                        plan=plan,
                        folder=folder,
                        events=checked.events,
                        cluster=cluster,
                        rubric=rubric,
                        generator=make_router(
                            cluster.pool, strategy=config.router, seed=config.seed
                        ),
                        trainer=TrainerClient(cluster.trainer),
                        publisher=cluster.pool,
                        rewarder=rewarder,
                        limits=await run_limits(config, cluster, spec=plan.start.spec),
                    )
                await cluster.close()
    finally:
        store.discard()


def _with_steps(config: RunConfig) -> RunConfig:
    """Return the config with the run's optimizer steps where the schedule of the learning rate
    leaves them open.
    """
    if config.trainer.lr_scheduler.total_steps:
        return config
    total = config.loop.num_steps * config.loop.num_minibatches
    steps = {"total_steps": total} if total else {"decay": "constant"}
    return rebuild(config, {f"trainer.lr_scheduler.{name}": value for name, value in steps.items()})


def make_router(
    pool: GeneratorPool, *, strategy: Strategy = "least_loaded", seed: int = 0
) -> Router:
    """Return the router of a run with this seed."""
    seeds = CallSeeds(seed, policy_version=lambda: pool.policy_version)
    return Router(
        [GeneratorClient(member) for member in pool.members],
        strategy=strategy,
        pool=pool,
        seeds=seeds,
    )


async def run_limits(config: RunConfig, cluster: Cluster, *, spec: ModelSpec) -> RunLimits | None:
    """Let the actors measure the machines of each role in turn; return None if that is disabled or
    fails.

    A failure is logged, since a run does not need the limits.
    """
    if not config.limits.enable:
        return None
    trainer, generator, loop = config.trainer, config.generator, config.loop
    converted, _ = converted_model(config, model_spec=spec, num_gpus=count_gpus())
    trained, sampled = model_work(spec.model, converted=converted), model_work(spec.model)
    itemsize = int(getattr(torch, generator.dtype).itemsize)
    # On shared devices the trainer measures for both.
    of_generator = cluster.trainer if config.launch.share_gpus else cluster.pool.members[0]
    tp = generator.tensor_parallel_degree
    asked = (
        (cluster.trainer, trainer.training.param_dtype, trained.parameters // trainer.num_procs),
        (of_generator, generator.dtype, sampled.parameters // tp),
    )
    found = []
    try:
        for group, dtype, number in asked:
            limits, *_ = await group.call("measure_machine", dtype, number * itemsize)
            logger.info("%s: %s", group.name, limits)
            found.append(limits)
    except ActorCallError as error:
        logger.warning("the machine was not measured, so steps have no limit/ metrics: %s", error)
        return None
    num_running = loop.groups_per_batch * loop.group_size * (1 + loop.max_off_policy_steps)
    on_cluster = config.launch.on_cluster
    return RunLimits(
        trainer=found[0],
        num_trainer_ranks=_at_once(trainer.num_procs, trainer.num_threads, on_cluster),
        generator=found[1],
        num_generator_ranks=_at_once(
            generator.num_replicas * tp, generator.num_threads, on_cluster
        ),
        num_replicas=generator.num_replicas,
        shares_devices=bool(config.launch.share_gpus),
        trained=trained,
        sampled=sampled,
        itemsize=itemsize,
        num_samples=loop.group_size,
        most_running=max(1, min(generator.max_num_seqs, num_running // generator.num_replicas)),
        waits_for_the_longest=loop.max_off_policy_steps == 0,
    )


def _at_once(num_ranks: int, num_threads: int, on_cluster: bool) -> float:
    """Return how many ranks compute at the same time; without GPUs, ranks of one machine share its
    cores.
    """
    if on_cluster or count_gpus():
        return num_ranks
    return min(num_ranks, max(1.0, len(os.sched_getaffinity(0)) / num_threads))


@asynccontextmanager
async def _rewarder(
    cluster: Cluster, *, config: ClusterConfig, rubric: Rubric
) -> AsyncIterator[Rewarder]:
    """Yield the reward processes, or a scoring process of this one if the cluster has none."""
    reward = config.reward
    if cluster.reward is not None:
        limit = partial(
            longest_s,
            rubric,
            time_limit_s=reward.time_limit_s,
            start_timeout_s=reward.start_timeout_s,
        )
        yield RewardClient(cluster.reward, num_procs=reward.num_procs, longest_s=limit)
        return
    process = RewardProcess(
        rubric=rubric,
        time_limit_s=reward.time_limit_s,
        max_concurrency=reward.max_concurrency,
        start_timeout_s=reward.start_timeout_s,
    )
    await process.start()
    try:
        yield process
    finally:
        await process.close()
