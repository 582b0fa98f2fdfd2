"""One way in for a script: all actors of a run, from their start to a clean end.

    async with open_run(config) as run:
        await run.publisher.pull(await run.publisher.push())
        groups = await run.generator.generate(prompts, sampling=sampling)
        await run.trainer.forward_backward(samples)
        await run.trainer.optim_step()

docs/scripts.md has a whole loop. A run starts in three steps, for a script as for the controller:

    prepare_run    check the config, open the run's folder, and record there what happens
    start_actors   start every process, and end all of them with the block
    load_weights   load a checkpoint, or make the warm-up
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from actors.cluster.agents import open_player
from actors.cluster.clients import Router, TrainerClient, make_router
from actors.cluster.cluster import Cluster, start_cluster
from actors.cluster.publisher import GeneratorPool
from actors.cluster.rewarder import open_rewarder
from actors.cluster.starter import AgentSetup
from actors.config import RunConfig
from actors.launch.calls import ActorCallError
from actors.launch.cleanup import guard_temporary_files
from actors.launch.launcher import Launcher, supervise
from actors.launch.member import LogSettings
from actors.launch.placement import count_gpus, fit_to_devices
from actors.preflight.limits import measure_run_limits
from actors.preflight.plan import Plan
from actors.prepare import PreparedRun, prepare_run
from rl.agents.rollouts import AgentPlayer
from rl.agents.task import get_program
from rl.config.registry import RunRequest
from rl.config.tree import replace_values
from rl.loop.stop_request import StopRequest
from rl.loop.warmup import SupervisedWarmup
from rl.observability.console import print_line, show_progress
from rl.observability.events import Events
from rl.observability.machine import RunLimits
from rl.observability.run_folder import RunFolder
from rl.protocols import Rewarder
from rl.rollouts.renderer import Renderer
from rl.rollouts.rubric import Rubric
from rl.tasks.task import Task
from rl.training.checkpoints.config import LoadSource
from rl.training.checkpoints.files import DamagedCheckpointError, put_aside
from rl.training.checkpoints.tensors import select_own_exclusions
from rl.utils.proxies import allow_loopback
from rl.weights.store import WeightStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The actors of a run, ready to be called, with its config, plan and folder."""

    config: RunConfig
    plan: Plan
    folder: RunFolder
    events: Events
    cluster: Cluster
    rubric: Rubric
    generator: Router
    trainer: TrainerClient
    publisher: GeneratorPool
    rewarder: Rewarder
    agents: AgentPlayer | None
    """Player of the task's agents; None for a task without agents."""
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
    """Check a config, start its actors, load the starting weights; end everything with the block.

    Nothing is pushed yet: the first call is a push. A process that dies is replaced as in a
    controller run; only the loss of the trainer is an error, after which
    `run.cluster.restart_trainer(error)` starts a new one with the starting weights.

    Raises:
        ValueError: the config cannot run, as in `prepare_run`.
        RunError: a process did not come up, or ran into an error.

    Example:
        >>> async with open_run(configs.sum_digits.tiny()) as run:
        ...     version = await run.publisher.push()
    """
    if Launcher.current is not None:
        raise RuntimeError(
            "this process runs actors already: leave the block of the other run first"
        )
    allow_loopback()
    config = fit_to_devices(config, num_gpus=count_gpus())
    request = RunRequest(module="script", function="open_run", config=config)
    with prepare_run(request) as prepared:
        async with start_actors(prepared) as run:
            await load_weights(run)
            yield run


# The actors


@asynccontextmanager
async def start_actors(
    prepared: PreparedRun, *, stop: StopRequest | None = None
) -> AsyncIterator[Run]:
    """Start the actors of a run, and end them with the block, however it ends.

    The trainer holds the starting point's weights; `load_weights` loads the checkpoint of the
    config or makes the warm-up.

    Args:
        stop: gets the first Ctrl-C, SIGTERM or SIGHUP while a loop listens to it.
    """
    config, plan, folder = prepared.config, prepared.plan, prepared.folder
    events = Events(folder.events)
    store: WeightStore = config.weights.build(dtype=config.generator.dtype, run_folder=folder.path)
    # The folder of temporary files is on this machine only.
    on_disk: AbstractContextManager[None] = (
        nullcontext() if config.launch.on_cluster else guard_temporary_files()
    )
    try:
        with on_disk:
            # The launcher starts every process, and has ended all of them after its block.
            async with supervise(stop=stop) as launcher:
                rubric = plan.task.rubric(seed=config.seed)
                with show_progress("starting the actors (import, load, compile)"):
                    cluster = await _start_cluster(
                        prepared, launcher=launcher, store=store, rubric=rubric, events=events
                    )
                print_line(cluster.network)
                rewards = open_rewarder(cluster.reward, config=config.reward, rubric=rubric)
                player = open_player(
                    cluster.agents, config.agents, task=plan.task, renderer=plan.renderer
                )
                async with rewards as rewarder, player as agents:
                    yield Run(
                        config=config,
                        plan=plan,
                        folder=folder,
                        events=events,
                        cluster=cluster,
                        rubric=rubric,
                        generator=make_router(
                            cluster.pool, strategy=config.router, seed=config.seed
                        ),
                        trainer=TrainerClient(cluster.trainer),
                        publisher=cluster.pool,
                        rewarder=rewarder,
                        agents=agents,
                        limits=await _measure_limits(prepared, cluster),
                    )
                # After an error the processes are killed: a clean end could wait for what failed.
                await cluster.close()
    finally:
        store.discard()


async def _start_cluster(
    prepared: PreparedRun,
    *,
    launcher: Launcher,
    store: WeightStore,
    rubric: Rubric,
    events: Events,
) -> Cluster:
    config, plan, folder = prepared.config, prepared.plan, prepared.folder
    program = get_program(plan.task)
    return await start_cluster(
        _set_total_steps(config),
        launcher=launcher,
        model_spec=plan.start.spec,
        hf_assets_path=str(plan.start.folder),
        store=store,
        logs=LogSettings(
            folder=folder.logs, console_level=config.console_level, timeline=config.timeline
        ),
        parity=plan.parity,
        # On policy nothing runs during a pull that it would wait for.
        drains=config.loop.max_off_policy_steps > 0 and config.generator.on_update == "drain",
        rubric=rubric,
        agents=None if program is None else AgentSetup(program=program, renderer=plan.renderer),
        trainer_arguments={"model_spec": plan.start.spec, "failure_folder": str(folder.path)},
        events=events.add,
    )


async def _measure_limits(prepared: PreparedRun, cluster: Cluster) -> RunLimits | None:
    config, loop = prepared.config, prepared.config.loop
    if not config.limits.enable:
        return None
    return await measure_run_limits(
        cluster,
        spec=prepared.plan.start.spec,
        group_size=loop.group_size,
        groups_per_batch=loop.groups_per_batch,
        max_off_policy_steps=loop.max_off_policy_steps,
    )


def _set_total_steps(config: RunConfig) -> RunConfig:
    """Return the config with the run's optimizer steps where the learning rate leaves them open."""
    if config.trainer.lr_scheduler.total_steps:
        return config
    total = config.loop.num_steps * config.loop.num_minibatches
    steps = {"total_steps": total} if total else {"decay": "constant"}
    changes = {f"trainer.lr_scheduler.{name}": value for name, value in steps.items()}
    return replace_values(config, changes)


# The weights


async def load_weights(
    run: Run,
    *,
    find: Callable[[], LoadSource | None] | None = None,
    may_set_aside: Callable[[LoadSource], bool] | None = None,
) -> LoadSource | None:
    """Load the checkpoint to continue from and return it; make the warm-up if there is none.

    The warm-up of an earlier run with the same settings is the starting point already. Without a
    checkpoint and a warm-up the trainer keeps the starting point's weights, with which it was set
    up. A checkpoint with damaged tensors is set aside, and `find` is called again.

    Args:
        find: looks for the checkpoint; None takes that of the config.
        may_set_aside: says whether a damaged checkpoint is the run's own; None: none is.

    Raises:
        DamagedCheckpointError: the checkpoint may not be set aside.
    """
    patterns = run.config.trainer.checkpoint.exclude_from_loading
    while True:
        source = run.plan.source if find is None else find()
        if source is None:
            break
        exclude = None
        if source.whole:
            # A run leaves less out of its own: what is only compared, or could not be read.
            exclude = select_own_exclusions(patterns, model_only=source.model_only)
        try:
            version = await run.trainer.load_checkpoint(
                str(source.path), model_only=source.model_only, exclude=exclude
            )
        except DamagedCheckpointError as error:
            if may_set_aside is None or not may_set_aside(source):
                raise
            put_aside(source.path, error)
        else:
            logger.info("loaded %s, policy version %d", source.path, version)
            return source

    if run.plan.start.warmed_up is not None:
        await _warm_up(run, destination=run.plan.start.warmed_up)
    return None


async def _warm_up(run: Run, *, destination: Path) -> None:
    """Train supervised steps and save them as a Hugging Face folder.

    The folder is then loaded, as every later run does, so that all of them start alike.
    """
    config, trainer = run.config.warmup, run.trainer
    assert config is not None
    if not destination.exists():  # else a trainer that was lost since has made it
        warmup: SupervisedWarmup = config.build(
            trainer=trainer, renderer=run.renderer, environments=run.plan.environments
        )
        with show_progress("warm-up", total=config.num_steps) as advance:
            await warmup.run(
                run.task.warmup_problems(seed=run.config.seed),
                on_step=lambda loss: advance(note=f"loss {loss:.3f}"),
            )
        try:
            await trainer.export_hf(str(destination), dtype="float32")
        except ActorCallError:
            # Another run with the same starting point may have finished its own first.
            if not destination.exists():
                raise
    await trainer.load_checkpoint(str(destination))
    logger.info("warmed up; starting from %s", destination)
