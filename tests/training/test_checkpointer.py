"""Saving in the background, retention, and what a kill, a full disk or damaged files leave of it."""

import functools
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from rl.training.checkpoint_files import saved_steps, step_folder
from rl.training.checkpointer import Checkpointer
from rl.training.errors import CheckpointError
from tests.support.forked import die_at_flush, in_copy, limit_files
from tests.training.parts import make_engine, make_samples, write_assets

SAMPLES = make_samples()


class HeldCheckpointer(Checkpointer):
    """Writes when it is let."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gate = threading.Event()

    def _write(self, *args, **kwargs):
        assert self.gate.wait(30)
        super()._write(*args, **kwargs)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return write_assets(tmp_path_factory.mktemp("assets") / "model")


def engine_with(assets, config=None, **fields):
    """An engine with these fields of the checkpointer's config."""
    engine = make_engine(assets)
    config = config or Checkpointer.Config()
    for name, value in fields.items():
        setattr(config, name, value)
    engine.checkpointer = config.build(policy=engine.policy, optimizer=engine.optimizer)
    return engine


def step(engine):
    engine.forward_backward(SAMPLES)
    engine.optim_step()


def state(engine):
    """Copies of everything that a checkpoint holds of model and optimizer."""
    return {name: t.clone() for name, t in engine.checkpointer._tensors(model_only=False).items()}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def loaded(assets, folder):
    engine = make_engine(assets)
    engine.load_checkpoint(str(folder))
    return state(engine)


def entries(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_steps_after_a_background_save_do_not_change_what_is_written(assets, tmp_path):
    engine = engine_with(assets, HeldCheckpointer.Config(async_mode="async"))
    step(engine)
    saved = state(engine)
    engine.save_checkpoint(str(tmp_path / "step-1"), wait=False)
    step(engine)
    assert saved_steps(tmp_path) == {}  # not there before it is whole
    engine.checkpointer.gate.set()
    engine.checkpointer.wait()
    assert entries(tmp_path) == ["step-1"]
    assert_same(loaded(assets, tmp_path / "step-1"), saved)
    assert not torch.equal(state(engine)["model.norm.weight"], saved["model.norm.weight"])


def test_one_save_is_under_way_at_a_time_and_the_end_waits(assets, tmp_path):
    engine = engine_with(assets, async_mode="async")
    for number in (1, 2, 3):
        step(engine)
        engine.save_checkpoint(str(tmp_path / f"step-{number}"), wait=False)
        assert list(saved_steps(tmp_path))[: number - 1] == list(range(1, number))
    engine.close()
    assert entries(tmp_path) == ["step-1", "step-2", "step-3"]
    assert_same(loaded(assets, tmp_path / "step-3"), state(engine))


def test_a_save_that_is_waited_for_is_there_whatever_the_mode(assets, tmp_path):
    engine = engine_with(assets, async_mode="async")
    engine.save_checkpoint(str(tmp_path / "step-1"))
    assert entries(tmp_path) == ["step-1"]


def test_without_a_background_mode_nothing_is_left_for_later(assets, tmp_path):
    engine = engine_with(assets)
    engine.save_checkpoint(str(tmp_path / "step-1"), wait=False)
    assert entries(tmp_path) == ["step-1"]


def test_a_background_save_that_does_not_end_is_an_error_that_names_it(assets, tmp_path):
    engine = engine_with(assets, HeldCheckpointer.Config(async_mode="async", timeout_s=0.01))
    engine.save_checkpoint(str(tmp_path / "step-1"), wait=False)
    with pytest.raises(CheckpointError, match=r"step-1 is not written after checkpoint\.timeout_s=0\.01"):
        engine.close()
    engine.checkpointer.gate.set()
    engine.checkpointer.config.timeout_s = 30.0
    engine.close()
    assert entries(tmp_path) == ["step-1"]


def test_the_latest_few_are_kept_with_the_seed_and_what_is_no_step(assets, tmp_path):
    engine = engine_with(assets, keep_latest_k=2)
    for name in ("hf", "step-x", "mine"):
        (tmp_path / name).mkdir()
    for number in (0, 3, 7, 10, 20):  # by number, not by letters
        engine.save_checkpoint(str(step_folder(tmp_path, number)))
    assert entries(tmp_path) == ["hf", "mine", "step-0", "step-10", "step-20", "step-x"]
    engine.save_checkpoint(str(tmp_path / "elsewhere"))  # no step: nothing is removed for it
    assert list(saved_steps(tmp_path)) == [0, 10, 20]
    assert_same(loaded(assets, tmp_path / "step-10"), state(engine))


def test_all_are_kept_where_k_is_0(assets, tmp_path):
    engine = engine_with(assets, keep_latest_k=0)
    for number in range(1, 13):
        engine.save_checkpoint(str(step_folder(tmp_path, number)))
    assert list(saved_steps(tmp_path)) == list(range(1, 13))


@pytest.mark.medium
@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
def test_killed_at_any_flush_a_save_leaves_what_loads_whole_or_nothing(assets, tmp_path, wait):
    engine = engine_with(assets, async_mode="async", keep_latest_k=2)
    step(engine)
    engine.save_checkpoint(str(tmp_path / "step-1"))
    before = state(engine)
    step(engine)
    after = state(engine)

    def save_and_die(flush):
        die_at_flush(flush)
        engine.save_checkpoint(str(tmp_path / "step-2"), wait=wait)
        engine.checkpointer.wait()
        return "survived"

    flush = 0
    while not saved_steps(tmp_path).get(2):
        flush += 1
        status, _ = in_copy(functools.partial(save_and_die, flush))
        assert status == -signal.SIGKILL
        assert "step-1" in entries(tmp_path)
    # Tensors, metadata, each file and the folder before it has its name, and the last: the folder around it.
    assert flush >= 7
    assert_same(loaded(assets, tmp_path / "step-1"), before)
    assert_same(loaded(assets, tmp_path / "step-2"), after)
    assert [name for name in entries(tmp_path) if name.startswith(".")] == []
    engine.save_checkpoint(str(tmp_path / "step-3"))
    assert entries(tmp_path) == ["step-2", "step-3"]


def test_what_a_killed_save_left_is_removed_by_the_next(assets, tmp_path):
    engine = engine_with(assets)

    def save_and_die():
        die_at_flush(2)
        engine.save_checkpoint(str(tmp_path / "step-1"))
        return "survived"

    assert in_copy(save_and_die)[0] == -signal.SIGKILL
    (left,) = entries(tmp_path)
    assert left.startswith(".step-1.")
    engine.save_checkpoint(str(tmp_path / "step-2"))
    assert entries(tmp_path) == ["step-2"]


@pytest.mark.parametrize("wait", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("num_bytes", [0, 3_000, 60_000])
def test_on_a_full_disk_the_error_says_so_and_the_checkpoint_before_loads(assets, tmp_path, num_bytes, wait):
    engine = engine_with(assets, async_mode="async")
    step(engine)
    engine.save_checkpoint(str(tmp_path / "step-1"))
    before = state(engine)
    step(engine)

    def save_on_full_disk():
        limit_files(num_bytes)
        try:
            engine.save_checkpoint(str(tmp_path / "step-2"), wait=wait)
            engine.save_checkpoint(str(tmp_path / "step-3"))
        except CheckpointError as error:
            return str(error)
        return "nothing raised"

    status, error = in_copy(save_on_full_disk)
    assert status == 0
    assert "step-2 was not written, earlier ones are as they were" in error
    assert os.strerror(27) in error  # File too large, as this full disk says
    assert entries(tmp_path) == ["step-1"]
    assert_same(loaded(assets, tmp_path / "step-1"), before)


def test_on_a_full_disk_an_export_says_so_and_nothing_of_it_remains(assets, tmp_path):
    engine = make_engine(assets)

    def export_on_full_disk():
        limit_files(3_000)
        try:
            engine.export_hf(str(tmp_path / "hf"))
        except CheckpointError as error:
            return str(error)
        return "nothing raised"

    status, error = in_copy(export_on_full_disk)
    assert status == 0
    assert f"{tmp_path / 'hf'} was not written, what was there is as it was: " in error
    assert entries(tmp_path) == []


def test_an_error_in_the_background_is_raised_once_by_the_next_call(assets, tmp_path):
    engine = engine_with(assets, HeldCheckpointer.Config(async_mode="async"))
    engine.save_checkpoint(str(tmp_path / "step-1"), wait=False)
    (tmp_path / "step-1").mkdir()  # somebody else takes the name
    (tmp_path / "step-1" / "file").write_text("")
    engine.checkpointer.gate.set()
    with pytest.raises(FileExistsError, match="step-1 already exists"):
        engine.save_checkpoint(str(tmp_path / "step-2"))
    engine.save_checkpoint(str(tmp_path / "step-2"))
    assert entries(tmp_path) == ["step-1", "step-2"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", "manifest.json"])
def test_damaged_files_are_named_and_nothing_of_them_is_loaded(assets, tmp_path, name):
    engine = engine_with(assets)
    engine.save_checkpoint(str(tmp_path / "step-1"))
    step(engine)
    before = state(engine)
    file = tmp_path / "step-1" / name
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 16
    for content, says in ((whole[:-9], "truncated|corrupted"), (flipped, "corrupted|truncated|missing")):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"checkpoint file {tmp_path}/step-1/.* is ({says})") as error:
            engine.load_checkpoint(str(tmp_path / "step-1"))
        assert name in str(error.value) or name == "manifest.json"  # whose damage shows in what it lists
        assert_same(state(engine), before)
    file.unlink()
    with pytest.raises(ValueError, match="is missing"):
        engine.load_checkpoint(str(tmp_path / "step-1"))
    file.write_bytes(whole)
    assert engine.load_checkpoint(str(tmp_path / "step-1")) == 0
