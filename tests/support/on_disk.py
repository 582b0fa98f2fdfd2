"""Run a command with a folder that is a small disk.

    python -m tests.support.on_disk FOLDER BYTES LONGEST KEEP COMMAND ...

The disk is gone when the command has ended; the folder KEEP then has what was on it, but for files of more
than a megabyte, which are empty there. Where nothing can be mounted, no file may be longer than LONGEST.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.disks import mount_small
from tests.support.forked import limit_files

LARGE = 1 << 20


def keep(source: str, target: str) -> None:
    if Path(source).stat().st_size > LARGE:
        Path(target).touch()
    else:
        shutil.copyfile(source, target)


def main(folder: str, num_bytes: str, longest: str, kept: str, *command: str) -> int:
    if not mount_small(Path(folder), num_bytes=int(num_bytes)):
        limit_files(int(longest))
    status = subprocess.call(command)
    shutil.copytree(folder, kept, copy_function=keep)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
