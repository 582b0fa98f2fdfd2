import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.attempt import Training, while_trainer_lives
from actors.calls import ActorLostError
from actors.controller import Controller
from actors.fleet import Fleet
from actors.loading import drawn_with, load_newest
from actors.plan import Plan
from actors.supervision import Restarts
from configs.sum_digits import tiny
from rl.errors import RunError
from rl.observability.events import Events, read_events
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import RunFolder
from rl.rollouts.tried_environments import TriedEnvironments
from rl.starting_point import StartingPoint
from rl.stop_request import StopRequest
from rl.tasks.sum_digits import SumDigits
from rl.training.checkpoint_config import LoadSource
from rl.training.checkpoint_files import DamagedCheckpointError, saved_steps
from rl.training.own_checkpoint import own_checkpoint
from tests.support.event_files import points
from tests.support.fake_fleet import FakeTrainer, fake_fleet
from tests.support.fakes import RENDERER
from tests.support.faulty_configs import short
from tests.support.mortal import Mortal
from tests.support.virtual_time import now_s, run_in_virtual_time
from tests.training.test_own_checkpoint import save


class Loading:
    """A learner that finds these checkpoints damaged when it reads their tensors."""

    def __init__(self, *damaged: str) -> None:
        self.damaged = damaged
        self.calls: list[tuple[str, object]] = []

    async def load_checkpoint(
        self, folder: str, *, model_only: bool = False, exclude: Sequence[str] | None = None
    ) -> int:
        name = folder.rpartition("/")[2]
        self.calls.append((name, exclude))
        if name in self.damaged:
            raise DamagedCheckpointError(f"checkpoint file {folder}/__0_0.distcp is corrupted: its crc32 ...")
        return 1


def load(learner, folder, *, may_set_aside=True):
    find = lambda: own_checkpoint(folder, num_steps=9)  # noqa: E731
    return asyncio.run(load_newest(learner, find, may_set_aside=lambda source: may_set_aside))


def test_tensors_that_turn_out_to_be_damaged_are_set_aside_until_some_can_be_loaded(tmp_path, caplog):
    for step in (2, 4, 6):
        save(tmp_path, step)
    learner = Loading("step-4", "step-6")
    source = load(learner, tmp_path)
    assert source is not None
    assert source.path == tmp_path / "step-2"
    assert learner.calls == [("step-6", ()), ("step-4", ()), ("step-2", ())]
    assert list(saved_steps(tmp_path)) == [2]
    assert [record.message.partition(";")[2] for record in caplog.records] == [
        f" it is set aside as step-{step}.damaged, and an earlier one is taken" for step in (6, 4)
    ]


def test_where_nothing_can_be_loaded_the_run_starts_from_its_beginning(tmp_path):
    save(tmp_path, 2)
    assert load(Loading("step-2"), tmp_path) is None


def test_somebody_elses_damaged_checkpoint_ends_the_run(tmp_path):
    save(tmp_path, 2)
    with pytest.raises(DamagedCheckpointError, match=r"__0_0.distcp is corrupted"):
        load(Loading("step-2"), tmp_path, may_set_aside=False)
    assert list(saved_steps(tmp_path)) == [2]


def test_what_is_not_the_runs_own_is_loaded_as_the_config_says(tmp_path):
    source = LoadSource(path=tmp_path / "other", model_only=True, in_hf=False, position=None)
    learner = Loading()
    assert asyncio.run(load_newest(learner, lambda: source, may_set_aside=lambda _: False)) is source
    assert learner.calls == [("other", None)]


@pytest.mark.parametrize(
    ("path", "value", "changes"),
    [
        ("loop.num_steps", 5, False),
        ("loop.eval_every", 3, False),
        ("loop.sampling.temperature", 0.5, True),
        ("loop.num_samples", 3, True),
        ("loop.max_policy_age", 3, True),
        ("task.num_integers", 5, True),
        ("seed", 7, True),
        ("trainer.optimizer.lr", 1.0, False),
    ],
)
def test_rollouts_are_of_the_settings_that_they_depend_on(path, value, changes):
    config = tiny()
    before = drawn_with(config)
    *parents, name = path.split(".")
    node = config
    for parent in parents:
        node = getattr(node, parent)
    setattr(node, name, value)
    assert (drawn_with(config) != before) == changes


def run_config() -> Controller.Config:
    config = short()
    config.task = SumDigits.Config(num_integers=2, num_eval=4)
    config.loop.num_steps, config.loop.eval_every = 5, 2
    config.loop.num_prompts, config.loop.num_samples = 2, 4
    config.trainer.checkpoint.last_save_in_hf = False
    return config


def training(config: Controller.Config, folder: RunFolder, revive: Any) -> Training:
    task = config.task.build()
    plan = Plan(
        start=StartingPoint(folder=folder.path, spec=config.model),
        source=None,
        resumed=None,
        reference=None,
        task=task,
        environments=TriedEnvironments(make=task.environment, step_timeout_s=20.0),
        renderer=RENDERER,
        canary=None,
    )
    rubric = task.rubric(seed=0)
    stop = StopRequest(say=lambda text: None)
    return Training(config=config, plan=plan, folder=folder, rubric=rubric, stop=stop, revive=revive)


def train(
    config: Controller.Config,
    tmp_path: Path,
    name: str,
    *,
    dies_at: Sequence[int] = (),
    before: Callable[[RunFolder], None] = lambda folder: None,
) -> tuple[list[dict[str, float]], list[FakeTrainer]]:
    """The records of a run whose trainers die one after another, and the trainers."""
    trainers = [FakeTrainer(dies_at=at) for at in (*dies_at, None)]

    days = itertools.count(1)
    restarts = Restarts(config.recovery, now_s=lambda: next(days) * 86400.0)

    async def revive(fleet: Fleet, error: RunError, *, at_least: int) -> Fleet:
        assert "rank 0 of 1 is dead" in str(error)
        restarts.next("trainer", reason=str(error), at_least=at_least)
        (place,) = (i for i, trainer in enumerate(trainers) if trainer is fleet.trainer)
        return replace(fleet, trainer=trainers[place + 1])

    with RunFolder.create(tmp_path, name) as folder:
        before(folder)
        run = training(config, folder, revive)
        fleet = asyncio.run(run.run(fake_fleet(trainers[0], rubric=run.rubric)))
        assert fleet.trainer is trainers[-1]
        assert folder.learning_curve.exists()
        records = read_metrics(folder.metrics)
    return [
        {k: v for k, v in r.items() if not k.startswith(("time/", "perf/", "limit/"))} for r in records
    ], trainers


def test_a_run_that_loses_its_trainer_goes_back_and_ends_as_one_that_did_not(tmp_path):
    config = run_config()
    config.trainer.checkpoint.interval = 2
    whole, _ = train(config, tmp_path, "whole")
    assert [r["step"] for r in whole] == [0, 1, 2, 2, 3, 4, 4, 5, 5]
    records, trainers = train(config, tmp_path, "lost", dies_at=(3, 3, 4))
    assert [trainer.loaded for trainer in trainers] == [[], ["step-2"], ["step-2"], ["step-4"]]
    assert records == whole


@pytest.mark.medium
def test_a_checkpoint_that_turns_out_to_be_damaged_on_the_way_is_an_event(tmp_path):
    config = run_config()
    config.trainer.checkpoint.interval = 2
    second = FakeTrainer()
    with RunFolder.create(tmp_path, "run") as folder:

        async def revive(fleet: Fleet, error: RunError, *, at_least: int) -> Fleet:
            (folder.checkpoints / "step-2" / "__0_0.distcp").write_bytes(b"")
            return replace(fleet, trainer=second)

        (folder.checkpoints / "step-9.damaged").mkdir(parents=True)  # of an earlier run
        run = training(config, folder, revive)
        run.events = Events(folder.events).add
        asyncio.run(run.run(fake_fleet(FakeTrainer(dies_at=3), rubric=run.rubric)))
        told = [(event["event"], event.get("set_aside")) for event in read_events(folder.events)]
    assert told == [("checkpoint_damaged", "step-2.damaged"), ("went_back", None)]
    assert second.loaded == []


def test_a_trainer_that_is_lost_before_a_checkpoint_starts_the_run_from_its_beginning(tmp_path):
    config = run_config()
    whole, _ = train(config, tmp_path, "whole")
    records, trainers = train(config, tmp_path, "lost", dies_at=(1,))
    assert [trainer.loaded for trainer in trainers] == [[], []]
    assert records == whole


def test_tensorboard_has_each_point_once_however_often_the_run_goes_back(tmp_path):
    config = run_config()
    config.trainer.checkpoint.interval = 2
    config.sinks.tensorboard.enable = True
    records, _ = train(config, tmp_path, "lost", dies_at=(3, 3, 4))
    shown = points(tmp_path / "lost" / "tensorboard")
    for name in ("reward/mean", "eval/correct", "policy_version"):
        expected = [(r["step"], r[name]) for r in records if name in r]
        assert [step for step, _ in shown[name]] == [step for step, _ in expected]
        assert [value for _, value in shown[name]] == pytest.approx([value for _, value in expected])
    assert len(shown["reward/mean"]) == 5
    assert len(shown["eval/correct"]) == 4


def test_a_sink_that_cannot_write_is_one_warning_and_the_run_ends_as_without_it(tmp_path, caplog):
    config = run_config()
    whole, _ = train(config, tmp_path, "whole")
    caplog.clear()
    config.sinks.tensorboard.enable = True

    def occupy(folder: RunFolder) -> None:
        (folder.path / "tensorboard").write_text("no folder")

    records, _ = train(config, tmp_path, "refused", before=occupy)
    assert records == whole
    first, last = (
        r.message for r in caplog.records if "tensorboard" in r.message and r.levelname == "WARNING"
    )
    assert first.startswith("tensorboard was not written: ")
    assert last.startswith("tensorboard could not be written: it lacks all of it, which is in ")


def test_a_trainer_that_may_not_be_replaced_ends_the_run_with_its_error(tmp_path):
    config = run_config()

    async def revive(fleet: Fleet, error: RunError, *, at_least: int) -> Fleet:
        raise error

    with RunFolder.create(tmp_path, "run") as folder:
        run = training(config, folder, revive)
        with pytest.raises(RunError, match=r"^step 2: trainer.forward_backward failed: rank 0 of 1 is dead"):
            asyncio.run(run.run(fake_fleet(FakeTrainer(dies_at=1), rubric=run.rubric)))


def test_trainers_that_are_lost_before_they_save_anything_end_the_run_however_far_apart(tmp_path):
    config = run_config()
    config.trainer.checkpoint.interval = 2
    config.recovery.max_restarts = 2
    with pytest.raises(RunError, match=r"^trainer is lost once more, after 2 restarts that came to nothing"):
        train(config, tmp_path, "lost", dies_at=(3, 3, 3, 3))
    records, _ = train(config, tmp_path, "later", dies_at=(3, 3, 4, 4))  # each checkpoint counts anew
    assert records[-1]["step"] == 5


def test_a_trainer_that_dies_while_nothing_is_asked_of_it_ends_the_attempt_which_is_closed_before():
    trainer, closed = Mortal("trainer"), []

    async def training() -> None:
        try:
            await asyncio.sleep(3600)  # of a long generation
        finally:
            await asyncio.sleep(2)
            closed.append(now_s())

    async def steps() -> float:
        fleet = cast(Fleet, SimpleNamespace(recovery=SimpleNamespace(trainer=trainer)))
        running = asyncio.ensure_future(while_trainer_lives(fleet, training()))
        await asyncio.sleep(5)
        trainer.die()
        with pytest.raises(ActorLostError, match=r"^trainer\.training failed: rank 0 of 1 is dead"):
            await running
        return now_s()

    ended_at, _ = run_in_virtual_time(steps())
    assert closed == [ended_at] == [7.0]
