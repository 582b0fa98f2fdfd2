import json

import pytest

from rl.training.checkpoint_files import (
    MANIFEST,
    STATE,
    DamagedCheckpointError,
    FileSum,
    SavedState,
    check_contents,
    check_sizes,
    check_small_files,
    read_state,
    saved_steps,
    set_aside,
    step_folder,
    sum_of_file,
    write_description,
)
from rl.types import LoopPosition

SAVED = SavedState(policy_version=7, model_only=False, position=LoopPosition(step=3, num_problems=24))


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "tensors.distcp").write_bytes(b"123456789")
    write_description(tmp_path, SAVED, {"tensors.distcp": sum_of_file(tmp_path / "tensors.distcp")})
    return tmp_path


def test_attachments_are_files_with_size_and_checksum_in_the_manifest(tmp_path):
    write_description(tmp_path, SAVED, {}, {"loop.pickle": b"123456789"})
    assert (tmp_path / "loop.pickle").read_bytes() == b"123456789"
    sums = check_sizes(tmp_path)
    assert sums["loop.pickle"] == FileSum(num_bytes=9, crc32=0xCBF43926)
    check_small_files(tmp_path)
    (tmp_path / "loop.pickle").write_bytes(b"123456780")
    with pytest.raises(DamagedCheckpointError, match=r"loop.pickle is corrupted: its crc32 is"):
        check_small_files(tmp_path)
    (tmp_path / "loop.pickle").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"loop.pickle is missing"):
        check_small_files(tmp_path)


@pytest.mark.parametrize("name", [STATE, MANIFEST, "a.distcp", ".metadata", "a/b", "..", "t"])
def test_attachments_take_no_other_files_place(tmp_path, name):
    with pytest.raises(ValueError, match=rf"attachment '{name}': must be a file's name that the"):
        write_description(tmp_path, SAVED, {"t": FileSum(num_bytes=0, crc32=0)}, {name: b""})


def test_what_is_set_aside_is_no_step_any_more_and_never_in_the_way(tmp_path):
    for _ in range(3):
        (tmp_path / "step-4").mkdir()
        set_aside(tmp_path / "step-4")
    (tmp_path / "step-2").mkdir()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-2", "step-4.damaged", "step-4.damaged-2", "step-4.damaged-3"]
    assert list(saved_steps(tmp_path)) == [2]


def test_checksum_is_that_of_crc_32(tmp_path):
    (tmp_path / "file").write_bytes(b"123456789")
    assert sum_of_file(tmp_path / "file") == FileSum(num_bytes=9, crc32=0xCBF43926)  # as published
    (tmp_path / "large").write_bytes(b"\0" * (3 << 20))
    assert sum_of_file(tmp_path / "large").num_bytes == 3 << 20


def test_state_is_read_as_it_was_written(checkpoint):
    assert read_state(checkpoint) == SAVED
    sums = check_sizes(checkpoint)
    assert sorted(sums) == [STATE, "tensors.distcp"]
    check_contents(checkpoint, sums, sums)


@pytest.mark.parametrize("name", ["tensors.distcp", STATE])
def test_a_file_cut_short_or_missing_is_named(checkpoint, name):
    whole = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(whole[:-1])
    with pytest.raises(
        ValueError, match=rf"{name} is truncated: it has {len(whole) - 1} bytes, {len(whole)}"
    ):
        check_sizes(checkpoint)
    (checkpoint / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        check_sizes(checkpoint)


@pytest.mark.parametrize("name", ["tensors.distcp", STATE])
def test_one_flipped_bit_is_seen_and_the_file_named(checkpoint, name):
    content = bytearray((checkpoint / name).read_bytes())
    content[4] ^= 1
    (checkpoint / name).write_bytes(content)
    sums = check_sizes(checkpoint)
    with pytest.raises(ValueError, match=rf"{name} is corrupted: its crc32 is \w{{8}}, \w{{8}} was written"):
        check_contents(checkpoint, sums, sums)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (MANIFEST, "{", f"{MANIFEST} is corrupted: Expecting"),
        (MANIFEST, json.dumps({"format": 3}), f"{MANIFEST} is corrupted: it has format 3"),
        (MANIFEST, json.dumps({"format": 1, "files": {"a": 3}}), f"{MANIFEST} is corrupted: TypeError"),
        (MANIFEST, json.dumps([]), f"{MANIFEST} is corrupted: it holds a list"),
        (
            MANIFEST,
            json.dumps({"format": 1, "files": {}}),
            f"{MANIFEST} is corrupted: it does not list {STATE}",
        ),
        (STATE, json.dumps({"format": 1, "policy_version": 2}), f"{STATE} is corrupted: KeyError"),
        (
            STATE,
            json.dumps({"format": 1, "policy_version": 2, "model_only": False, "position": {"stop": 1}}),
            f"{STATE} is corrupted: TypeError",
        ),
    ],
)
def test_a_description_that_says_nothing_is_named(checkpoint, name, content, says):
    (checkpoint / name).write_text(content)
    with pytest.raises(ValueError, match=says):
        check_sizes(checkpoint) if name == MANIFEST else read_state(checkpoint)


def test_what_another_version_wrote_is_not_taken_for_damage(checkpoint):
    later = json.loads((checkpoint / STATE).read_text())
    later["position"] = {"step": 2, "num_problems": 4, "place_of_tomorrow": 1}
    (checkpoint / STATE).write_text(json.dumps(later))
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    written = sum_of_file(checkpoint / STATE)
    manifest["files"][STATE] = {"num_bytes": written.num_bytes, "crc32": written.crc32}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"written by another version.*place_of_tomorrow") as caught:
        read_state(checkpoint)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_a_later_format_is_not_taken_for_damage(checkpoint):
    for name in (STATE, MANIFEST):
        content = json.loads((checkpoint / name).read_text())
        (checkpoint / name).write_text(json.dumps(content | {"format": 2}, indent=2))
    with pytest.raises(ValueError, match=f"{MANIFEST} has format 2; this version reads 1") as caught:
        check_sizes(checkpoint)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_each_flipped_bit_of_the_manifest_is_damage_or_changes_nothing(checkpoint):
    """It has no checksum of its own."""
    whole, sums = (checkpoint / MANIFEST).read_bytes(), check_sizes(checkpoint)
    for place in range(8 * len(whole)):
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        (checkpoint / MANIFEST).write_bytes(content)
        try:
            found = check_sizes(checkpoint)
            check_contents(checkpoint, found, found)
            assert found == sums, f"bit {place}"
        except DamagedCheckpointError:
            continue


@pytest.mark.parametrize("name", ["tensors.distcp", ".metadata", STATE])
def test_a_file_that_the_manifest_does_not_list_would_be_loaded_unverified_and_is_refused(checkpoint, name):
    (checkpoint / ".metadata").write_bytes(b"what is where")
    write_description(
        checkpoint, SAVED, {n: sum_of_file(checkpoint / n) for n in ("tensors.distcp", ".metadata")}
    )
    check_sizes(checkpoint)
    content = json.loads((checkpoint / MANIFEST).read_text())
    del content["files"][name]
    (checkpoint / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{MANIFEST} is corrupted: it does not list {name}"):
        check_sizes(checkpoint)


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"manifest\.json is missing: .* is no checkpoint, or not whole"):
        check_sizes(tmp_path)


def test_steps_are_in_the_order_of_their_numbers(tmp_path):
    for name in ("step-10", "step-9", "step-0", "step-07", "step-x", "hf", ".step-11.hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-12").write_text("no folder")
    assert list(saved_steps(tmp_path).items()) == [(n, step_folder(tmp_path, n)) for n in (0, 9, 10)]
    assert saved_steps(tmp_path / "nowhere") == {}


def test_a_file_that_the_disk_cannot_give_back_is_damaged(checkpoint):
    sums = check_sizes(checkpoint)
    name = next(name for name in sums if name.endswith(".distcp"))
    (checkpoint / name).unlink()
    (checkpoint / name).symlink_to("/proc/self/mem")  # to read its beginning is an input/output error
    with pytest.raises(DamagedCheckpointError, match=rf"{name} cannot be read: Input/output error"):
        check_contents(checkpoint, sums, [name])
