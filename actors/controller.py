"""Controller: runs a config from its check to its learning curve.

The order of a start, from the command line to the first step:

    1  main                    rl/config/cli.py              parse the options, find the config
       start_early             actors/launch/early.py        have a process import vLLM meanwhile
    2  configs.sum_digits.tiny configs/sum_digits.py         (or another) return the whole config
    3  Controller.run          here                          then `_train`, `_train_on_actors`
    4  prepare_run             actors/prepare.py                 check, open the folder, record
       make_plan               actors/preflight/plan.py      everything that can be checked
    5  start_actors            actors/run.py
       start_cluster           actors/cluster/cluster.py     place the roles, start the hosts
       RoleStarter.start_all   actors/cluster/starter.py     start the processes of all roles
    6  Training.train          here                          one `_run_attempt`, more after a loss
    7  load_weights            actors/run.py                 checkpoint or warm-up
    8  Training._build_loop    here
    9  Loop.run                rl/loop/loop.py               in `_run_steps`: `_begin` pushes the
                                                             first weights and evaluates, `_step`
                                                             is the first step

The controller is this process; the actors work in theirs. A run on its actors goes on through
losses of the trainer (`Training`), each time from its latest checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from actors.cluster.clients import TrainerClient
from actors.cluster.group import ActorGroup
from actors.config import RunConfig
from actors.launch.calls import may_hang
from actors.launch.placement import count_gpus, fit_to_devices, place_actors
from actors.preflight.checks import Machine, has_lora
from actors.preflight.plan import (
    describe_data,
    describe_source,
    find_engine_start,
    make_plan,
)
from actors.prepare import FROM_THE_BEGINNING, PreparedRun, prepare_run
from actors.run import Run, load_weights, start_actors
from losses.types import get_sequence_setting, uses_proximal_logprobs
from rl.agents.rollouts import PlayedTask
from rl.config.configurable import Configurable
from rl.config.json import list_changed_fields, name_code, to_dict
from rl.config.registry import ExplanationForm, RunRequest
from rl.distributed.mesh import ParallelismConfig
from rl.ledger.writer import Ledger
from rl.ledger.writer import cut_back as cut_back_ledger
from rl.loop.ledger import StepLedger
from rl.loop.loop import Loop
from rl.loop.setup import RolloutSetup
from rl.loop.state import StepCheckpoints
from rl.loop.stop_request import StopRequest
from rl.observability.console import describe_results, print_line
from rl.observability.events import read_events
from rl.observability.machine import LimitSink
from rl.observability.metrics import (
    MetricsWriter,
    Sink,
    cut_back,
    draw_learning_curve,
    read_metrics,
)
from rl.observability.recorder import Recorder
from rl.observability.run_folder import RunFolder
from rl.observability.sinks import RunSinks, open_sinks
from rl.reporting.live import follow_run
from rl.rollouts.bundles import EpisodeRoom
from rl.training.checkpoints.config import LoadSource, find_load_source, find_own_checkpoint
from rl.training.checkpoints.files import (
    ADAPTER_FOLDER,
    HF_FOLDER,
    list_damaged_folders,
    list_steps,
)
from rl.training.config import TrainerConfig, limit_samples
from rl.training.engine import TrainingEngine
from rl.types import LoopPosition
from rl.utils.errors import RunError, StopRequestedError
from rl.utils.files import remove
from rl.utils.printing import print_text
from rl.utils.processes import reduce_collections, use_threads

logger = logging.getLogger(__name__)


class Controller(Configurable):
    """The program behind `rl.train`: runs a config to its end, or tries or explains it.

    Example:
        >>> config = configs.sum_digits.tiny()
        >>> request = RunRequest(module="sum_digits", function="tiny", config=config)
        >>> Controller(config=config, request=request).run()
        PosixPath('outputs/sum_digits-tiny-20261128-181835')
    """

    Config: TypeAlias = RunConfig

    def __init__(self, *, config: RunConfig, request: RunRequest) -> None:
        """`request` has the origin of the config, which is written beside the results."""
        self.config = config
        self.request = request

    def run(self) -> Path:
        """Run to the end and return the run's folder, after a dry run its parent.

        A dry run of `--resume` reads the run's checkpoint, and says what would be loaded.

        Raises:
            ValueError: the config cannot run; nothing was started (`prepare_run`).
            RunError: the run stopped.
        """
        config = self.config = fit_to_devices(self.config, num_gpus=count_gpus())
        if config.launch.dry_run:
            self._try_run()
            for placement in place_actors(config, num_gpus=count_gpus()).all:
                print_text(placement.describe())
            return Path(config.dump_folder)
        request = replace(self.request, config=config)
        with prepare_run(request) as prepared:
            began_s = time.monotonic()
            self._train(prepared)
            run_s = time.monotonic() - began_s
        folder = prepared.folder
        summary = describe_results(
            read_metrics(folder.metrics),
            folder=folder,
            run_s=run_s,
            config=to_dict(config),
            findings=_find_at_end(folder),
        )
        print_line(summary)
        return folder.path

    def _try_run(self) -> None:
        """Check the run, and print what it would load; a resumed run's folder is only read."""
        config, resumes, folder = self.config, self.request.resumes, None
        if resumes is not None:
            folder = RunFolder.to_read(resumes, checkpoints=config.trainer.checkpoint.shared_folder)
            # That this run is a dry one is no change of the config.
            real_run = replace(config, launch=replace(config.launch, dry_run=False))
            for change in list_changed_fields(folder.config_json, real_run):
                print_text(f"changed: {change}")
        plan = make_plan(config, resumes=folder)
        data = describe_data(plan.task)
        if data is not None:
            print_text(f"data: {data}")
        for line in describe_source(plan):
            print_text(line)
        if folder is not None and plan.resumed is None:
            print_text(FROM_THE_BEGINNING)

    def explain(self, form: ExplanationForm) -> int:
        """Print the run of this config and what is refused of it; return the exit status.

        Nothing is started or written (docs/configuration.md).
        """
        from actors.preflight.explain import show

        return show(self.request, form=form, here=Machine.here())

    def make_engine(self) -> TrainingEngine:
        """Return the trainer's engine, in this process, on its own.

        Of a trainer of several processes it has another layout, which may round otherwise.
        """
        config = fit_to_devices(self.config, num_gpus=count_gpus())
        start = find_engine_start(config)
        start.make()
        trainer = config.trainer
        if trainer.num_procs > 1:
            trainer = replace(trainer, num_procs=1, parallelism=ParallelismConfig())
        use_threads(trainer.num_threads)
        return TrainingEngine(
            config=trainer, model_spec=start.spec, hf_assets_path=str(start.folder)
        )

    def _train(self, prepared: PreparedRun) -> None:
        try:
            # Collections would take a fifth of this process's time, and find nothing.
            with reduce_collections():
                asyncio.run(_train_on_actors(prepared))
        except BaseException as error:
            folder = prepared.folder
            if list_steps(folder.checkpoints):
                print_line(f"continue with --resume {folder.path}", stream=sys.stderr)
            if not isinstance(error, ValueError):
                raise
            # After the start, a ValueError no longer means a config that cannot run.
            stopped = RunError(str(error))
            stopped.where = ", ".join(getattr(error, "__notes__", ()))
            raise stopped from error


async def _train_on_actors(prepared: PreparedRun) -> None:
    stop = StopRequest()
    async with start_actors(prepared, stop=stop) as run:
        await Training(run, stop=stop).train()
        # Before the actors end: the run is complete even if their end is interrupted.
        run.folder.mark_finished()


class Training:
    """The training of one run: attempts from the latest checkpoint until one of them ends.

        load     the run's latest checkpoint, or what the config starts from (`load_weights`)
        loop     from the state in that checkpoint
        export   Hugging Face folder, adapter, learning curve

    After the loss of the trainer all of this begins again, with the same generators; a resumed run
    does the same.
    """

    def __init__(self, run: Run, *, stop: StopRequest) -> None:
        """`stop` asks the loop to end between two steps."""
        self.run = run
        self.config, self.plan, self.folder = run.config, run.plan, run.folder
        self.stop = stop
        self._has_begun = self.plan.resumed is not None or self.folder.metrics.exists()
        """True if the folder may hold records of this run."""
        self._starts: list[int] = []
        """Step after which each attempt began."""
        self._damaged = {event.get("set_aside") for event in read_events(self.folder.events)}
        """Names of the folders that were set aside and reported."""

    async def train(self) -> None:
        """Train to the end.

        Raises:
            StopRequestedError: the run was asked to stop.
            RunError: the run cannot go on.
        """
        async with open_sinks(
            self.config.sinks,
            folder=self.folder.path,
            title=self.folder.path.name,
            num_steps=self.config.loop.num_steps,
            settings=to_dict(self.config),
            follow=partial(follow_run, self.folder.path),
        ) as sinks:
            while True:
                try:
                    await self._run_attempt(sinks)
                    return
                except RunError as error:
                    if self.stop.was_asked:
                        raise
                    # Attempts that begin at the same step made no progress between their losses.
                    from_here = self._starts.count(self._starts[-1]) if self._starts else 1
                    await self.run.cluster.restart_trainer(error, at_least=from_here)
                    logger.warning(
                        "the trainer is there again; the run goes back to its last checkpoint"
                    )

    async def _run_attempt(self, sinks: RunSinks) -> None:
        run, trainer = self.run, self.run.trainer
        source = await load_weights(run, find=self._find_checkpoint, may_set_aside=self._is_own)
        position = None if source is None else _take_position(source)
        self._starts.append(0 if position is None else position.step)
        self._report_damaged()
        # Only after the load: from a damaged checkpoint the run goes back further.
        if self._has_begun:
            self._go_back(source)
        self._has_begun = True
        with MetricsWriter(self.folder.metrics) as metrics, sinks.show_attempt():
            loop = self._build_loop(metrics=metrics, sinks=sinks, position=position, source=source)
            in_background = self.config.trainer.checkpoint.async_mode != "disabled"
            async with _finish_last_save(run, in_background=in_background):
                await run.cluster.run_training(loop.run())
        ends = [self._export(trainer)]
        if self.config.loop.num_steps or self.config.loop.eval_every:
            # In a thread: importing matplotlib takes as long as the export.
            draws = asyncio.to_thread(
                draw_learning_curve, self.folder.metrics, self.folder.learning_curve
            )
            ends.append(draws)
        await asyncio.gather(*ends)

    def _find_checkpoint(self) -> LoadSource | None:
        """Return the latest checkpoint of the run, or else the one of the config."""
        folder, asked = self.folder.checkpoints, self.plan.source
        if self._has_begun and self.config.trainer.checkpoint.saves:
            own = find_own_checkpoint(folder, num_steps=self.config.loop.num_steps)
            if own is not None:
                return asked if asked is not None and asked.path == own.path else own
        if asked is None or asked.path.is_dir():
            return asked
        return find_load_source(self.config.trainer.checkpoint, repairs=True)

    def _is_own(self, source: LoadSource) -> bool:
        """Return whether a damaged checkpoint is in the run's own folder, and not another run's."""
        return (
            self.config.trainer.checkpoint.saves and source.path.parent == self.folder.checkpoints
        )

    def _report_damaged(self) -> None:
        for path in list_damaged_folders(self.folder.checkpoints):
            if path.name not in self._damaged:
                self._damaged.add(path.name)
                self.run.events.add("checkpoint_damaged", set_aside=path.name)

    def _go_back(self, source: LoadSource | None) -> None:
        """Drop the records of steps after the checkpoint."""
        position = None if source is None or not source.whole else source.position
        # The step may be of another run's checkpoint, which the records do not belong to.
        step = self._starts[-1]
        logger.info("going on after step %d", step)
        cut_back(metrics=self.folder.metrics, rollouts=self.folder.rollouts, position=position)
        cut_back_ledger(self.folder.ledger, step=None if position is None else position.step)
        self.run.events.add("went_back", to_step=step)

    def _open_ledger(self) -> StepLedger | None:
        config = self.config
        if not config.ledger.enable:
            return None
        loss = config.trainer.loss
        return StepLedger(
            ledger=Ledger(self.folder.ledger, config=config.ledger),
            config=config.loop,
            loss={"class": name_code(type(loss)), **to_dict(loss)},
            trained_roles=self._list_trained_roles(),
        )

    def _list_trained_roles(self) -> tuple[str, ...] | None:
        """Return the roles that are trained on; None if the task chooses its branches itself."""
        agents = self.config.agents
        if agents is None:
            return None if isinstance(self.plan.task, PlayedTask) else ("main",)
        chooses = getattr(self.plan.task, "choose_branches", None) is not None
        return None if chooses else agents.trained_roles

    def _build_loop(
        self,
        *,
        metrics: MetricsWriter,
        sinks: RunSinks,
        position: LoopPosition | None,
        source: LoadSource | None,
    ) -> Loop:
        config, plan, run = self.config, self.plan, self.run
        outputs: list[Sink] = [metrics, sinks]
        # The checkpoint of another run is none of this folder: its step is saved here again.
        in_folder = source is not None and source.path.parent == self.folder.checkpoints
        loop: Loop = config.loop.build(
            trainer=run.trainer,
            publisher=run.publisher,
            rollouts=RolloutSetup(
                generator=run.generator,
                rewarder=run.rewarder,
                renderer=plan.renderer,
                task=plan.task,
                max_sequence_tokens=config.generator.max_model_len,
                seed=config.seed,
                room=_get_episode_room(config.trainer),
                thread=plan.environments.thread,
                agents=run.agents,
            ),
            sinks=outputs if run.limits is None else [LimitSink(limits=run.limits, sinks=outputs)],
            checkpoints=StepCheckpoints(
                trainer=run.trainer,
                config=config.trainer.checkpoint,
                folder=str(self.folder.checkpoints),
                records=metrics,
                can_answer=partial(_is_responsive, run.cluster.trainer),
                problems=plan.problems,
                last_saved=position.step if position is not None and in_folder else None,
            ),
            recorder=Recorder(self.folder.rollouts, config=config.recorder),
            ledger=self._open_ledger(),
            watch=sinks.console.watch,
            position=position,
            proximal_logprobs=uses_proximal_logprobs(config.trainer.loss),
            stop=self.stop,
        )
        return loop

    async def _export(self, trainer: TrainerClient) -> None:
        checkpoint, folder = self.config.trainer.checkpoint, self.folder.checkpoints
        exports: list[tuple[Path, Callable[[str], Awaitable[None]]]] = []
        if checkpoint.exports:
            exports.append((folder / HF_FOLDER, trainer.export_hf))
        if checkpoint.saves and has_lora(self.config.trainer.converters):
            exports.append((folder / ADAPTER_FOLDER, trainer.save_adapter))
        for path, export in exports:
            if path.exists():
                # It is of this run's earlier end: another run's was refused before the start.
                remove(path)
            await export(str(path))


def _get_episode_room(trainer: TrainerConfig) -> EpisodeRoom | None:
    """Return what must hold all rows of an episode; None for a loss that may see them apart."""
    if get_sequence_setting(trainer.loss) is None:
        return None
    return EpisodeRoom(
        max_tokens=trainer.training.max_tokens_per_microbatch,
        max_rows=limit_samples(trainer.training, trainer.parallelism),
    )


def _take_position(source: LoadSource) -> LoopPosition | None:
    """Return the position of the loop that saved the checkpoint, or None."""
    if source.position is None or source.whole:
        return source.position
    # The checkpoint is another run's: this run has no record of its evaluation.
    return replace(source.position, evaluated=False)


def _find_at_end(folder: RunFolder) -> dict[str, str]:
    """Return what looks wrong in a finished run, a text for each kind of finding."""
    try:
        return follow_run(folder.path)()
    except Exception as error:
        logger.warning("findings failed: %r", error, exc_info=error)
        return {}


def _is_responsive(trainer: ActorGroup, error: Exception) -> bool:
    """Return whether no process of the trainer is dead, as far as this host shows, or may hang."""
    return not trainer.find_dead() and not may_hang(trainer.name, after=error)


@asynccontextmanager
async def _finish_last_save(run: Run, *, in_background: bool) -> AsyncIterator[None]:
    """Let the trainer finish a background save before a run ends early."""
    try:
        yield
    except Exception as error:
        is_stop = isinstance(error, StopRequestedError)
        if in_background and (is_stop or _is_responsive(run.cluster.trainer, error)):
            # The trainer itself may be the reason of another end.
            with nullcontext() if is_stop else suppress(RunError):
                await run.trainer.finish_saving()
        raise
