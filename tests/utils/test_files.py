import subprocess
import sys

import pytest

from rl.utils.files import (
    TMP_SUFFIX,
    hold_folder_lock,
    make_temporary_folder,
    publish_folder,
    remove,
    remove_leftovers,
    replace_file,
)


def test_atomic_write_replaces_the_file_only_without_an_error(tmp_path):
    file = tmp_path / "file"
    with replace_file(file) as new:
        new.write_text("first")
        assert not file.exists()
        assert new.name == f"file{TMP_SUFFIX}"
    with pytest.raises(IsADirectoryError), replace_file(file) as new:  # noqa: PT012
        new.write_text("half")
        tmp_path.read_text()
    assert file.read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_atomic_folder_appears_only_without_an_error(tmp_path):
    with pytest.raises(KeyError), publish_folder(tmp_path / "a") as folder:  # noqa: PT012
        (folder / "file").touch()
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with publish_folder(tmp_path / "a") as folder:
        (folder / "file").touch()
        assert not (tmp_path / "a").exists()
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["a", "a/file"]
    with pytest.raises(FileExistsError, match="a already exists"), publish_folder(tmp_path / "a"):
        pass


def test_leftovers_of_killed_processes_are_removed_and_folders_in_use_are_kept(tmp_path):
    code = """
import os, sys
from pathlib import Path
from rl.utils.files import make_temporary_folder
with make_temporary_folder(Path(sys.argv[1]) / "killed"):
    os._exit(1)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(list(tmp_path.glob(".killed.*"))) == 2  # the folder and its lock
    with make_temporary_folder(tmp_path / "used") as used:
        remove_leftovers(tmp_path)
        assert used.is_dir()
        assert not list(tmp_path.glob(".killed.*"))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_removal_is_completed_later(tmp_path, monkeypatch):
    folder = tmp_path / "step-1"
    folder.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda *args, **kwargs: None)
        remove(folder)
    assert not folder.exists()
    assert list(tmp_path.iterdir())
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_locked_folder_has_one_owner_at_a_time(tmp_path):
    shared = {"as_what": "trainer.checkpoint.folder", "otherwise": "choose another"}
    folder = tmp_path / "deep" / "shared"
    for _ in range(2):
        with hold_folder_lock(folder, **shared):
            text = r"shared is in use by process \d+ on .*; choose another"
            with pytest.raises(ValueError, match=text), hold_folder_lock(folder, **shared):
                raise AssertionError("two owners")
    (tmp_path / "file").touch()
    text = r"file/x cannot be trainer\.checkpoint\.folder: Not a directory"
    with pytest.raises(ValueError, match=text), hold_folder_lock(tmp_path / "file" / "x", **shared):
        raise AssertionError("there is no such folder")
