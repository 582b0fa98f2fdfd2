"""A run before its actors: its config is checked, its folder is open, and events are recorded."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from actors.cluster.cluster import find_network_use
from actors.config import RunConfig
from actors.launch.early import has_started_early, suit_network
from actors.launch.member import record_process
from actors.preflight.explain import find_options_set_in_vain
from actors.preflight.plan import Plan, describe_data, make_plan
from rl.agents.task import get_program
from rl.config.json import list_changed_fields, to_dict, write_defaults, write_json
from rl.config.registry import RunRequest
from rl.config.tree import check_fields, find_input_paths
from rl.observability.console import print_line
from rl.observability.events import Events, write_environment
from rl.observability.logs import setup_logging
from rl.observability.run_folder import RunFolder
from rl.observability.spans import RECORDER, STATE_FOLDER
from rl.observability.stacks import catch_signal, stop_writing_stacks
from rl.starting_point import StartingPoint
from rl.training.checkpoints.config import CheckpointConfig
from rl.training.failures import raise_if_unwritten
from rl.utils.files import hold_folder_lock, name_folder_errors

logger = logging.getLogger(__name__)

FROM_THE_BEGINNING = "starting from the beginning: there is no checkpoint to go on from"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """A run that has passed its checks and has an open folder; no process is started yet."""

    request: RunRequest
    config: RunConfig
    plan: Plan
    folder: RunFolder
    changes: Sequence[str] = ()
    """A line for each field of a resumed run that differs from its earlier attempt."""


@contextmanager
def prepare_run(request: RunRequest) -> Iterator[PreparedRun]:
    """Check the config, open the folder of a new or resumed run, and record the block's events.

    Raises:
        ValueError: the config cannot run; an earlier run of that name is as it was. Nothing was
            written, except that a checkpoint folder outside of the run's folder was made and has a
            lock file.
    """
    config: RunConfig = request.config
    check_fields(config)  # a script may have edited it
    with _lock_shared_checkpoints(config.trainer.checkpoint):
        # Both check the config with `make_plan`: a new run before its folder is made, a resumed run
        # after its folder is locked.
        prepared = _open_new(request) if request.resumes is None else _open_resumed(request)
        with prepared.folder as folder:
            if config.print_config:
                print_line(json.dumps(to_dict(config), indent=2))
            print_line(f"run folder: {folder.path}")
            if config.launch.share_gpus:
                print_line("trainer and generators take turns on the same GPUs (launch.share_gpus)")
            with _open_log(folder, console_level=config.console_level):
                _report_start(prepared)
                write_environment(folder.environment)
                with _record_events(prepared):
                    yield prepared
                logger.info("finished")
            folder.mark_finished()


def _lock_shared_checkpoints(config: CheckpointConfig) -> AbstractContextManager[object]:
    """Lock a checkpoint folder outside of the run's folder before anything in it is read."""
    if config.shared_folder is None or not config.saves:
        return nullcontext()
    otherwise = (
        "only one run at a time may save there: choose another trainer.checkpoint.folder, or "
        "trainer.checkpoint.load_only"
    )
    return hold_folder_lock(
        config.shared_folder, as_what="trainer.checkpoint.folder", otherwise=otherwise
    )


def _open_new(request: RunRequest) -> PreparedRun:
    """Check the config of a new run, then make its folder."""
    config: RunConfig = request.config
    # The checks come first: a config that cannot run leaves no folder, and replaces none.
    plan = _check(config)

    inputs = find_input_paths(config)
    inputs.pop("dump_folder", None)  # The parent of the run's folder is written to, not read.
    folder = RunFolder.create(
        config.dump_folder,
        config.name or request.origin.replace(".", "-"),
        time_stamp=config.name is None,
        overwrite=config.overwrite,
        inputs=inputs,
        checkpoints=config.trainer.checkpoint.shared_folder,
    )
    try:
        _write_start(request, folder=folder, start=plan.start)
    except BaseException:
        # The name stays free, and a folder that was there stays usable.
        folder.discard()
        raise
    return PreparedRun(request=request, config=config, plan=plan, folder=folder)


def _open_resumed(request: RunRequest) -> PreparedRun:
    """Lock the folder of a run that goes on, then check its config."""
    config: RunConfig = request.config
    assert request.resumes is not None
    # The lock comes first: the checks read the folder's checkpoints.
    folder = RunFolder.resume(request.resumes, checkpoints=config.trainer.checkpoint.shared_folder)
    try:
        # Before the new config replaces the one of the earlier attempt.
        changes = list_changed_fields(folder.config_json, config)
        # The plan may set damaged checkpoints aside, which the log tells.
        with _open_log(folder, console_level=config.console_level):
            plan = _check(config, resumes=folder)
        _write_start(request, folder=folder, start=plan.start)
        folder.resume_writing()
    except BaseException:
        folder.close()
        raise
    return PreparedRun(request=request, config=config, plan=plan, folder=folder, changes=changes)


def _check(config: RunConfig, *, resumes: RunFolder | None = None) -> Plan:
    """Check the config; start this program anew if its network was chosen without knowing it."""
    plan = make_plan(config, resumes=resumes)
    if has_started_early():
        rubric = plan.task.rubric(seed=config.seed)
        needs_network = find_network_use(config, rubric, get_program(plan.task))
        suit_network(config.launch, needs_network=needs_network)
    return plan


def _write_start(request: RunRequest, *, folder: RunFolder, start: StartingPoint) -> None:
    """Write config and starting model.

    Raises:
        ValueError: a file cannot be written; nothing is started yet.
    """
    with name_folder_errors(folder.config_json, "written"):
        write_json(request, folder.config_json)
    if request.defaults is not None:
        with name_folder_errors(folder.defaults_json, "written"):
            write_defaults(request, folder.defaults_json)
    with raise_if_unwritten(str(start.folder)):
        start.make()


@contextmanager
def _open_log(folder: RunFolder, *, console_level: str) -> Iterator[None]:
    undo_logging = setup_logging("controller", folder=folder.logs, console_level=console_level)
    try:
        yield
    finally:
        undo_logging()


def _report_start(prepared: PreparedRun) -> None:
    """Print and log what a reader of the run has to know about its config."""
    request, plan = prepared.request, prepared.plan
    logger.info("config %s", request.origin)
    data = describe_data(plan.task)
    if data is not None:
        # Columns may have been found by their usual names: the user sees which.
        print_line(f"data: {data}")
    for path in find_options_set_in_vain(request):
        logger.warning("set without effect: %s", path)
        print_line(f"set without effect: {path}")
    for change in prepared.changes:
        logger.info("changed: %s", change)
        print_line(f"changed: {change}")
    for difference in plan.differences:
        logger.warning("%s", difference)
        print_line(difference)
    logger.info("starting from %s", plan.start.folder)


@contextmanager
def _record_events(prepared: PreparedRun) -> Iterator[None]:
    """Record the controller's events and spans in the folder."""
    folder, resumed = prepared.folder, prepared.plan.resumed
    for file in (folder.logs / STATE_FOLDER).glob("*"):
        file.unlink()  # processes of the earlier attempt would count as dead
    catch_signal()
    record_process(folder.logs, role="controller", rank=0, timeline=prepared.config.timeline)

    events = Events(folder.events)
    position = None if resumed is None else resumed.position
    # Whether raw prompts are a fault depends on it, and the model may be gone when that is asked.
    tokenizer = prepared.plan.renderer.tokenizer
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if prepared.request.resumes is None:
        events.add("started", chat_template=has_template)
    elif position is None:
        events.add("resumed", step=0, chat_template=has_template)
        print_line(FROM_THE_BEGINNING)
    else:
        events.add("resumed", step=position.step, chat_template=has_template)
        print_line(f"going on after step {position.step}")

    try:
        yield
        events.add("finished")
    except BaseException as error:
        # The log gets the traceback; who called for the run prints the message.
        logger.info("the run stopped: %s", type(error).__name__, exc_info=True)
        events.add("stopped", reason=f"{type(error).__name__}: {error}")
        raise
    finally:
        RECORDER.stop()  # the state file keeps the last moment
        stop_writing_stacks()
