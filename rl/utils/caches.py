"""Folders for compiled code that no other user of the machine can write.

PyTorch keeps compiled kernels under a name in /tmp that anybody can guess, and imports what it
finds there: who makes that folder first runs code as this user. `ensure_private_caches` points the
libraries at folders under ~/.cache/relay before they are asked for one. What the user has set
stays.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from pathlib import Path

from rl.utils.printing import print_error
from rl.utils.processes import ROLE_VARIABLE

COMPILED = "compiled"
_MODELS = Path(__file__).parents[1] / "models"


def name_numba_folder(folders: Sequence[Path]) -> str:
    """Return a folder's name that changes with the sources of the kernels in these folders.

    numba takes a function from its cache until the function's own file changes, and would keep the
    old code of what it uses from other files.
    """
    digest = hashlib.sha256()
    for source in sorted(path for folder in folders for path in folder.glob("*.py")):
        digest.update(source.read_bytes())
    return f"numba-{digest.hexdigest()[:16]}"


CHECKS_VARIABLE = "RELAY_CHECKS_DIR"
"""Environment variable with the folder of `remember`."""
IN_TMP = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "NUMBA_CACHE_DIR": name_numba_folder((_MODELS / "batch_invariant", _MODELS / "low_rank")),
    CHECKS_VARIABLE: "checks",
}
"""Caches that are set always: the default folder of the libraries' is in /tmp, or may be."""
IN_HOME = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Caches that are set only where the home folder cannot hold private files."""
_settled = False


def ensure_private_caches() -> None:
    """Use private caches in this process and its children, once.

    Warnings say which folder of the user is not private.
    """
    global _settled
    if _settled:
        return
    _settled = True
    try:
        warnings = use_private_caches()
    except OSError as error:
        # Nothing can be written anywhere.
        warnings = [
            f"compiled code has no private folder ({error}): set TMPDIR to a folder that you can "
            "write"
        ]
    # In the process of an actor the controller has said so already.
    if ROLE_VARIABLE not in os.environ:
        for warning in warnings:
            print_error(f"warning: {warning}")


def use_private_caches(environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set the folders of compiled code where the environment names none.

    Returns:
        A sentence for each folder that the user has set and that is somebody else's, and for
        compiled code that goes with this process.
    """
    warnings: list[str] = []
    for name in (*IN_TMP, *IN_HOME):
        fault = find_fault(Path(environment[name])) if environment.get(name) else None
        if fault is not None:
            warnings.append(
                f"{name}={environment[name]}: others can write there ({fault}), and their code "
                "would run as you"
            )
    # Nothing to set: no folder is made either.
    if all(environment.get(name) for name in IN_TMP):
        return warnings
    try:
        folder, names = _make_private_folder(environment), IN_TMP
    except (OSError, RuntimeError, ValueError) as error:
        folder, names = _make_temporary_folder(), IN_TMP | IN_HOME
        warnings.append(
            f"each run compiles its code again, as the user's caches cannot keep it ({error}): "
            "set XDG_CACHE_HOME to a folder that only you can write"
        )
    for name, inside in names.items():
        if not environment.get(name):
            environment[name] = str(folder / inside)
    return warnings


def remember(fact: Mapping[str, object]) -> None:
    """Note a fact about this machine that takes long to find out, for other processes and runs.

    The values must be plain, and all that the fact depends on must be among them.
    """
    folder = os.environ.get(CHECKS_VARIABLE)
    if folder:
        # Without the note the fact is found out again.
        with contextlib.suppress(OSError):
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            Path(folder, _name_fact(fact)).touch()


def is_remembered(fact: Mapping[str, object]) -> bool:
    """Return whether `remember` was called with this fact on this machine."""
    folder = os.environ.get(CHECKS_VARIABLE)
    return bool(folder) and Path(str(folder), _name_fact(fact)).exists()


def _name_fact(fact: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(fact, sort_keys=True).encode()).hexdigest()


def find_fault(folder: Path) -> str | None:
    """Return why other users may have written into a folder; None for a private folder.

    A folder that does not exist is judged by those above it, where it will be made.
    """
    try:
        absolute = folder.expanduser().absolute()
        # Who can replace a link decides where the folder is.
        paths = (*_list_links(absolute), absolute.resolve())
    except (OSError, RuntimeError) as error:
        # A folder closed to this user, an unknown ~user, a circle of links.
        return str(error)

    trusted = _list_trusted_users()
    for path in paths:
        for part in (path, *path.parents):
            fault = _find_own_fault(part, is_end=part == path, trusted=trusted)
            if fault is not None:
                return fault
    return None


def _find_own_fault(part: Path, *, is_end: bool, trusted: Collection[int]) -> str | None:
    """Return why others may write into one folder on the way to another, or at its end."""
    try:
        status = part.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{part}: {error.strerror or error}"
    if status.st_uid not in trusted:
        return f"{part} belongs to user {status.st_uid}"
    # Groups are not looked at: in most systems a user's own group has no other members.
    is_open = status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode)
    # In a sticky folder such as /tmp, nobody can replace what belongs to others.
    if is_open and (is_end or not status.st_mode & stat.S_ISVTX):
        return f"everybody can write into {part}"
    return None


def _list_links(path: Path) -> list[Path]:
    """Return the links on the way to a path."""
    return [part for part in (path, *path.parents) if part.is_symlink()]


def _list_trusted_users() -> set[int]:
    users = {0, os.getuid()}
    # In a user namespace root is shown as the user of all who have no place in it.
    if Path("/proc/self/uid_map").read_text().split() != ["0", "0", str(2**32 - 1)]:
        users.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return users


def _make_private_folder(environment: Mapping[str, str]) -> Path:
    """Make the folder under the user's caches.

    Raises OSError, RuntimeError or ValueError if it cannot be used.
    """
    # A relative path is invalid there, says the XDG specification, and is ignored.
    cache_home = environment.get("XDG_CACHE_HOME", "")
    caches = Path(cache_home) if cache_home.startswith("/") else Path("~").expanduser() / ".cache"
    if not caches.is_absolute():
        raise ValueError(f"HOME={os.environ.get('HOME')!r} is not a folder")
    folder = caches / "relay" / COMPILED
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
        raise ValueError(f"{folder} is a link or belongs to another user")
    # An earlier version, or the umask, may have left other permissions.
    folder.chmod(0o700)
    fault = find_fault(folder)
    if fault is not None:
        raise ValueError(fault)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{folder} cannot be written")
    # Compiled code is loaded from there.
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise ValueError(f"{folder} is mounted noexec")
    return folder


def _make_temporary_folder() -> Path:
    """Make a private folder that goes with this process, as do its compiled kernels."""
    folder = tempfile.mkdtemp(prefix="relay-cache-")
    owner = os.getpid()

    def remove() -> None:
        # A forked child inherits the handlers, and its parent still uses the folder.
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return Path(folder)
