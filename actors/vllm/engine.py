"""The generator engine: concurrent completions from one vLLM engine, and its weight updates.

`generate` adds requests and waits for their completions; calls overlap, and their requests share the
engine's steps. `abort` ends completions as they are, and `generate` continues them when it gets them
again. `compute_logprobs` scores sequences in the same steps.

`update_weights` asks for a turn between two steps, in which the weights are written in place. `on_update`
decides what happens to running requests. In every mode no request is dropped, each token's version is the
version of the weights that drew it, and a request that comes after an update reads no keys or values from
before it.

With tensor parallelism each rank has an engine in its own process. Requests are given to rank 0 only,
weight updates to all ranks; `actors.vllm.driver` keeps the ranks in step.

vllm is imported when the engine starts, so that a controller can read the config without it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from actors.vllm.driver import Driver, Lockstep, Pause
from actors.vllm.requests import (
    Begun,
    Request,
    Sample,
    check_call,
    check_sequences,
    completion_samples,
    scoring_samples,
)
from rl.config.configurable import Configurable
from rl.distributed.process_group import World
from rl.distributed.runtime import check_seed
from rl.models.hf import HFFolder, read_json_object
from rl.models.parallelize import check_tensor_parallel
from rl.models.sampling import End, spells_any
from rl.models.spec import ModelSpec
from rl.models.tokenizer import open_tokenizer
from rl.types import Completion, SamplingParams
from rl.utils.processes import process_states, restore_process_states
from rl.utils.threads import WorkerThread

if TYPE_CHECKING:
    from actors.vllm.core import VLLMCore

logger = logging.getLogger(__name__)

T = TypeVar("T")
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
"""Environment variables that vllm reads when it is imported."""
CLOSE_TIMEOUT_S = 10.0
CPU_BLOCK = 32
"""Tokens of a cache block on a CPU. vLLM's default of 128 is longer than most prompts, which would then share
nothing."""
SMALLEST_CPU_HEAD_DIM = 32
"""Smaller heads take as much cache as heads of this size."""
OnUpdate = Literal["drain", "keep", "recompute"]
_POSITIVE = (
    "tensor_parallel_degree",
    "max_num_seqs",
    "max_num_batched_tokens",
    "cpu_kv_cache_gib",
    "num_threads",
    "rank_timeout_s",
)


class GeneratorEngine(Configurable):
    """One rank's vLLM engine, with concurrent calls and weight updates."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        tensor_parallel_degree: int = 1
        """Processes that share one copy of the model; must divide the key-value heads and the vocabulary."""
        dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
        """Dtype of weights, activations and cache; the trainer's weights are cast to it."""
        max_model_len: int = 4096
        """Most tokens of a prompt and its completion together."""
        max_num_seqs: int = 256
        """Most requests in one step; further requests wait."""
        max_num_batched_tokens: int = 8192
        """Most tokens in one step, prompts included; a longer prompt is read in parts."""
        gpu_memory_utilization: float = 0.85
        """Share of a GPU's memory for weights, activations and cache. Not used on a CPU."""
        cpu_kv_cache_gib: float = 1.0
        """GiB of each rank's key-value cache on a CPU. Not used on a GPU."""
        block_size: int | None = None
        """Tokens of a cache block, on a CPU a multiple of 32; prompts share whole blocks.
        None: 32 on a CPU, vLLM's choice on a GPU."""
        enable_prefix_caching: bool = True
        """Let the samples of a prompt share its cache blocks."""
        enforce_eager: bool = True
        """Run without CUDA graphs. Not used on a CPU."""
        on_update: OnUpdate = "drain"
        """Treatment of running requests when weights are updated.

        "drain": running requests finish first, and new ones wait meanwhile. A completion is of one version, and
        so are its logprobs. Costs the wait for the longest completion, while the batch empties.
        "keep": running requests go on under the new weights with the keys and values they have. Costs nothing.
        A completion may be of several versions; a token's logprob is of the distribution it was drawn from,
        which after an update belongs to no single version: new weights attend to old keys and values.
        "recompute": like "keep", but keys and values are computed again under the new weights. Costs one
        prefill of all running prompts and completions. A token's logprob is what its version gives for the
        whole sequence before it."""
        can_sleep: bool = False
        """Allow `sleep`. On a GPU, vLLM's allocator then owns weights and cache."""
        initial_weights: Literal["store", "folder"] = "store"
        """Source of the first weights: the first pull, or the Hugging Face folder."""
        seed: int = 0
        """Seed of calls whose sampling settings have none."""
        num_threads: int = 1
        """CPU threads of each rank."""
        rank_timeout_s: float = 300.0
        """Longest wait in seconds of a tensor-parallel rank for the others, in a step or an update."""

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
                    f"generator.gpu_memory_utilization={self.gpu_memory_utilization}: must be above 0, at most 1"
                )

        def check_model(self, model: Any, *, on_gpu: bool | None = None) -> None:
            """Raise ValueError, naming the fields, unless an engine of this config can run the model.

            `on_gpu` None means: if this machine has a GPU.
            """
            check_tensor_parallel(model, self.tensor_parallel_degree)
            if self.max_model_len > model.rope.max_positions:
                raise ValueError(
                    f"generator.max_model_len={self.max_model_len} is more than the model's "
                    f"max_positions={model.rope.max_positions}"
                )
            if torch.cuda.is_available() if on_gpu is None else on_gpu:
                return
            if self.block_size is not None and self.block_size % CPU_BLOCK:
                raise ValueError(
                    f"generator.block_size={self.block_size}: must be a multiple of {CPU_BLOCK} on a CPU"
                )
            if self.max_model_len > (num_tokens := self.cpu_cache_tokens(model)):
                raise ValueError(
                    f"generator.cpu_kv_cache_gib={self.cpu_kv_cache_gib:g} holds the keys and values of "
                    f"{num_tokens} tokens, fewer than generator.max_model_len={self.max_model_len}"
                )

        def cpu_cache_tokens(self, model: Any) -> int:
            """Return the tokens whose keys and values fit into one rank's cache on a CPU, in whole blocks."""
            attention = model.block.attention
            num_rows = 2 * model.num_layers * attention.num_kv_heads // self.tensor_parallel_degree
            itemsize: int = getattr(torch, self.dtype).itemsize
            token_bytes = num_rows * max(attention.head_dim, SMALLEST_CPU_HEAD_DIM) * itemsize
            # vLLM keeps one block empty and points unused entries at it.
            num_blocks = self.cpu_cache_bytes // (token_bytes * self.cpu_block_tokens) - 1
            return max(0, num_blocks) * self.cpu_block_tokens

        @property
        def cpu_cache_bytes(self) -> int:
            return int(self.cpu_kv_cache_gib * 2**30)

        @property
        def cpu_block_tokens(self) -> int:
            return self.block_size or CPU_BLOCK

    def __init__(
        self, *, config: Config, model_spec: ModelSpec, hf_assets_path: str, world: World | None = None
    ) -> None:
        """Check the number of processes; `start` starts the engine.

        Args:
            hf_assets_path: folder with config.json, and with the weights if the first weights come from it.
            world: this tensor-parallel rank; None: a single rank.

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
        self._tokenizer: Any = None
        self._thread: WorkerThread | None = None
        self._core: VLLMCore
        self._driver: Driver
        self._task: asyncio.Task[None] | None = None

    @property
    def policy_version(self) -> int | None:
        """Version of the weights in use; None while there are none."""
        return self._driver.policy_version

    async def start(self) -> None:
        """Import vllm, build the engine and make its first steps; collective over the ranks.

        A process can have one engine: vllm keeps much of its state in globals.

        Raises:
            ValueError: the settings do not fit the model or the memory, or the folder is incomplete.
        """
        _check_assets(self.config, self._model_spec, self._hf_assets_path)
        self._thread = WorkerThread("vllm-engine")
        try:
            self._core, lockstep = await self._thread.run(self._build)
        except BaseException:
            await self.close()
            raise
        self._driver = Driver(
            core=self._core, lockstep=lockstep, thread=self._thread, drains=self.config.on_update == "drain"
        )
        if self.config.initial_weights == "folder":
            self._driver.policy_version = 0
        self._task = asyncio.create_task(self._driver.run(), name="generator engine")

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return this rank's weights by the trainer's names, DTensors where they are sharded.

        Write to them only inside `update_weights`.
        """
        return self._core.weights()

    async def generate(
        self,
        prompts: Sequence[np.ndarray],
        *,
        sampling: SamplingParams,
        call_id: str = "",
        begun: Begun | None = None,
    ) -> list[list[Completion]]:
        """Return `sampling.num_samples` completions of each prompt ([T] int token ids), in order.

        Cancelling the call ends its requests. Ranks other than 0 return an empty list.

        Args:
            call_id: identifies the call for `abort`.
            begun: [prompt][sample] completions that an aborted call returned. Finished ones are returned
                unchanged, the others continued: `max_tokens` counts the tokens they have. With the same
                prompts and `sampling`, a seed in it, and equal weights, they get the tokens that they would
                have got without the abort.

        Raises:
            ValueError: a prompt or a setting cannot be served, or `begun` does not fit them; nothing has
                started.
            GeneratorError: there are no weights, or the engine was closed or has failed.
        """
        self._driver.check_serving()
        limits = {"max_model_len": self.config.max_model_len, "vocab_size": self._core.vocab_size}
        check_call(prompts, sampling, begun, **limits)
        if self.world.rank != 0 or not prompts:
            return []
        end = await self._end_of(sampling.stop_texts)
        self._driver.check_weights()
        samples = completion_samples(
            prompts,
            sampling,
            seed=self._rng.getrandbits(62) if sampling.seed is None else sampling.seed,
            first_id=self._next_id,
            call_id=call_id,
            begun=begun,
            end=end,
        )
        made = await self._answers(samples)
        return [made[i : i + sampling.num_samples] for i in range(0, len(made), sampling.num_samples)]

    async def abort(self, call_ids: Sequence[str] | None = None) -> int:
        """End the completions of these `generate` calls (None: every call) as they are.

        The calls return, with finish reason "abort" for unfinished completions. Calls that have ended, or
        have not arrived, are ignored. Return the number of ended completions on rank 0, elsewhere 0.
        """
        self._driver.check_serving()
        return self._driver.abort(call_ids)

    async def compute_logprobs(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return [T] float32 nats for each sequence ([T] int token ids): the logprobs at temperature 1.

        Entry 0 is 0. Sequences are scored beside running requests and before waiting ones; all tokens of a
        sequence under one version of the weights, without cached keys and values.

        Raises:
            ValueError: a sequence is empty, too long, or has a token id out of range.
            GeneratorError: there are no weights, or the engine was closed or has failed.
        """
        self._driver.check_serving()
        check_sequences(sequences, max_model_len=self.config.max_model_len, vocab_size=self._core.vocab_size)
        if self.world.rank != 0 or not sequences:
            return []
        self._driver.check_weights()
        return await self._answers(scoring_samples(sequences, first_id=self._next_id))

    async def update_weights(self, write: Callable[[dict[str, Tensor]], Awaitable[T]], *, version: int) -> T:
        """Let `write` overwrite `model_state_dict()` in place with the weights of `version`.

        Call it on every rank; it returns the result of `write` when all ranks have written. After a failure
        there are no valid weights: running requests fail, and nothing is generated until an update succeeds.

        Raises:
            GeneratorError: another rank failed to write, or the engine was closed or has failed.
            Exception: the error of `write`.
        """
        async with self._driver.pause(Pause(version=version)):
            return await write(self.model_state_dict())

    async def sleep(self) -> None:
        """Give back the memory of weights and key-value cache until `wake`, for a device that is shared.

        Call it on every rank. Running requests finish first (see `abort`), waiting ones fail. There are no
        weights afterwards: after `wake`, a version must be written before anything is generated.

        Raises:
            ValueError: `can_sleep` is False.
        """
        if not self.config.can_sleep:
            raise ValueError("generator.can_sleep=False: must be True for a generator that sleeps")
        await self._driver.rest(asleep=True)

    async def wake(self) -> None:
        """Take the memory again, if the engine sleeps. Call it on every rank."""
        await self._driver.rest(asleep=False)

    def random_states(self) -> bytes:
        """Return the random states of calls without a seed and of this process."""
        return pickle.dumps((self._rng.getstate(), process_states()))

    def restore_random_states(self, states: bytes) -> None:
        """Set the states that `random_states` returned."""
        own, of_process = pickle.loads(states)
        self._rng.setstate(own)
        restore_process_states(of_process)

    async def aside(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread between two steps; on rank 0 only."""
        self._driver.check_serving()
        assert self._thread is not None
        return await self._thread.run(function)

    async def close(self) -> None:
        """End the engine and its thread; waiting calls fail. Idempotent."""
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

    async def _answers(self, samples: Sequence[Sample]) -> list[Any]:
        """Return the answers of the samples once they are there."""
        self._next_id += len(samples)
        waiting = [sample for sample in samples if not sample.answer.done()]
        self._driver.submit(waiting)
        try:
            return await asyncio.gather(*(sample.answer for sample in samples))
        except BaseException:
            self._driver.withdraw(waiting)
            raise

    async def _end_of(self, texts: Sequence[str]) -> End | None:
        """Return the check for completions that spell a stop text; open the tokenizer at first use."""
        if not texts:
            return None
        if self._tokenizer is None:
            self._tokenizer, _ = await asyncio.to_thread(open_tokenizer, Path(self._hf_assets_path))
        return partial(spells_any, texts, tokenizer=self._tokenizer)

    def _build(self) -> tuple[VLLMCore, Lockstep]:
        """Build the engine in its thread, which from here on is the only one to touch vllm."""
        os.environ.update(ENVIRONMENT)
        if self._model_spec.batch_invariant and torch.cuda.is_available():
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        from actors.vllm.core import VLLMCore

        core = VLLMCore(
            config=self.config,
            model_spec=self._model_spec,
            hf_assets_path=self._hf_assets_path,
            world=self.world,
        )
        lockstep = Lockstep(rank=self.world.rank, size=self.world.size, timeout_s=self.config.rank_timeout_s)
        # The first steps allocate, and on a GPU compile; calls should not wait for that.
        core.add(Request(id=-1, prompt=np.zeros(1, dtype=np.int32), max_tokens=1))
        while core.has_requests:
            core.step()
        core.weights_changed()
        return core, lockstep


def _check_assets(config: GeneratorEngine.Config, spec: ModelSpec, path: str) -> None:
    """Raise ValueError unless the folder fits the settings and contains the weights it must have."""
    folder = HFFolder(path) if config.initial_weights == "folder" else None
    model: Any = spec.adapter.config_from_hf(
        folder.config if folder else read_json_object(Path(path) / "config.json")
    )
    config.check_model(model)
    if folder is not None:
        with torch.device("meta"):
            folder.check(model.build(), spec.adapter(model))
