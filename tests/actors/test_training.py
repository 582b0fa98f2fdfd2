import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.cluster.cluster import TRAINER_GRACE_S, Cluster
from actors.controller import Controller, Training
from actors.launch.calls import ActorLostError
from actors.run import load_weights
from configs.sum_digits import tiny
from rl.loop.stop_request import StopRequest
from rl.observability.events import read_events
from rl.observability.metrics import read_metrics
from rl.observability.run_folder import RunFolder
from rl.tasks.fingerprint import make_fingerprint
from rl.tasks.sum_digits import SumDigits
from rl.training.checkpoints.config import LoadSource, find_own_checkpoint
from rl.training.checkpoints.files import DamagedCheckpointError, list_steps, read_state
from rl.utils.errors import RunError
from tests.support.checkpoints import save
from tests.support.event_files import points
from tests.support.fake_cluster import FakeCluster, FakeTrainer, fake_run
from tests.support.faulty_configs import short
from tests.support.mortal import Mortal
from tests.support.virtual_time import now_s, run_in_virtual_time


class Loading:
    """Trainer that finds the named checkpoints damaged when it reads their tensors."""

    def __init__(self, *damaged: str) -> None:
        self.damaged = damaged
        self.calls: list[tuple[str, object]] = []

    async def load_checkpoint(
        self, folder: str, *, model_only: bool = False, exclude: Sequence[str] | None = None
    ) -> int:
        name = folder.rpartition("/")[2]
        self.calls.append((name, exclude))
        if name in self.damaged:
            raise DamagedCheckpointError(
                f"checkpoint file {folder}/__0_0.distcp is corrupted: its crc32 ..."
            )
        return 1


def load(trainer, folder, *, may_set_aside=True, source=None):
    plan = SimpleNamespace(start=SimpleNamespace(warmed_up=None))
    run: Any = SimpleNamespace(trainer=trainer, config=tiny(), plan=plan)
    return asyncio.run(
        load_weights(
            run,
            find=lambda: source or find_own_checkpoint(folder, num_steps=9),
            may_set_aside=lambda source: may_set_aside,
        )
    )


def test_damaged_checkpoints_are_set_aside_until_one_loads(tmp_path, caplog):
    for step in (2, 4, 6):
        save(tmp_path, step)
    trainer = Loading("step-4", "step-6")
    source = load(trainer, tmp_path)
    assert source is not None
    assert source.path == tmp_path / "step-2"
    assert trainer.calls == [("step-6", ()), ("step-4", ()), ("step-2", ())]
    assert list(list_steps(tmp_path)) == [2]
    assert [record.message.partition(";")[2] for record in caplog.records] == [
        f" it is set aside as step-{step}.damaged, and an earlier one is taken" for step in (6, 4)
    ]


def test_checkpoint_of_another_run_is_loaded_as_configured_and_an_error_if_damaged(tmp_path):
    source = LoadSource(path=tmp_path / "other", model_only=True, position=None)
    trainer = Loading()
    assert load(trainer, tmp_path, source=source) is source
    assert trainer.calls == [("other", None)]
    save(tmp_path, 2)
    with pytest.raises(DamagedCheckpointError, match=r"__0_0.distcp is corrupted"):
        load(Loading("step-2"), tmp_path, may_set_aside=False)
    assert list(list_steps(tmp_path)) == [2]


def run_config() -> Controller.Config:
    config = short()
    config.task = SumDigits.Config(num_integers=2, num_eval=4)
    config.loop.num_steps, config.loop.eval_every = 5, 2
    config.loop.groups_per_batch, config.loop.group_size = 2, 4
    config.trainer.checkpoint.interval = 2
    config.trainer.checkpoint.last_save_in_hf = False
    return config


def train(
    config: Controller.Config,
    tmp_path: Path,
    name: str,
    *,
    dies_at: Sequence[int] = (),
) -> tuple[list[dict[str, float]], list[FakeTrainer]]:
    """Return the records of a run whose trainers die one after another, and the trainers."""
    trainers = [FakeTrainer(dies_at=at) for at in (*dies_at, None)]
    with RunFolder.create(tmp_path, name) as folder:
        run = fake_run(config, folder, trainers)
        asyncio.run(Training(run, stop=StopRequest()).train())
        assert run.cluster.trainer.mesh is trainers[-1]
        assert folder.learning_curve.exists()
        records = read_metrics(folder.metrics)
    return [
        {k: v for k, v in r.items() if not k.startswith(("time/", "perf/", "limit/"))}
        for r in records
    ], trainers


def test_run_that_loses_its_trainer_goes_back_and_ends_like_an_undisturbed_one(tmp_path):
    config = run_config()
    whole, _ = train(config, tmp_path, "whole")
    assert [r["step"] for r in whole] == [0, 1, 2, 2, 3, 4, 4, 5, 5]
    config.sinks.tensorboard.enable = True
    records, trainers = train(config, tmp_path, "lost", dies_at=(3, 3, 4))
    assert [trainer.loaded for trainer in trainers] == [[], ["step-2"], ["step-2"], ["step-4"]]
    assert records == whole
    # Every checkpoint knows the problems.
    position = read_state(tmp_path / "lost" / "checkpoints" / "step-4").position
    assert position is not None
    assert position.problems == make_fingerprint(config.task.build(), seed=config.seed)
    # TensorBoard has each point once.
    shown = points(tmp_path / "lost" / "tensorboard")
    for name in ("reward/mean", "eval/correct", "policy_version"):
        expected = [(r["step"], r[name]) for r in whole if name in r]
        assert [step for step, _ in shown[name]] == [step for step, _ in expected]
        assert [value for _, value in shown[name]] == pytest.approx(
            [value for _, value in expected]
        )


def test_checkpoint_found_damaged_during_recovery_is_an_event(tmp_path):
    config = run_config()
    second = FakeTrainer()
    with RunFolder.create(tmp_path, "run") as folder:

        class Damaging(FakeCluster):
            async def restart_trainer(self, error: RunError, *, at_least: int = 1) -> None:
                (folder.checkpoints / "step-2" / "__0_0.distcp").write_bytes(b"")
                await super().restart_trainer(error, at_least=at_least)

        run = fake_run(config, folder, [FakeTrainer(dies_at=3), second], make_cluster=Damaging)
        asyncio.run(Training(run, stop=StopRequest()).train())
        told = [(event["event"], event.get("set_aside")) for event in read_events(folder.events)]
    assert told == [("checkpoint_damaged", "step-2.damaged"), ("went_back", None)]
    assert second.loaded == []


def test_trainers_that_die_before_saving_anything_end_the_run(tmp_path):
    config = run_config()
    config.recovery.max_restarts = 2
    with pytest.raises(RunError, match=r"^trainer is lost again, after 2 restarts "):
        train(config, tmp_path, "lost", dies_at=(3, 3, 3, 3))
    records, _ = train(
        config, tmp_path, "later", dies_at=(3, 3, 4, 4)
    )  # each checkpoint resets the count
    assert records[-1]["step"] == 5


def test_death_of_an_idle_trainer_ends_the_attempt_after_its_cleanup():
    trainer, closed = Mortal("trainer"), []

    async def training() -> None:
        try:
            await asyncio.sleep(3600)  # a long generation
        finally:
            await asyncio.sleep(2)
            closed.append(now_s())

    async def steps() -> float:
        cluster: Any = SimpleNamespace(trainer=trainer.group())
        running = asyncio.ensure_future(Cluster.run_training(cluster, training()))
        await asyncio.sleep(5)
        trainer.die()
        with pytest.raises(ActorLostError, match=r"^trainer\.training failed: rank 0 of 1 is dead"):
            await running
        return now_s()

    ended_at, _ = run_in_virtual_time(steps())
    # The death shows at the next look; then a call to the trainer would have its time to fail.
    assert closed == [ended_at] == [5.5 + TRAINER_GRACE_S + 2]
