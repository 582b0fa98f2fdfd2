"""Versions of the weights on their way to the generators (`rl.weights.store`), and Monarch's environment variables.

Monarch reads the variables when it is loaded, so `actors` imports this package first. Values that the user has set
are kept.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

SETTINGS = {
    # Notice a dead process within one second instead of ten.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    # Write only warnings to Monarch's own log, /tmp/$USER/monarch_log.log.
    "MONARCH_FILE_LOG": "warn",
    # The default value; where the variable is unset, torchstore reconfigures the root logger.
    "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": str(10 * 2**30),
}

for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)


def _make_log_private() -> None:
    """Make Monarch's own log readable for this user only, or keep all but errors out of it where that is not possible.

    Monarch follows links, so in a folder where others may write it would write into any file of this user.
    """
    try:
        folder = Path("/tmp", _user())
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError
        suffix = os.environ.get("MONARCH_LOG_SUFFIX")
        file = folder / f"monarch_log{'_' if suffix else ''}{suffix or ''}.log"
        descriptor = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError:
        os.environ["MONARCH_FILE_LOG"] = "error"


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return "unknown"  # as Monarch calls it


_make_log_private()
