"""relay in a program of your own.

    import relay

    run = relay.grpo(model="HuggingFaceTB/SmolLM2-135M-Instruct", data="qa.jsonl", reward=is_right)
    run.plot()

Names are loaded when they are used, so that `import relay` takes no time. The command `relay` is in
`relay.command`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before anything of `rl` is looked for: the current folder may have a folder of that name.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from rl.utils.own_packages import pin_packages
except ModuleNotFoundError as error:
    if error.name not in ("rl.utils", "rl.utils.own_packages"):
        raise
    raise ImportError(
        f"another package called 'rl' is imported, {sys.modules['rl']}, which hides relay's: "
        "import relay first, or rename that folder"
    ) from None
finally:
    del sys.path[0]
pin_packages()

if TYPE_CHECKING:
    from relay.result import RunResult, load
    from relay.training import grpo

__all__ = ["RunResult", "grpo", "load"]

_MODULES = {"grpo": "relay.training", "load": "relay.result", "RunResult": "relay.result"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'relay' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
