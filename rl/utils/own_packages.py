"""relay's packages beside a user's folders of the same names.

A wheel installs packages called `rl`, `actors`, `losses` and `configs`, and a user's project may
have folders of these names. `pin_packages` imports relay's own ones before the current folder is
searched. A folder without `__init__.py` then does no harm, but its Python code cannot be imported
in a run. A package with `__init__.py` would be imported by the processes of a run in place of
relay's, so that no run starts beside it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

from rl.utils.user_code import OWN_PACKAGES, TREE


def pin_packages() -> None:
    """Import relay's packages, whatever the current folder holds.

    Raises:
        ImportError: another package of one of these names is imported already.
    """
    sys.path.insert(0, str(TREE))
    try:
        for name in OWN_PACKAGES:
            package = importlib.import_module(name)
            paths = [Path(path).resolve() for path in package.__path__]
            if TREE / name not in paths:
                raise ImportError(
                    f"a package called {name!r} is imported from {paths[0]}, which hides relay's: "
                    "import relay first, or rename that folder"
                )
    finally:
        sys.path.remove(str(TREE))


def refuse_own_names(folders: Iterable[Path]) -> None:
    """Raise ValueError for packages in these folders that would be imported in place of relay's."""
    for folder in folders:
        names = [name for name in _list_folders(folder) if (folder / name / "__init__.py").exists()]
        if names:
            packages = ", ".join(f"{name}/" for name in names)
            raise ValueError(
                f"{folder} has packages that are called as relay's own, {packages}: the processes "
                "of a run would import them. Rename them, or start relay in another folder"
            )


def _list_folders(folder: Path) -> list[str]:
    """Return the subfolders with Python files that have the name of a package of relay's."""
    names = []
    for name in OWN_PACKAGES:
        path = folder / name
        if path.resolve() != TREE / name and any(path.glob("*.py")):
            names.append(name)
    return names


def describe_hidden_folders(folder: Path) -> str | None:
    """Return a line about folders of the user that cannot be imported; None if there are none."""
    hidden = _list_folders(folder)
    if not hidden:
        return None
    names = ", ".join(f"{name}/" for name in hidden)
    return (
        f"note: relay has packages of these names too, so Python code in {names} of this folder "
        "cannot be imported in a run: move what a run needs into a module of another name"
    )
