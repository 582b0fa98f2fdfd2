import pytest

from rl.folder_lock import LOCK, having, is_free

SHARED = {"as_what": "trainer.checkpoint.folder", "otherwise": "choose another"}


def test_one_at_a_time_has_a_folder_and_what_was_made_for_it_goes_if_it_stays_empty(tmp_path):
    folder = tmp_path / "deep" / "shared"
    with having(folder, **SHARED):
        assert not is_free(folder / LOCK)
        text = r"shared is in use by process \d+ on .*; choose another"
        with pytest.raises(ValueError, match=text), having(folder, **SHARED):
            raise AssertionError("two have it")
    assert list(tmp_path.iterdir()) == []
    with having(folder, **SHARED):
        (folder / "step-1").mkdir()
    assert is_free(folder / LOCK)
    assert {path.name for path in folder.iterdir()} == {"step-1", LOCK}


def test_a_folder_that_cannot_be_made_is_named_as_what_it_was_to_be(tmp_path):
    (tmp_path / "file").touch()
    text = r"file/x cannot be trainer\.checkpoint\.folder: .*/file is not a folder"
    with pytest.raises(ValueError, match=text), having(tmp_path / "file" / "x", **SHARED):
        raise AssertionError("there is no such folder")


def test_a_folder_that_was_removed_meanwhile_is_no_error(tmp_path):
    folder = tmp_path / "shared"
    with having(folder, **SHARED):
        (folder / LOCK).unlink()
        folder.rmdir()
    assert list(tmp_path.iterdir()) == []
