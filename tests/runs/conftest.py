import tempfile
from pathlib import Path

import pytest

from tests.support.leaks import Watch


@pytest.fixture
def watch():
    """Watcher of what a run leaves on the machine, in a folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="relay-t-", dir="/tmp") as folder:
        watch = Watch(Path(folder))
        yield watch
        watch.end()
