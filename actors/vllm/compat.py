"""vLLM 0.32's private parts that relay uses, each with its reason. vllm is imported inside the
functions.

`adapt_vllm` shows vLLM's dispatcher of kernels vLLM's own modules alone. When an engine starts on a
CPU, the dispatcher looks for Triton kernels in everything that any loaded module holds, which takes
0.4 s; and with numba loaded (relay's checksums) it crashes: llvmlite's `lib` pretends to have every
attribute, so `vars(lib).get` raises AttributeError; flask's `request` raises RuntimeError.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import HashStore, TCPStore

from rl.distributed.process_group import AGENT_STORE, World, open_store
from rl.models.batch_invariant.model import check_capability

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor import Executor


STORE_TIMEOUT = timedelta(minutes=5)
_store: TCPStore | None = None
"""The store that this process serves to the other ranks of its engine."""


def adapt_vllm() -> None:
    """Let vLLM's dispatcher look at fewer modules, and silence logs and warnings."""
    from vllm.triton_utils import dispatcher

    dispatcher.sys = _OwnModules()
    # A failed step logs its whole input, about 100 kB; the error itself is raised.
    logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")


class _OwnModules:
    """Stand-in for `sys` in vLLM's dispatcher."""

    @property
    def modules(self) -> dict[str, ModuleType]:
        own: dict[str, ModuleType] = {}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "vllm":
                own[name] = module
        return own


def make_client(vllm_config: VllmConfig, *, world: World) -> InprocClient:
    """Build vLLM's engine core for this rank, in this process.

    If it fails, vLLM's globals are reset, so that the next engine of this process can start.
    """
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform
    from vllm.v1.engine.core_client import InprocClient

    if world.size == 1 and current_platform.is_cpu() and not dist.is_initialized():
        # vLLM would rendezvous over a file in /tmp, which a killed process leaves behind.
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    set_num_threads = torch.set_num_threads
    try:
        with _serve_ranks_store(world):
            executor_class = _choose_executor_class(vllm_config, world)
            return InprocClient(vllm_config, executor_class, log_stats=False)
    except BaseException:
        cleanup_dist_env_and_memory()
        raise
    finally:
        # On a CPU vLLM replaces this function by one that does nothing, for the rest of the
        # process.
        torch.set_num_threads = set_num_threads


@contextlib.contextmanager
def _serve_ranks_store(world: World) -> Iterator[None]:
    """Serve the ranks' store as relay does, for vLLM, which would serve it to every network."""
    global _store
    before = os.environ.get(AGENT_STORE)

    if world.size > 1:
        # Close the store of an earlier engine first: it may have had the same port.
        _store = None
        if world.rank == 0:
            _store = open_store(world, timeout=STORE_TIMEOUT, wait=False)
        # PyTorch then connects to the store that is there, and rank 0 opens no second one.
        os.environ[AGENT_STORE] = "True"

    try:
        yield
    finally:
        if before is not None:
            os.environ[AGENT_STORE] = before
        elif world.size > 1:
            del os.environ[AGENT_STORE]


def _choose_executor_class(vllm_config: VllmConfig, world: World) -> type[Executor]:
    from vllm.v1.executor import Executor
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    if world.size == 1:
        return Executor.get_class(vllm_config)

    class RankExecutor(ExecutorWithExternalLauncher):
        """One rank among processes that Monarch has started."""

        def _distributed_args(self) -> tuple[str, int, int]:
            # vLLM names a shared memory for CPU collectives after the end of the address. relay's
            # model does not use it, and a killed process leaves it behind. With a different name on
            # each rank it is not created; PyTorch ignores the query.
            address = f"tcp://{world.master_addr}:{world.master_port}?own={world.rank}"
            return address, world.rank, world.local_rank

    return RankExecutor


def set_rank_timeout(timeout_s: float) -> None:
    """Set the timeout of collectives from now on; until now ranks waited for each other to load."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    for process_group in (None, group.device_group, group.cpu_group):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), process_group)


def get_model_runner(client: InprocClient) -> Any:
    """Return the object that owns the model, the batch, the sampler and the caches."""
    worker: Any = client.engine_core.model_executor.driver_worker.worker
    return worker.model_runner


def call_before_forwards(
    runner: Any, function: Callable[[Sequence[str], np.ndarray], None]
) -> None:
    """Call a function before each forward of requests.

    It gets the requests' ids in the order of the batch, and the number of rows of each, [S] int64.
    vLLM tells its models where the requests lie, but not which they are.
    """
    prepare = runner._prepare_inputs

    def prepare_inputs(scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        function(runner.input_batch.req_ids, num_scheduled_tokens)
        return prepare(scheduler_output, num_scheduled_tokens)

    runner._prepare_inputs = prepare_inputs


def count_steps_ahead(client: InprocClient) -> int:
    """Return the number of steps that compute tokens and whose result vLLM has not taken yet."""
    num_steps = 0
    # The queue is None in an engine that takes each result before it begins the next step.
    for _, scheduled, _ in client.engine_core.batch_queue or ():
        num_steps += scheduled.total_num_scheduled_tokens > 0
    return num_steps


def shorten_allocation(client: InprocClient) -> None:
    """Let a request take its next slot in a block that it has, past vLLM's checks.

    vLLM asks each of its layers of bookkeeping whether a new block is needed, for every token:
    half of its scheduler's time. Within a block the answer is always no. Without the prefix cache
    it goes on to ask, after a request's first block.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    manager: Any = client.engine_core.scheduler.kv_cache_manager
    groups = manager.coordinator.single_type_managers
    # Other kinds of attention give blocks back while a request runs.
    if len(groups) != 1 or type(groups[0]) is not FullAttentionManager:
        return
    group, allocate_slots = groups[0], manager.allocate_slots

    def allocate(request: Any, num_new_tokens: int, **options: Any) -> Any:
        # A request that begins is called with more options, and has to look for cached blocks.
        if options == {"num_lookahead_tokens": 0}:
            num_tokens = request.num_computed_tokens + num_new_tokens
            num_blocks = len(group.req_to_blocks.get(request.request_id, ()))
            # A block that becomes full has to be entered in the prefix cache.
            num_cached = group.num_cached_block.get(request.request_id, 0)
            has_room = num_tokens <= num_blocks * group.block_size
            if has_room and num_tokens // group.block_size <= num_cached:
                return manager.empty_kv_cache_blocks
        return allocate_slots(request, num_new_tokens, **options)

    manager.allocate_slots = allocate


def import_custom_ops() -> Any:
    """Import vLLM's Python functions around its compiled kernels.

    vLLM's public layers choose their kernel by platform and config; relay's model names it.
    """
    from vllm import _custom_ops

    return _custom_ops


def get_compiled_ops() -> Any:
    """Return the kernels that vLLM registers with PyTorch; gated activations have no function."""
    import_custom_ops()  # Loads the library that registers them.
    return torch.ops._C


MOST_TILED_ROWS = 512
"""Rows up to which vLLM's own kernel is taken; with more of them oneDNN's is faster."""


def build_packed_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return `F.linear` with a copy of a weight in the order in which a CPU kernel reads it.

    vLLM itself takes oneDNN's kernel for all but the smallest weights. On two cores with AMX its
    own, of SGLang's origin, took 24 ms for the products of a 135M model with 128 rows in bfloat16,
    oneDNN's 29, PyTorch's 35.
    """
    ops = import_custom_ops()
    num_rows, num_columns = weight.shape
    fits_tiles = num_rows % 16 == 0 and num_columns % 32 == 0

    # vLLM's own kernel multiplies tiles of AMX, which hold 16 rows of 32 bfloat16 numbers.
    if weight.dtype != torch.bfloat16 or not fits_tiles or not torch.cpu._is_amx_tile_supported():
        if not can_multiply(weight.dtype):
            return _build_float32_product(weight, bias)
        handler = ops.create_onednn_mm(weight.t(), 32)
        return lambda x: ops.onednn_mm(handler, x, bias)

    packed = get_compiled_ops().convert_weight_packed(weight)
    wide_bias = None if bias is None else bias.float()

    def multiply(x: Tensor) -> Tensor:
        if x.size(0) > MOST_TILED_ROWS:
            return F.linear(x, weight, bias)
        return ops.weight_packed_linear_cpu(x, packed, num_rows, wide_bias)

    return multiply


@functools.cache
def can_multiply(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has a product of this type on this processor.

    Without AVX-512 it has none in bfloat16, and only a few processors have one in float16.
    """
    try:
        import_custom_ops().create_onednn_mm(torch.ones(16, 16, dtype=dtype).t(), 32)
    except RuntimeError:
        return False
    return True


def _build_float32_product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return a product in float32 with a copy of a 16-bit weight, rounded at its end.

    PyTorch's own product in 16 bits has no fast kernel on such a processor either.
    """
    ops = import_custom_ops()
    handler = ops.create_onednn_mm(weight.float().t(), 32)
    wide_bias = None if bias is None else bias.float()
    return lambda x: ops.onednn_mm(handler, x.float(), wide_bias).to(x.dtype)


def use_vllms_kernels() -> None:
    """Replace PyTorch's kernels by vLLM's batch-invariant ones, for the trainer's process on a GPU.

    Call it before the first product on the GPU. No result of it was seen yet: no GPU was at hand.

    Raises:
        ValueError: the GPU is older than Hopper, for which vLLM's kernels have no gradient.
    """
    check_capability(torch.cuda.get_device_capability())
    os.environ |= {"VLLM_BATCH_INVARIANT": "1", "TRITON_F32_DEFAULT": "ieee"}
    from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

    init_batch_invariance()
