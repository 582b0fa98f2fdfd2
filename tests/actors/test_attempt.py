import asyncio

import pytest

from actors.attempt import drawn_with, load_newest
from configs.sum_digits import tiny
from rl.training.checkpoint_config import LoadSource
from rl.training.checkpoint_files import DamagedCheckpointError, saved_steps
from rl.training.own_checkpoint import own_checkpoint
from tests.training.test_own_checkpoint import save


class Loading:
    """A learner that finds these checkpoints damaged when it reads their tensors."""

    def __init__(self, *damaged: str) -> None:
        self.damaged = damaged
        self.calls: list[tuple[str, object]] = []

    async def load_checkpoint(self, folder, *, model_only=False, exclude=None):
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
