"""Background saves, retention, the remains of a kill or a full disk, and errors of one rank raised
on all.
"""

import functools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rl.training.checkpoints.checkpointer import Checkpointer
from rl.training.checkpoints.files import (
    list_steps,
    read_state,
    step_folder,
    sum_of_file,
    write_description,
)
from rl.training.failures import CheckpointError
from tests.support.distributed import run_ranks
from tests.support.forked import die_at_flush, limit_files, run_in_fork
from tests.training.layouts import parallelism
from tests.training.parts import assert_near, make_engine, step


class HeldCheckpointer(Checkpointer):
    """Checkpointer that writes checkpoints once its gate opens."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gate = threading.Event()

    def _write(self, *args):
        assert self.gate.wait(30)
        super()._write(*args)


def engine_with(assets, kind=Checkpointer, **fields):
    """Build an engine with a checkpointer of these fields."""
    return make_engine(assets, checkpoint=kind.Config(**fields))


def held_engine(assets, **fields):
    return engine_with(assets, HeldCheckpointer, async_mode="async", **fields)


def error_on_full_disk(save, *, num_bytes):
    """Return the error of `save` in a process that can write only `num_bytes` to a file."""

    def limited():
        limit_files(num_bytes)
        try:
            save()
        except CheckpointError as error:
            return str(error)
        return "nothing raised"

    status, error = run_in_fork(limited)
    assert status == 0
    return error


def state(engine):
    """Return copies of all saved tensors."""
    return {name: t.clone() for name, t in engine.checkpointer.tensors().items()}


def assert_loads(assets, folder, expected):
    engine = make_engine(assets)
    engine.load_checkpoint(str(folder))
    assert_near(state(engine), expected, relative=0.0)


def entries(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_steps_during_a_background_save_do_not_change_the_checkpoint(assets, tmp_path):
    engine = held_engine(assets)
    step(engine)
    saved = state(engine)
    engine.save_checkpoint(str(tmp_path / "step-1"), wait=False)
    step(engine)
    assert list_steps(tmp_path) == {}  # The folder does not appear before it is complete.
    engine.checkpointer.gate.set()
    engine.checkpointer.wait()
    assert entries(tmp_path) == ["step-1"]
    assert_loads(assets, tmp_path / "step-1", saved)
    assert not torch.equal(state(engine)["model.norm.weight"], saved["model.norm.weight"])


def test_background_saves_run_one_at_a_time_and_close_waits(assets, tmp_path):
    engine = engine_with(assets, async_mode="async")
    for number in (1, 2, 3):
        step(engine)
        engine.save_checkpoint(str(tmp_path / f"step-{number}"), wait=False)
        assert list(list_steps(tmp_path))[: number - 1] == list(range(1, number))
    engine.close()
    assert entries(tmp_path) == ["step-1", "step-2", "step-3"]
    assert_loads(assets, tmp_path / "step-3", state(engine))


def test_background_save_that_hangs_is_an_error(assets, tmp_path):
    engine = held_engine(assets, timeout_s=0.01)
    engine.save_checkpoint(str(tmp_path / "step-1"), wait=False)
    with pytest.raises(
        CheckpointError, match=r"step-1 is not written after checkpoint\.timeout_s=0\.01"
    ):
        engine.close()
    engine.checkpointer.gate.set()
    engine.checkpointer.config.timeout_s = 30.0
    engine.close()
    assert entries(tmp_path) == ["step-1"]


def test_error_of_a_background_save_is_logged_and_raised_once_by_the_next_call(
    assets, tmp_path, caplog
):
    engine = held_engine(assets)
    engine.save_checkpoint(str(tmp_path / "step-1"), wait=False)
    (tmp_path / "step-1").mkdir()  # Another program takes the name.
    (tmp_path / "step-1" / "file").write_text("")
    engine.checkpointer.gate.set()
    with pytest.raises(FileExistsError, match="step-1 already exists"):
        engine.save_checkpoint(str(tmp_path / "step-2"))
    assert "background save failed: " in caplog.text
    engine.save_checkpoint(str(tmp_path / "step-2"))
    assert entries(tmp_path) == ["step-1", "step-2"]


def test_latest_steps_the_seed_and_other_folders_are_kept(assets, tmp_path):
    engine = engine_with(assets, keep_latest_k=2)
    for name in ("hf", "step-x", "mine"):
        (tmp_path / name).mkdir()
    for number in (0, 3, 7, 10, 20):  # Steps are sorted as numbers, not as strings.
        engine.save_checkpoint(str(step_folder(tmp_path, number)))
    assert entries(tmp_path) == ["hf", "mine", "step-0", "step-10", "step-20", "step-x"]
    engine.save_checkpoint(
        str(tmp_path / "elsewhere")
    )  # This is no step, so none is removed for it.
    assert list(list_steps(tmp_path)) == [0, 10, 20]
    engine.checkpointer.config.keep_latest_k = 0
    for number in (30, 40, 50):
        engine.save_checkpoint(str(step_folder(tmp_path, number)))
    assert list(list_steps(tmp_path)) == [0, 10, 20, 30, 40, 50]


@pytest.mark.medium
def test_save_killed_at_any_flush_leaves_a_complete_checkpoint_or_none(assets, tmp_path):
    engine = engine_with(assets, async_mode="async", keep_latest_k=2)
    step(engine)
    engine.save_checkpoint(str(tmp_path / "step-1"))
    before = state(engine)
    step(engine)
    after = state(engine)

    def save_and_die(flush):
        die_at_flush(flush)
        engine.save_checkpoint(str(tmp_path / "step-2"), wait=False)
        engine.checkpointer.wait()
        return "survived"

    flush = 0
    while not list_steps(tmp_path).get(2):
        flush += 1
        status, _ = run_in_fork(functools.partial(save_and_die, flush))
        assert status == -signal.SIGKILL
        assert "step-1" in entries(tmp_path)
        assert (
            len(entries(tmp_path)) <= 3
        )  # Each save removes the remains of the save killed before.
    # Flushed are the tensors, metadata, each file, the folder before it is renamed, and the parent
    # folder.
    assert flush >= 7
    assert_loads(assets, tmp_path / "step-1", before)
    assert_loads(assets, tmp_path / "step-2", after)
    engine.save_checkpoint(str(tmp_path / "step-3"))
    assert entries(tmp_path) == ["step-2", "step-3"]


@pytest.mark.parametrize(("num_bytes", "wait"), [(0, True), (60_000, False)])
def test_full_disk_is_reported_and_the_checkpoint_before_loads(assets, tmp_path, num_bytes, wait):
    engine = engine_with(assets, async_mode="async")
    step(engine)
    engine.save_checkpoint(str(tmp_path / "step-1"))
    before = state(engine)

    def save_twice():
        engine.save_checkpoint(str(tmp_path / "step-2"), wait=wait)
        engine.save_checkpoint(str(tmp_path / "step-3"))

    error = error_on_full_disk(save_twice, num_bytes=num_bytes)
    assert "step-2 was not written, earlier checkpoints are unchanged" in error
    assert os.strerror(27) in error  # File too large
    assert entries(tmp_path) == ["step-1"]
    assert_loads(assets, tmp_path / "step-1", before)


def test_full_disk_leaves_nothing_of_an_export(assets, tmp_path):
    engine = make_engine(assets)
    error = error_on_full_disk(lambda: engine.export_hf(str(tmp_path / "hf")), num_bytes=3_000)
    assert f"{tmp_path / 'hf'} was not written, earlier content is unchanged: " in error
    assert entries(tmp_path) == []


def replace_random_states(folder: Path, *, rank: int) -> None:
    """Write tensors that are no random states, and list them as somebody does who wants them to be
    read.
    """
    (file,) = folder.glob(f"random.*.{rank}.safetensors")
    save_file({"python": torch.zeros(3)}, file)
    names = [
        file.name for file in folder.iterdir() if file.name not in ("manifest.json", "state.json")
    ]
    write_description(
        folder, read_state(folder), {name: sum_of_file(folder / name) for name in names}
    )


def fail_to_save(assets: str, folder: str) -> list[str]:
    """Return each rank's errors of loading odd random states and a damaged file of rank 1, and of
    its full disk.
    """
    engine = make_engine(
        assets, parallelism=parallelism("fsdp2"), checkpoint=Checkpointer.Config(async_mode="async")
    )
    engine.save_checkpoint(str(step_folder(folder, 1)))
    engine.save_checkpoint(f"{folder}/odd")
    drawn = torch.rand(3)
    engine.load_checkpoint(str(step_folder(folder, 1)))
    assert torch.equal(torch.rand(3), drawn)  # of this rank
    if os.environ["RANK"] == "1":
        replace_random_states(Path(folder, "odd"), rank=1)
    dist.barrier()
    damaged = next(Path(folder, "step-1").glob("__1_*"))
    dist.barrier()
    if os.environ["RANK"] == "1":
        damaged.write_bytes(damaged.read_bytes()[:-5] + b"later")
        limit_files(2_000)
    dist.barrier()

    def save():
        engine.save_checkpoint(str(step_folder(folder, 2)), wait=False)
        engine.checkpointer.wait()

    errors = []
    calls: list[Callable[[], object]] = [
        functools.partial(engine.load_checkpoint, f"{folder}/odd"),
        functools.partial(engine.load_checkpoint, str(step_folder(folder, 1))),
        save,
    ]
    for call in calls:
        try:
            call()
        except (ValueError, CheckpointError) as error:
            errors.append(str(error))
    return errors


@pytest.mark.medium
def test_error_of_one_rank_is_raised_on_all_ranks(assets, tmp_path):
    for of_odd, of_load, of_save in run_ranks(
        fail_to_save, 2, assets, str(tmp_path), timeout_s=100
    ):
        assert "random.1x2x1x1.1.safetensors has no random states" in of_odd
        assert "step-1/__1_0.distcp is corrupted" in of_load
        assert "step-2 was not written" in of_save
        assert "File too large" in of_save
    assert list(list_steps(tmp_path)) == [1]
    assert entries(tmp_path) == ["odd", "step-1"]
