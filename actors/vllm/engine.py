"""The generator engine: concurrent completions from one vLLM engine, and its weight updates.

`generate` adds requests and waits for their completions; calls overlap, and their requests
share the engine's steps. `update_weights` asks for a turn between steps: requests that run are
finished first, new ones are held back, then the weights are written in place, and the held
requests go on with the new ones. So every completion is of one version, and no cached key or
value outlives its weights. (Writing while requests run would save the wait for the longest of
them, and leave completions of several versions with keys and values of older ones.)

With tensor parallelism each rank has an engine in its own process. Requests are given to rank 0
only, weight updates to all; see `actors.vllm.lockstep`.

vllm is imported when the engine starts, not before, so that a controller can read the config.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from actors.vllm.driver import Driver
from actors.vllm.lockstep import Lockstep, Request
from actors.vllm.memory import CPU_BLOCK, cpu_cache_tokens
from actors.vllm.requests import Call, Sample, check_call, make_requests
from actors.vllm.worker_thread import WorkerThread
from rl.config.configurable import Configurable
from rl.distributed.process_group import World
from rl.distributed.seeds import check_seed
from rl.models.hf import HFFolder
from rl.models.spec import ModelSpec
from rl.types import Completion, SamplingParams

if TYPE_CHECKING:
    from actors.vllm.core import VLLMCore

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    # The engine runs in this process, which owns its weights.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The model runner whose batch our sampler reads; the newer one needs triton.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # On a CPU it binds memory to NUMA nodes, and warns that it did.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""What vllm has to find when it is imported."""
CLOSE_TIMEOUT_S = 10.0
_POSITIVE = (
    "tensor_parallel_degree",
    "max_num_seqs",
    "max_num_batched_tokens",
    "cpu_kv_cache_gib",
    "num_threads",
    "rank_timeout_s",
)


class GeneratorEngine(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        tensor_parallel_degree: int = 1
        """Processes that share one copy of the model; divides the key-value heads and the vocabulary."""
        dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
        """Of weights, activations and cache; the trainer's weights are cast to it."""
        max_model_len: int = 4096
        """Longest prompt and completion together, in tokens."""
        max_num_seqs: int = 256
        """Most requests in one step; others wait."""
        max_num_batched_tokens: int = 8192
        """Most tokens in one step, those of prompts included; a longer prompt is read in parts."""
        gpu_memory_utilization: float = 0.85
        """Share of a GPU's memory for weights, activations and cache. Not used on a CPU."""
        cpu_kv_cache_gib: float = 1.0
        """Memory of each rank's key-value cache on a CPU. Not used on a GPU."""
        block_size: int | None = None
        """Tokens of a cache block; prompts share whole blocks. On a CPU a multiple of 32.
        None: 32 on a CPU, vLLM's choice on a GPU."""
        enable_prefix_caching: bool = True
        """The samples of a prompt share its cache blocks."""
        enforce_eager: bool = True
        """Without CUDA graphs. Not used on a CPU."""
        initial_weights: Literal["store", "folder"] = "store"
        """Where the first weights come from: the first pull, or the Hugging Face folder."""
        seed: int = 0
        """For calls whose sampling settings have none."""
        num_threads: int = 1
        """CPU threads of each rank."""
        rank_timeout_s: float = 300.0
        """Longest wait of a tensor-parallel rank for the others, in a step or an update."""

        def __post_init__(self) -> None:
            check_seed(self.seed, field="generator.seed", below=2**32)
            for name in _POSITIVE:
                if not getattr(self, name) > 0:
                    raise ValueError(f"generator.{name}={getattr(self, name)}: must be above 0")
            if self.max_model_len < 2:
                raise ValueError(f"generator.max_model_len={self.max_model_len}: must be at least 2")
            if self.max_num_batched_tokens < self.max_num_seqs:
                raise ValueError(
                    f"generator.max_num_batched_tokens={self.max_num_batched_tokens}: must be at least "
                    f"max_num_seqs={self.max_num_seqs}, as each running request takes a token a step"
                )
            if not 0 < self.gpu_memory_utilization <= 1:
                raise ValueError(
                    f"generator.gpu_memory_utilization={self.gpu_memory_utilization}: "
                    "must be above 0, at most 1"
                )

        def check_model(self, model: Any) -> None:
            """Whether an engine of this config can run a model of config `model`, without starting it.

            Raises:
                ValueError: naming the fields.
            """
            for name, size in (
                ("num_kv_heads", model.block.attention.num_kv_heads),
                ("vocab_size", model.vocab_size),
            ):
                if size % self.tensor_parallel_degree:
                    raise ValueError(
                        f"generator.tensor_parallel_degree={self.tensor_parallel_degree} "
                        f"does not divide {name}={size}"
                    )
            if self.max_model_len > model.rope.max_positions:
                raise ValueError(
                    f"generator.max_model_len={self.max_model_len} is more than the model's "
                    f"max_positions={model.rope.max_positions}"
                )
            if torch.cuda.is_available():
                return
            if self.block_size is not None and self.block_size % CPU_BLOCK:
                raise ValueError(
                    f"generator.block_size={self.block_size}: must be a multiple of {CPU_BLOCK} on a CPU"
                )
            num_tokens = cpu_cache_tokens(
                model,
                cache_gib=self.cpu_kv_cache_gib,
                dtype=self.dtype,
                tensor_parallel_degree=self.tensor_parallel_degree,
                block_size=self.block_size,
            )
            if self.max_model_len > num_tokens:
                raise ValueError(
                    f"generator.cpu_kv_cache_gib={self.cpu_kv_cache_gib:g} holds the keys and values of "
                    f"{num_tokens} tokens, fewer than generator.max_model_len={self.max_model_len}"
                )

    def __init__(
        self, *, config: Config, model_spec: ModelSpec, hf_assets_path: str, world: World | None = None
    ) -> None:
        """Nothing is started yet.

        Args:
            hf_assets_path: folder with config.json, and with the weights if those come from it.
            world: which of the tensor-parallel ranks this is; alone when None.

        Raises:
            ValueError: there are not `tensor_parallel_degree` processes.
        """
        self.config = config
        self.world = world or World()
        if self.world.size != config.tensor_parallel_degree:
            raise ValueError(
                f"generator.tensor_parallel_degree={config.tensor_parallel_degree} needs as many processes: "
                f"there are {self.world.size}"
            )
        self._model_spec = model_spec
        self._hf_assets_path = hf_assets_path
        self._rng = random.Random(config.seed)
        self._next_id = 0
        self._thread: WorkerThread | None = None
        self._core: VLLMCore
        self._driver: Driver
        self._task: asyncio.Task[None] | None = None

    @property
    def policy_version(self) -> int | None:
        """Of the weights in use; None while there are none."""
        return self._driver.policy_version

    async def start(self) -> None:
        """Import vllm, build the engine, make its first steps; collective over the ranks.

        One engine a process: vllm keeps much of its state in globals.

        Raises:
            ValueError: the settings do not fit the model or the memory, or the folder is not whole.
        """
        self._check_assets()
        self._thread = WorkerThread("vllm-engine")
        try:
            self._core, lockstep = await self._thread.run(self._build)
        except BaseException:
            await self.close()
            raise
        self._driver = Driver(core=self._core, lockstep=lockstep, thread=self._thread)
        if self.config.initial_weights == "folder":
            self._driver.policy_version = 0
        self._task = asyncio.create_task(self._driver.run(), name="generator engine")

    def model_state_dict(self) -> dict[str, Tensor]:
        """This rank's weights by the trainer's names, DTensors where they are sharded.

        Written to only inside `update_weights`.
        """
        return self._core.weights()

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams
    ) -> list[list[Completion]]:
        """Completions of each prompt ([T] int token ids), `sampling.num_samples` each, in order.

        Cancelling the call ends its requests. Ranks other than 0 answer nothing.

        Raises:
            ValueError: a prompt or a setting that cannot be served, before anything is started.
            GeneratorError: there are no weights, or the engine was closed or has failed.
        """
        self._driver.check_serving()
        check_call(
            prompts, sampling, max_model_len=self.config.max_model_len, vocab_size=self._core.vocab_size
        )
        if self.world.rank != 0 or not prompts:
            return []
        self._driver.check_weights()
        seed = self._rng.getrandbits(62) if sampling.seed is None else sampling.seed
        requests = make_requests(prompts, sampling, seed=seed, first_id=self._next_id)
        self._next_id += len(requests)
        call = Call(num_prompts=len(prompts), num_samples=sampling.num_samples)
        self._driver.submit(requests, [Sample(call=call, place=i) for i in range(len(requests))])
        try:
            return await call.future
        except asyncio.CancelledError:
            self._driver.abort(requests)
            raise

    async def update_weights(
        self, write: Callable[[dict[str, Tensor]], Awaitable[None]], *, version: int
    ) -> None:
        """Let `write` overwrite `model_state_dict()` in place; its weights are then `version`.

        Called on every rank; returns when all have written. After a failure there are no valid
        weights, and no generation, until an update succeeds.

        Raises:
            GeneratorError: another rank failed to write, or the engine was closed or has failed.
            Exception: what `write` raised.
        """
        self._driver.check_serving()
        async with self._driver.update(version):
            await write(self.model_state_dict())

    async def close(self) -> None:
        """End the engine and its thread; calls that wait fail. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._task is not None:
            self._driver.close()
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)
            if self._task.done():
                await thread.run(self._core.close)
        if not await asyncio.to_thread(thread.stop, timeout_s=CLOSE_TIMEOUT_S):
            logger.warning("the engine's thread was still busy %g s after the close", CLOSE_TIMEOUT_S)

    def _check_assets(self) -> None:
        spec = self._model_spec
        if self.config.initial_weights == "store":
            file = Path(self._hf_assets_path) / "config.json"
            self.config.check_model(spec.from_hf_config(json.loads(file.read_text("utf-8"))))
            return
        folder = HFFolder(self._hf_assets_path)
        model_config: Any = spec.from_hf_config(folder.config)
        self.config.check_model(model_config)
        with torch.device("meta"):
            folder.check(model_config.build(), spec.adapter(model_config))

    def _build(self) -> tuple[VLLMCore, Lockstep]:
        """In the engine's thread, which from here on is the only one to touch vllm."""
        os.environ.update(ENVIRONMENT)
        from actors.vllm.core import VLLMCore

        core = VLLMCore(
            config=self.config,
            model_spec=self._model_spec,
            hf_assets_path=self._hf_assets_path,
            world=self.world,
        )
        lockstep = Lockstep(rank=self.world.rank, size=self.world.size, timeout_s=self.config.rank_timeout_s)
        # The first steps allocate, and on a GPU compile; no call should wait for that.
        core.add(
            Request(
                id=-1, prompt=np.zeros(1, dtype=np.int32), max_tokens=1, temperature=1.0, top_p=1.0, top_k=0,
                stop_token_ids=(), seed=0,
            )
        )  # fmt: skip
        while core.has_requests:
            core.step()
        core.forget_prefixes()
        return core, lockstep
