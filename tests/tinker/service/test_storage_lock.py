"""A storage folder is one process's at a time."""

import subprocess
import sys

import pytest

from rl.tinker.service.storage_lock import StorageLock

HOLD = """
import sys, time
from rl.tinker.service.storage_lock import StorageLock
lock = StorageLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_is_refused_until_the_first_ends_however_it_does(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=r"storage_folder=.*: another process is using it"):
        StorageLock(tmp_path)
    holder.kill()
    holder.communicate(timeout=10)
    StorageLock(tmp_path).close()


def test_the_folder_is_made_and_free_again_after_close(tmp_path):
    lock = StorageLock(tmp_path / "a" / "b")
    assert lock.folder.is_dir()
    lock.close()
    lock.close()
    StorageLock(lock.folder).close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file.*: cannot be written"):
        StorageLock(tmp_path / "file")
