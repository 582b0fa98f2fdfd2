import tempfile
from pathlib import Path

import pytest

from tools.soak.leftovers import Watch


@pytest.fixture
def watch():
    """Sees what a run leaves on the machine. Its path is short, as sockets are made in it."""
    with tempfile.TemporaryDirectory(prefix="relay-t-", dir="/tmp") as folder:
        yield Watch(Path(folder))
