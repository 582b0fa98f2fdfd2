"""One set-up from the command line to the stamp."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.setup import installer, machine, state
from tools.setup.python import Refusal, dotted

LOCK_DEADLINE_S = 60 * 60


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Two calls at once do not install over each other: the second waits for the first.

    Raises:
        Refusal: when the other has not finished after an hour.
    """
    with path.open("a", encoding="utf-8") as file:
        deadline = time.monotonic() + LOCK_DEADLINE_S
        said = False
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise Refusal(f"another set-up of this folder has held {path} for an hour")
            if not said:
                print("relay set-up: another one is at work in this folder; waiting for it", flush=True)
                said = True
            time.sleep(0.5)
        yield


def _try_lock(fileno: int) -> bool:
    try:
        fcntl.flock(fileno, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def valid_groups(project: dict[str, Any]) -> list[str]:
    return sorted(set(project["project"]["optional-dependencies"]) - set(machine.GIB_NEEDED))


def parse_groups(argv: Sequence[str], *, project: dict[str, Any]) -> list[str]:
    """Raises: Refusal for a group that pyproject.toml does not have."""
    valid = valid_groups(project)
    parser = argparse.ArgumentParser(prog="setup_env.py", description="Create .venv and install into it.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"one of {', '.join(valid)}")
    groups: list[str] = parser.parse_args(argv).groups
    for group in groups:
        if group not in valid:
            raise Refusal(f"group {group!r} is unknown; valid are {', '.join(valid)}")
    return sorted(set(groups))


def set_up(argv: Sequence[str], *, root: Path) -> None:
    """Bring `.venv` under `root` to what pyproject.toml and `argv` (groups) ask for."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    groups = parse_groups(argv, project=project)
    flavour = machine.choose_flavour(
        override=os.environ.get("RELAY_DEVICE", ""), has_gpu=machine.has_nvidia_gpu
    )
    venv = root / ".venv"
    site_packages = state.find_site_packages(venv)
    python = site_packages.parent.name if site_packages else "python" + dotted(sys.version_info[:2])
    scripts = b"".join(path.read_bytes() for path in sorted((root / "tools" / "setup").glob("*.py")))
    key = state.make_key(project=project, scripts=scripts, python=python, flavour=flavour, root=str(root))

    def done() -> bool:
        installed = state.read_installed(state.find_site_packages(venv))
        return state.is_complete(venv, key=key, groups=groups, flavour=flavour, installed=installed)

    if done():
        return
    machine.refuse_without_venv(
        has_venv=importlib.util.find_spec("venv") is not None,
        has_ensurepip=importlib.util.find_spec("ensurepip") is not None,
        version=dotted(sys.version_info[:2]),
    )
    free_gib = shutil.disk_usage(root).free / 2**30
    has_torch = "torch" in state.read_installed(site_packages)
    machine.refuse_full_disk(flavour=flavour, free_gib=free_gib, has_torch=has_torch, root=str(root))
    with hold_lock(root / ".venv.lock"):
        if done():
            return
        kept = set(state.read_stamp(venv).get("groups", [])) & set(valid_groups(project))
        groups = sorted({*groups, *kept})
        # Gone until all is there again, so that no other call takes a half-done one for done.
        state.stamp_path(venv).unlink(missing_ok=True)
        installer.install(root=root, venv=venv, project=project, flavour=flavour, groups=groups)
        installed = state.read_installed(state.find_site_packages(venv))
        state.write_stamp(venv, key=key, groups=groups, installed=installed)


def main(argv: Sequence[str], *, root: str) -> int:
    # An exception, so that a pip at work is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        set_up(argv, root=Path(root))
    except installer.InstallError as error:
        print(f"relay set-up failed: {error}", file=sys.stderr)
        return 1
    return 0
