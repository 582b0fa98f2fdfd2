"""The checkpoint that a run loads before its first step, and the detection of damage."""

import json
from dataclasses import replace

import pytest

from rl.training.checkpoints.config import (
    CheckpointConfig,
    LoadSource,
    find_load_source,
    find_own_checkpoint,
)
from rl.training.checkpoints.files import (
    MANIFEST,
    STATE,
    DamagedCheckpointError,
    check_files,
    find_newest_usable,
    list_steps,
    read_state,
)
from rl.training.checkpoints.tensors import is_excluded
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
        ({"folder": "elsewhere"}, "folder='elsewhere': must be 'checkpoints', inside .* or an "
                                  "absolute path"),
        ({"initial_load_in_hf_quantized": True}, "must be False: quantized weights cannot be "
                                                 "trained"),
        ({"exclude_from_loading": ("lr_scheduler",)}, "has no state; the schedule follows "
                                                      "train_state"),
    ],
)  # fmt: skip
def test_contradictory_fields_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        CheckpointConfig(**fields)


def test_checkpoints_are_due_at_the_interval_and_at_the_end():
    def steps(**fields):
        config = CheckpointConfig(**fields)
        return [step for step in range(11) if config.is_due(step, last=step == 10)]

    assert steps(interval=4) == [4, 8, 10]
    assert steps(interval=4, enable_first_step_checkpoint=True) == [1, 4, 8, 10]
    assert steps(interval=4, create_seed_checkpoint=True) == [0, 4, 8, 10]
    assert steps() == [10]
    assert steps(interval=1, enable=False) == steps(interval=1, load_only=True) == []


def test_names_are_excluded_by_whole_parts_and_patterns():
    assert is_excluded("model.norm.weight", ("model",))
    assert is_excluded("model.norm.weight", ("random", "model.norm.weight"))
    assert is_excluded("model.layers.3.ffn_norm.weight", ("model.layers.*.ffn_norm.weight",))
    assert not is_excluded("model.normal", ("model.norm",))
    assert not is_excluded("optimizer.norm.weight.step", ("model",))


def find(tmp_path, *, repairs=False, **fields):
    """Find what a config loads whose paths are relative to `tmp_path`."""
    for name in fields.keys() & {"folder", "initial_load_path"}:
        fields[name] = str(tmp_path / fields[name])
    return find_load_source(CheckpointConfig(**fields), repairs=repairs)


FOLDER = {"initial_load_path": "saved", "initial_load_model_only": False}
ONE = {"initial_load_path": "saved/step-4"}
HF = {"initial_load_path": "hf", "initial_load_in_hf": True}
SHARED = {"folder": "saved"}
WITHOUT_LOOP = {"exclude_from_loading": ("dataloader",)}


def test_hugging_face_folder_may_hold_checkpoints_too(tmp_path):
    save(tmp_path / "hf", 10)
    (tmp_path / "hf" / "config.json").write_text("{}")
    source = find(tmp_path, **HF)
    assert source is not None
    assert source.path == tmp_path / "hf"


@pytest.fixture
def folders(saved, tmp_path):
    """Write a model, the checkpoints of a run that ended, an export and an empty folder beside
    `saved`.
    """
    save(tmp_path / "model", 3, model_only=True)
    save(tmp_path / "ended", 6)
    for name in ("ended/hf", "hf", "empty"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("fields", "path", "step"),
    [
        (FOLDER, "saved/step-10", 10),
        (FOLDER | {"load_step": 4}, "saved/step-4", 4),
        (ONE, "saved/step-4", None),
        (ONE | {"load_only": True}, "saved/step-4", None),
        ({"initial_load_path": "model/step-3"}, "model/step-3", None),
        (HF, "hf", None),
        # A command that starts from another folder continues its own once that holds a checkpoint.
        (ONE | {"folder": "own"}, "saved/step-4", None),
        (ONE | {"folder": "ended", "last_save_in_hf": False}, "ended/step-6", 6),
        (SHARED | {"initial_load_path": "nowhere"}, "saved/step-10", 10),
        (SHARED | {"load_step": 10}, "saved/step-10", 10),
        (SHARED | {"load_step": 4, "load_only": True}, "saved/step-4", 4),
    ],
)
def test_config_continues_a_checkpoint_or_starts_from_it(folders, fields, path, step):
    path = folders / path
    assert find(folders, **fields) == (starting(path) if step is None else continuing(path, step))


def test_loop_starts_anew_without_its_position(folders):
    source = find(folders, **FOLDER, **WITHOUT_LOOP)
    assert source == replace(continuing(folders / "saved" / "step-10", 10), position=None)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (FOLDER | {"load_step": 3}, r"load_step=3: .*/saved has no such step, only 2, 4, 10"),
        (ONE | {"load_step": 4}, r"step-4: must be .* a folder of step-<n> for load_step=4"),
        (
            {"initial_load_path": "model/step-3", "initial_load_model_only": False},
            "holds only the model .*, so it cannot be continued",
        ),
        (SHARED | WITHOUT_LOOP, "save the same steps again"),
        (SHARED | {"load_step": 4}, r"load_step=4: .* also holds later steps up to 10"),
        ({"folder": "ended"}, r"last_save_in_hf=True: .*/hf exists, from a run that ended"),
        ({"load_only": True}, "there is no checkpoint to load"),
        ({"initial_load_path": "empty"}, "must be a checkpoint, a folder of step-<n>"),
        (HF | {"load_step": 3}, "only for checkpoints: must not be set with initial_load_in_hf"),
        (HF | {"exclude_from_loading": ("model.norm",)}, "only for checkpoints: must not be set"),
    ],
)
def test_config_that_finds_nothing_to_load_is_refused(folders, fields, says):
    with pytest.raises(ValueError, match=says):
        find(folders, **fields)


def test_own_latest_checkpoint_is_continued_whatever_is_excluded(tmp_path):
    assert find_own_checkpoint(tmp_path / "none", num_steps=9) is None
    before, latest = save(tmp_path, 2), save(tmp_path, 4)
    assert find_own_checkpoint(tmp_path, num_steps=9) == continuing(latest, 4, whole=True)
    with pytest.raises(ValueError, match=r"loop.num_steps=3: must be at least 4, the steps that"):
        find_own_checkpoint(tmp_path, num_steps=3)
    truncate(latest / TENSORS)
    assert find_own_checkpoint(tmp_path, num_steps=9) == continuing(before, 2, whole=True)
    truncate(before / TENSORS)
    assert find_own_checkpoint(tmp_path, num_steps=9) is None
    assert list_steps(tmp_path) == {}


def test_own_checkpoint_that_cannot_be_continued_is_refused(tmp_path):
    save(tmp_path, 4, model_only=True)
    source = find_own_checkpoint(tmp_path, num_steps=4)  # It ends the run.
    assert source is not None
    assert source.model_only
    with pytest.raises(ValueError, match=r"step-4 holds only the model .* move it away"):
        find_own_checkpoint(tmp_path, num_steps=5)
    save(tmp_path, 5, position=False)
    with pytest.raises(ValueError, match="was not saved by a loop"):
        find_own_checkpoint(tmp_path, num_steps=9)


def test_damaged_checkpoint_of_a_shared_folder_is_set_aside_only_if_asked(saved, tmp_path):
    truncate(saved[10] / TENSORS)
    says = rf"{saved[10]}/__0_0.distcp is truncated: it has 14 bytes, 17 were written"
    with pytest.raises(ValueError, match=says):
        find(tmp_path, **SHARED)
    with pytest.raises(ValueError, match=says):  # A requested step is not replaced.
        find(tmp_path, **SHARED, load_step=10, repairs=True)
    assert list(list_steps(tmp_path / "saved")) == [2, 4, 10]
    assert find(tmp_path, **SHARED, repairs=True) == continuing(saved[4], 4)
    assert list(list_steps(tmp_path / "saved")) == [2, 4]


def checked(path):
    check_files(path, tensors=True)
    read_state(path)
    return path


@pytest.mark.parametrize("name", [TENSORS, STATE, MANIFEST])
@pytest.mark.parametrize(
    "fault",
    [
        lambda content: content[:9] + bytes([content[9] ^ 16]) + content[10:],
        lambda content: content[:-3],
        lambda content: content + b"more",
        None,
    ],
    ids=["flipped bit", "cut short", "longer", "missing"],
)
def test_damaged_checkpoint_is_set_aside_and_the_previous_one_is_taken(
    tmp_path, caplog, name, fault
):
    older, newest = save(tmp_path, 1), save(tmp_path, 2)
    content = (newest / name).read_bytes()
    (newest / name).unlink()
    if fault is not None:
        (newest / name).write_bytes(fault(content))
    assert find_newest_usable(tmp_path, checked) == older
    assert list(list_steps(tmp_path)) == [1]
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
    with pytest.raises(
        DamagedCheckpointError, match=r"state.json is corrupted: its checksum differs"
    ):
        check_files(checkpoint, tensors=False)
