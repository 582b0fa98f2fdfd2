"""Create `.venv` and install what is missing in it: `python3 tools/setup_env.py [GROUP ...]`.

Groups are the optional ones of pyproject.toml that come on top of what a run needs (`test`, `trl`,
`tasks`, `hooks`, `report`, `float8`). vLLM's build follows the machine: `gpu` where an NVIDIA GPU is, else
`cpu`; the environment variable RELAY_DEVICE=cpu|gpu overrides. A call that finds everything in place installs
nothing and asks no index. An interrupted one is taken up by the next.

Exit status: 0 in place, 1 an installation or the import check failed, 2 refused before anything was
done, 130 interrupted. Needs the standard library alone.
"""

import os
import platform
import sys
from typing import Sequence  # noqa: UP035 - parses on Python 3.6, see tools/setup/python.py

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from tools.setup.python import SUPPORTED, Probe, Refusal, choose_python, find_pythons  # noqa: E402


def refuse_platform(*, system: str, libc: str) -> None:
    if system != "Linux":
        raise Refusal(
            f"relay runs on Linux and this is {system}: Monarch and vLLM have no builds for it here. "
            "A Linux container or virtual machine works."
        )
    if libc != "glibc":
        raise Refusal(
            "relay needs a Linux with glibc (Debian, Ubuntu, Fedora ...): "
            "PyTorch, Monarch and vLLM have no builds for other C libraries, as musl on Alpine."
        )


def libc_name() -> str:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").split(" ")[0]
    except (AttributeError, ValueError, OSError):
        return "another"


def use_supported_python(argv: "Sequence[str]") -> None:
    """Return if this Python is a supported one, else start again under one that is."""
    version = (sys.version_info[0], sys.version_info[1])
    if version in SUPPORTED:
        return
    own = os.path.join(ROOT, ".venv", "bin", "python")
    others = find_pythons(search_path=os.environ.get("PATH", ""), first=[own])
    path = choose_python([Probe(sys.executable, version), *others])
    os.execv(path, [path, os.path.abspath(__file__), *argv])


def main(argv: "Sequence[str]") -> int:
    try:
        refuse_platform(system=platform.system(), libc=libc_name())
        use_supported_python(argv)
        # Newer syntax from here on.
        from tools.setup import run

        return run.main(argv, root=ROOT)
    except Refusal as refusal:
        print(f"relay set-up refused: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nrelay set-up interrupted; the same command takes it up again", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
