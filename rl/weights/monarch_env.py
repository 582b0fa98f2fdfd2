"""Environment that Monarch's library reads when it is loaded; import this before it.

`actors` and `rl.weights` do so in their `__init__`, ahead of all their modules. What the user
has set stays. Actor processes inherit it.
"""

from __future__ import annotations

import os

SETTINGS = {
    # A process that dies is noticed within a second instead of ten.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    # Monarch's own log, /tmp/$USER/monarch_log.log: warnings instead of every message.
    "MONARCH_FILE_LOG": "warn",
    # The default's value; where it is not set, torchstore reconfigures the root logger.
    "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": str(10 * 2**30),
}

for _name, _value in SETTINGS.items():
    os.environ.setdefault(_name, _value)
