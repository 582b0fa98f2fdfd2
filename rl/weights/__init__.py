"""Versions of the weights on their way to the generators, and Monarch's environment variables.

Monarch reads the variables when it is loaded, so `actors` imports this package first. Values that
the user has set are kept.
"""

from __future__ import annotations

import os
import pwd
import stat
import uuid
from pathlib import Path

SETTINGS = {
    # Notice a dead process within one second instead of ten.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    # Write only warnings to Monarch's own log, /tmp/$USER/monarch_log.log.
    "MONARCH_FILE_LOG": "warn",
}

for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)


MAX_LOGS = 100
"""Names that are tried for Monarch's log in the user's own folder."""


def _make_log_private() -> None:
    """Choose a log for Monarch that only this user can read and write.

    Monarch opens the file at its import, follows links, and waits at a pipe for its reader, so a
    name that is taken by anything but a file of this user is left alone. In a folder where others
    may write, whoever knows the name could put something else there: each process writes only
    errors, under a name of its own.
    """
    user_suffix = os.environ.get("MONARCH_LOG_SUFFIX", "")
    try:
        folder = Path("/tmp", _get_user())
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError
        for number in range(1, MAX_LOGS):
            suffix = user_suffix if number == 1 else f"{user_suffix}_{number}".lstrip("_")
            if _is_private_log(folder / f"monarch_log{'_' if suffix else ''}{suffix}.log"):
                if suffix != user_suffix:
                    os.environ["MONARCH_LOG_SUFFIX"] = suffix
                return
    except OSError:
        pass
    os.environ |= {"MONARCH_FILE_LOG": "error", "MONARCH_LOG_SUFFIX": uuid.uuid4().hex}


def _is_private_log(file: Path) -> bool:
    """Make a file that no other user can read; return False if the name is somebody else's."""
    flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(file, flags, 0o600)
    except OSError:  # A link, a folder, a pipe without a reader.
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return False
        os.fchmod(descriptor, 0o600)
        return True
    finally:
        os.close(descriptor)


def _get_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return "unknown"  # As Monarch calls the user.


_make_log_private()
