"""The latest collectives of a process, to look at after one has failed.

PyTorch's flight recorder keeps them in a ring, one for gloo and one for NCCL. It reads its size
from the environment, once in the life of a process.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

SIZE = "TORCH_FR_BUFFER_SIZE"
FILE_OF_WATCHDOG = "TORCH_FR_DUMP_TEMP_FILE"
DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"


def configure(size: int) -> None:
    """Keep the latest `size` collectives, 0 for none; before this process makes its first group."""
    os.environ[SIZE] = str(size)
    # NCCL's watchdog ends a process whose collective took too long, before Python could write anything.
    os.environ.setdefault(DUMP_ON_TIMEOUT, str(int(size > 0)))


def name_file_of_watchdog(folder: str | Path) -> None:
    """Where NCCL's watchdog writes what is recorded, pickled: `collectives_rank<r>` without an ending."""
    os.environ.setdefault(FILE_OF_WATCHDOG, str(Path(folder) / "collectives_rank"))


def write_collectives(folder: str | Path) -> Path | None:
    """What is recorded, oldest first, as `collectives_rank<r>.json`; None where nothing is, or no room.

    Of each collective: name, group, number in it, sizes, state, and the lines of code that called it.
    """
    if not dist.is_initialized():
        return None
    entries = _recorded()
    if not entries:
        return None
    file = Path(folder) / f"collectives_rank{dist.get_rank()}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(entries, indent=1) + "\n")
    except OSError as error:  # what these collectives failed by is to be told, not this
        logger.warning("%s was not written: %s", file, error.strerror or error)
        with suppress(OSError):
            file.unlink()
        return None
    return file


def _recorded() -> list[dict[str, Any]]:
    bindings = torch._C._distributed_c10d
    name = "_dump_nccl_trace" if "nccl" in dist.get_backend_config() else "_dump_fr_trace"
    dump = getattr(bindings, name, None)
    return [] if dump is None else pickle.loads(dump()).get("entries", [])
