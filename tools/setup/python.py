"""Which Python the set-up uses. Only syntax of Python 3.6 in here and in `tools/setup_env.py`: an old
`python3` must get as far as the message that names the Python it needs, so annotations are quoted."""

import os
import subprocess
from typing import Iterator, NamedTuple, Sequence  # noqa: UP035 - collections.abc has no Iterator[...] in 3.6

SUPPORTED = ((3, 11), (3, 12))
PROBE = "import sys; print(sys.version_info[0], sys.version_info[1])"
PROBE_DEADLINE_S = 30


class Refusal(Exception):  # noqa: N818 - nothing went wrong: it says what cannot work here
    """What cannot work on this machine or in this folder, and what to do about it."""


class Probe(NamedTuple):
    """A Python found on this machine."""

    path: str
    version: "tuple[int, int] | None"
    """None when it does not run, as a version manager's shim without its version behind it."""


def choose_python(probes: "Sequence[Probe]") -> str:
    """The path of the first usable one.

    Raises:
        Refusal: when none is of a supported version, naming all that were found.
    """
    for probe in probes:
        if probe.version in SUPPORTED:
            return probe.path
    found = [f"{p.path} ({dotted(p.version) if p.version else 'does not run'})" for p in probes]
    raise Refusal(
        f"relay needs Python 3.11 or 3.12. Found: {', '.join(found) or 'none'}. Install python3.11 or "
        "python3.12 with its venv module so that it is on PATH, or name one: make ... PYTHON=/path/to/python"
    )


def dotted(version: "tuple[int, int]") -> str:
    return f"{version[0]}.{version[1]}"


def probe_python(path: str) -> "Probe":
    """Ask the Python at `path` for its version, within half a minute."""
    try:
        out = subprocess.run(
            [path, "-c", PROBE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PROBE_DEADLINE_S,
            check=True,
        ).stdout
        major, minor = out.split()
        return Probe(path, (int(major), int(minor)))
    except (OSError, ValueError, subprocess.SubprocessError):
        return Probe(path, None)


def find_pythons(*, search_path: str, first: "Sequence[str]" = ()) -> "Iterator[Probe]":
    """`first`, then every python3.11 and python3.12 on `search_path`: an earlier one may be a dead shim."""
    for path in first:
        if os.path.exists(path):
            yield probe_python(path)
    for version in SUPPORTED:
        for folder in search_path.split(os.pathsep):
            path = os.path.join(folder, "python" + dotted(version))
            if os.access(path, os.X_OK):
                yield probe_python(path)
