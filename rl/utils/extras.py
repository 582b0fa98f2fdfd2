"""Optional packages: the line that installs a group of them here."""

from __future__ import annotations

from importlib.util import find_spec

from rl.utils.user_code import TREE

DISTRIBUTION = "relay-rl"


def is_checkout() -> bool:
    """Return whether relay runs from a checkout of its repository, and not from a wheel."""
    return (TREE / "tools" / "setup_env.py").is_file()


def describe_install(group: str) -> str:
    """Return the command that installs an optional group of packages.

    Example:
        >>> describe_install("tasks")
        "pip install 'relay-rl[tasks]'"
    """
    if is_checkout():
        return f"python3 tools/setup_env.py {group}"
    return f"{name_pip()} install '{DISTRIBUTION}[{group}]'"


def name_pip() -> str:
    """Return the program that installs packages into this environment."""
    # Environments of uv have no pip, and another one's would install into the wrong environment.
    return "pip" if find_spec("pip") else "uv pip"


def describe_program(name: str) -> str:
    """Return how a program such as `report` is started here.

    Example:
        >>> describe_program("report")
        'relay report'
    """
    return f"python -m rl.{name}" if is_checkout() else f"relay {name}"
