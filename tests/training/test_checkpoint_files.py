import json
import random

import pytest

from rl.training.checkpoint_files import (
    MANIFEST,
    STATE,
    DamagedCheckpointError,
    SavedState,
    check_files,
    newest_usable,
    read_state,
    saved_steps,
    step_folder,
    sum_of_file,
    write_description,
)
from rl.types import LoopPosition

TENSORS = "__0_0.distcp"
SAVED = SavedState(
    policy_version=7,
    model_only=False,
    position=LoopPosition(step=3, num_problems=24),
    converters={"LoRA": {"rank": 2}},
)


def write_checkpoint(path, *, tensors=b"123456789"):
    path.mkdir(parents=True, exist_ok=True)
    for name in (TENSORS, ".metadata"):
        (path / name).write_bytes(tensors)
    sums = {name: sum_of_file(path / name) for name in (TENSORS, ".metadata")}
    write_description(path, SAVED, sums)
    return path


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "step-2")


def test_state_is_read_as_it_was_written(checkpoint):
    assert read_state(checkpoint) == SAVED
    assert sorted(json.loads((checkpoint / MANIFEST).read_text())["files"]) == [
        ".metadata", TENSORS, STATE,
    ]  # fmt: skip


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
        write_checkpoint(folder / "step-1")
        newest = write_checkpoint(folder / "step-2")
        name = sorted(path.name for path in newest.iterdir())[number % 4]
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
        (MANIFEST, {"format": 3, "files": {}}, r"is corrupted: it does not list \.metadata", True),
        (MANIFEST, None, "is missing: .* is not a complete checkpoint", True),
        (MANIFEST, {"format": 1}, "has format 1; this version reads 3", False),
        (STATE, None, "is missing", True),
    ],
)
def test_malformed_description_is_damage_but_that_of_another_version_is_not(
    checkpoint, name, content, says, is_damage
):
    (checkpoint / name).unlink()
    if content is not None:
        (checkpoint / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=f"{name} .*{says}") as caught:
        check_files(checkpoint, tensors=True) if name == MANIFEST else read_state(checkpoint)
    assert isinstance(caught.value, DamagedCheckpointError) == is_damage


def test_small_files_are_checked_without_reading_tensors(checkpoint):
    (checkpoint / TENSORS).write_bytes(b"123456780")
    check_files(checkpoint, tensors=False)
    (checkpoint / STATE).write_text((checkpoint / STATE).read_text().replace("2", "3"))
    with pytest.raises(DamagedCheckpointError, match=r"state.json is corrupted: its checksum differs"):
        check_files(checkpoint, tensors=False)


def test_steps_are_sorted_by_number(tmp_path):
    for name in ("step-10", "step-9", "step-0", "step-07", "step-x", "hf", ".step-11.hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-12").write_text("a file")
    assert list(saved_steps(tmp_path).items()) == [(n, step_folder(tmp_path, n)) for n in (0, 9, 10)]
    assert saved_steps(tmp_path / "nowhere") == {}
