"""The checkpoint that a run loads before its first step, and the detection of damage."""

import json
import random
from dataclasses import replace

import pytest

from rl.training.checkpoint_config import CheckpointConfig, LoadSource, find_load_source, own_checkpoint
from rl.training.checkpoint_files import (
    MANIFEST,
    STATE,
    DamagedCheckpointError,
    check_files,
    newest_usable,
    read_state,
    saved_steps,
)
from rl.training.checkpoint_tensors import excluded
from rl.types import LoopPosition
from tests.support.checkpoints import save, truncate

TENSORS = "__0_0.distcp"


def continuing(path, step, *, whole=False):
    position = LoopPosition(step=step, num_problems=8 * step)
    return LoadSource(path=path, model_only=False, position=position, whole=whole)


def starting(path):
    return LoadSource(path=path, model_only=True, position=None)


@pytest.fixture
def saved(tmp_path):
    """Write checkpoints of steps 2, 4 and 10."""
    return {step: save(tmp_path / "saved", step) for step in (2, 4, 10)}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"interval": 0}, "interval=0: must be at least 1"),
        ({"keep_latest_k": 1}, "keep_latest_k=1: must be 0 .all. or at least 2, so that a damaged"),
        ({"timeout_s": float("inf")}, "timeout_s=inf"),
        ({"load_step": -2}, "load_step=-2: must be at least -1"),
        ({"folder": "elsewhere"}, "folder='elsewhere': must be 'checkpoints', inside .* or an absolute path"),
        ({"initial_load_in_hf_quantized": True}, "must be False: quantized weights cannot be trained"),
        ({"initial_load_model_only": False}, "initial_load_model_only=False: needs initial_load_path"),
        (
            {"initial_load_in_hf": True, "initial_load_path": "x", "initial_load_model_only": False},
            "a Hugging Face folder holds only the model",
        ),
        ({"exclude_from_loading": ("lr_scheduler",)}, "has no state; the schedule follows train_state"),
        ({"enable": False, "initial_load_path": "x"}, "path='x': must be None with enable=False"),
    ],
)  # fmt: skip
def test_contradictory_fields_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        CheckpointConfig(**fields)


def test_checkpoints_are_due_at_the_interval_and_at_the_end():
    def steps(**fields):
        config = CheckpointConfig(**fields)
        return [step for step in range(11) if config.due(step, last=step == 10)]

    assert steps(interval=4) == [4, 8, 10]
    assert steps(interval=4, enable_first_step_checkpoint=True) == [1, 4, 8, 10]
    assert steps(interval=4, create_seed_checkpoint=True) == [0, 4, 8, 10]
    assert steps() == [10]
    assert steps(interval=1, enable=False) == steps(interval=1, load_only=True) == []


def test_names_are_excluded_by_whole_parts_and_patterns():
    assert excluded("model.norm.weight", ("model",))
    assert excluded("model.norm.weight", ("random", "model.norm.weight"))
    assert excluded("model.layers.3.ffn_norm.weight", ("model.layers.*.ffn_norm.weight",))
    assert not excluded("model.normal", ("model.norm",))
    assert not excluded("optimizer.norm.weight.step", ("model",))


def test_latest_or_named_step_of_a_folder_is_loaded(saved, tmp_path):
    asked = CheckpointConfig(initial_load_path=str(tmp_path / "saved"), initial_load_model_only=False)
    assert find_load_source(asked) == continuing(saved[10], 10)
    assert find_load_source(replace(asked, load_step=4)) == continuing(saved[4], 4)
    without_loop = replace(asked, load_step=4, exclude_from_loading=("dataloader",))
    assert find_load_source(without_loop) == replace(continuing(saved[4], 4), position=None)
    with pytest.raises(ValueError, match=r"load_step=3: .*/saved has no such step, only 2, 4, 10"):
        find_load_source(replace(asked, load_step=3))


def test_one_checkpoint_is_loaded_by_its_path_and_continued_if_it_is_whole(saved, tmp_path):
    asked = CheckpointConfig(initial_load_path=str(saved[4]))
    assert find_load_source(asked) == starting(saved[4])
    assert find_load_source(replace(asked, load_only=True)) == starting(saved[4])
    with pytest.raises(ValueError, match=r"step-4: must be .* a folder of step-<n> for load_step=4"):
        find_load_source(replace(asked, load_step=4))
    of_model = save(tmp_path, 3, model_only=True)
    asked = CheckpointConfig(initial_load_path=str(of_model))
    assert find_load_source(asked) == starting(of_model)
    with pytest.raises(ValueError, match=r"holds only the model .*, so it cannot be continued"):
        find_load_source(replace(asked, initial_load_model_only=False))


def test_shared_folder_with_checkpoints_is_continued(saved, tmp_path):
    shared = CheckpointConfig(folder=str(tmp_path / "saved"), initial_load_path=str(tmp_path / "nowhere"))
    assert find_load_source(shared) == continuing(saved[10], 10)
    with pytest.raises(ValueError, match="save the same steps again"):
        find_load_source(replace(shared, exclude_from_loading=("dataloader",)))


def test_earlier_step_of_the_shared_folder_is_loaded_only_without_saving(saved, tmp_path):
    shared = CheckpointConfig(folder=str(tmp_path / "saved"))
    assert find_load_source(replace(shared, load_step=10)) == continuing(saved[10], 10)
    with pytest.raises(ValueError, match=r"load_step=4: .* also holds later steps up to 10"):
        find_load_source(replace(shared, load_step=4))
    assert find_load_source(replace(shared, load_step=4, load_only=True)) == continuing(saved[4], 4)


def test_command_that_started_from_another_folder_continues_its_own(saved, tmp_path):
    asked = CheckpointConfig(
        folder=str(tmp_path / "own"), initial_load_path=str(tmp_path / "saved"), load_step=4
    )
    assert find_load_source(asked) == starting(saved[4])
    for step in (1, 4, 6):
        path = save(tmp_path / "own", step)
        assert find_load_source(asked) == continuing(path, step)


def test_end_of_an_earlier_run_is_not_overwritten(saved, tmp_path):
    (tmp_path / "saved" / "hf").mkdir()
    shared = CheckpointConfig(folder=str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"last_save_in_hf=True: .*/hf exists, from a run that ended"):
        find_load_source(shared)
    assert find_load_source(replace(shared, last_save_in_hf=False)) == continuing(saved[10], 10)


def test_missing_source_or_one_of_another_kind_is_refused(tmp_path):
    folder = tmp_path / "folder"
    (tmp_path / "empty").mkdir()
    for fields, says in (
        ({"load_only": True}, "there is no checkpoint to load"),
        ({"initial_load_path": str(tmp_path / "empty")}, "must be a checkpoint, a folder of step-<n>"),
    ):
        with pytest.raises(ValueError, match=says):
            find_load_source(CheckpointConfig(**fields))
    folder.mkdir()
    asked = CheckpointConfig(initial_load_path=str(folder), initial_load_in_hf=True)
    assert find_load_source(asked) == starting(folder)
    for of_checkpoint in (
        replace(asked, load_step=3), replace(asked, exclude_from_loading=("model.norm",))
    ):  # fmt: skip
        with pytest.raises(ValueError, match="only for checkpoints: must not be set with initial_load_in_hf"):
            find_load_source(of_checkpoint)


def test_own_latest_checkpoint_is_continued_whatever_is_excluded(tmp_path):
    assert own_checkpoint(tmp_path / "none", num_steps=9) is None
    before, latest = save(tmp_path, 2), save(tmp_path, 4)
    assert own_checkpoint(tmp_path, num_steps=9) == continuing(latest, 4, whole=True)
    with pytest.raises(ValueError, match=r"loop.num_steps=3: must be at least 4, the steps that"):
        own_checkpoint(tmp_path, num_steps=3)
    truncate(latest / TENSORS)
    assert own_checkpoint(tmp_path, num_steps=9) == continuing(before, 2, whole=True)
    truncate(before / TENSORS)
    assert own_checkpoint(tmp_path, num_steps=9) is None
    assert saved_steps(tmp_path) == {}


def test_own_checkpoint_that_cannot_be_continued_is_refused(tmp_path):
    save(tmp_path, 4, model_only=True)
    source = own_checkpoint(tmp_path, num_steps=4)  # It ends the run.
    assert source is not None
    assert source.model_only
    with pytest.raises(ValueError, match=r"step-4 holds only the model .* move it away"):
        own_checkpoint(tmp_path, num_steps=5)
    save(tmp_path, 5, position=False)
    with pytest.raises(ValueError, match="was not saved by a loop"):
        own_checkpoint(tmp_path, num_steps=9)


def test_damaged_checkpoint_of_a_shared_folder_is_set_aside_only_if_asked(saved, tmp_path):
    config = CheckpointConfig(folder=str(tmp_path / "saved"), last_save_in_hf=False)
    truncate(saved[10] / TENSORS)
    says = rf"{saved[10]}/__0_0.distcp is truncated: it has 14 bytes, 17 were written"
    for asked in (config, replace(config, load_step=10)):
        with pytest.raises(ValueError, match=says):
            find_load_source(asked, repairs=asked is not config)  # A requested step is not replaced.
    assert list(saved_steps(tmp_path / "saved")) == [2, 4, 10]
    assert find_load_source(config, repairs=True) == continuing(saved[4], 4)
    assert list(saved_steps(tmp_path / "saved")) == [2, 4]


def checked(path):
    check_files(path, tensors=True)
    read_state(path)
    return path


def flip_a_bit(content, rng):
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def cut_short(content, rng):
    return content[: rng.randrange(len(content))]


def grow(content, rng):
    return content + rng.randbytes(rng.randrange(1, 100))


@pytest.mark.parametrize("fault", [flip_a_bit, cut_short, grow, None])
def test_damaged_checkpoint_is_set_aside_and_the_previous_one_is_taken(tmp_path, caplog, fault):
    rng = random.Random(0)
    for number in range(20):
        caplog.clear()
        folder = tmp_path / str(number)
        save(folder, 1)
        newest = save(folder, 2)
        name = sorted(path.name for path in newest.iterdir())[number % 3]
        before = (newest / name).read_bytes()
        after = None if fault is None else fault(before, rng)
        if after is None:
            (newest / name).unlink()
        else:
            (newest / name).write_bytes(after)
        taken = newest_usable(folder, checked)
        if taken == newest:  # Only whitespace of the manifest was lost.
            assert name == MANIFEST
            assert json.loads(after or b"") == json.loads(before)
            continue
        assert taken == folder / "step-1"
        assert list(saved_steps(folder)) == [1]
        (record,) = caplog.records
        assert record.message.endswith("set aside as step-2.damaged, and an earlier one is taken")


@pytest.mark.parametrize(
    ("name", "content", "says", "is_damage"),
    [
        (MANIFEST, "{", "is corrupted: JSONDecodeError", True),
        (MANIFEST, {"format": 3, "files": {"a": 3}}, "is corrupted: TypeError", True),
        (MANIFEST, [], "is corrupted: TypeError", True),
        (MANIFEST, {"format": 3, "files": {}}, "is corrupted: it does not list __0_0", True),
        (MANIFEST, None, "is missing: .* is not a complete checkpoint", True),
        (MANIFEST, {"format": 1}, "has format 1; this version reads 3", False),
        (STATE, None, "is missing", True),
    ],
)
def test_malformed_description_is_damage_but_that_of_another_version_is_not(
    tmp_path, name, content, says, is_damage
):
    checkpoint = save(tmp_path, 2)
    (checkpoint / name).unlink()
    if content is not None:
        (checkpoint / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=f"{name} .*{says}") as caught:
        check_files(checkpoint, tensors=True) if name == MANIFEST else read_state(checkpoint)
    assert isinstance(caught.value, DamagedCheckpointError) == is_damage


def test_small_files_are_checked_without_reading_tensors(tmp_path):
    checkpoint = save(tmp_path, 2)
    (checkpoint / TENSORS).write_bytes(b"tensors of a step"[::-1])
    check_files(checkpoint, tensors=False)
    (checkpoint / STATE).write_text((checkpoint / STATE).read_text().replace("2", "3"))
    with pytest.raises(DamagedCheckpointError, match=r"state.json is corrupted: its checksum differs"):
        check_files(checkpoint, tensors=False)
