"""Help for runs on the null device, which every process with this folder on PYTHONPATH loads.

Kernels do nothing there and results read back as 0. Four places need other answers than the null
device can give.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def name_the_runtime(module: Any) -> None:
    """Let vLLM find the null device where it looks for the CUDA runtime among the files that are
    mapped.
    """
    find = module.find_loaded_library
    module.find_loaded_library = lambda name: (
        os.environ["NULL_GPU_LIBRARY"] if name == "libcudart" else find(name)
    )


def report_a_token(module: Any) -> None:
    """Let a training step count at least one token: it divides by their number, which reads back as
    0.
    """
    result = module.ForwardBackwardResult
    initialize = result.__init__

    def with_a_token(self: Any, **fields: Any) -> None:
        counted = {name: max(1, fields[name]) for name in ("num_valid_tokens", "denominator")}
        initialize(self, **fields | counted)

    result.__init__ = with_a_token


def draw_a_token(module: Any) -> None:
    """Let each request of vLLM's own model draw one token a step; of none it would never end."""
    result = module.AsyncOutput.get_output

    def with_a_token(self: Any) -> Any:
        self.num_sampled_tokens_np = self.num_sampled_tokens_np.clip(1)
        return result(self)

    module.AsyncOutput.get_output = with_a_token


def spread_rows(module: Any) -> None:
    """Let each rank of experts get as many rows as the others: their numbers, read back as 0, would
    not add up.
    """
    exchange = module.ExpertExchange.__call__

    def with_even_counts(self: Any, rows: Any, *others: Any) -> Any:
        num, more = divmod(len(rows), self.num_ranks)
        counts = [num + (rank < more) for rank in range(self.num_ranks)]
        module.row_counts = lambda *_: [counts, counts]
        return exchange(self, rows, *others)

    module.ExpertExchange.__call__ = with_even_counts


HELP: dict[str, Callable[[Any], None]] = {
    "vllm.utils.system_utils": name_the_runtime,
    "vllm.v1.worker.gpu.async_utils": draw_a_token,
    "rl.trainer_types": report_a_token,
    "rl.distributed.expert_parallel": spread_rows,
}


class Helper(importlib.abc.MetaPathFinder):
    """Finder that changes the modules of HELP once they are loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in HELP:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                HELP[name](module)

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


if "NULL_GPU_LIBRARY" in os.environ:
    sys.meta_path.insert(0, Helper())
