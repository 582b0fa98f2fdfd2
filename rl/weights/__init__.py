"""Versions of the weights on their way to the generators (`rl.weights.store`), and Monarch's environment variables.

Monarch reads the variables when it is loaded, so `actors` imports this package first. Values that the user has set
are kept.
"""

from __future__ import annotations

import os

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
