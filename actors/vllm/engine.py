"""The generator engine: concurrent completions from one vLLM engine, and its weight updates.

`generate` adds requests and waits for their completions; calls overlap, and their requests
share the engine's steps. `abort` ends completions as they are, and `generate` goes on with them
when they are given to it again. `compute_logprobs` scores sequences in the same steps.

`update_weights` asks for a turn between steps, in which the weights are written in place. What
becomes of requests that run is `on_update`'s choice. Whatever it is, no request is dropped, each
token's version is that of the weights that drew it, and a request that comes after an update
reads no keys or values from before it.

With tensor parallelism each rank has an engine in its own process. Requests are given to rank 0
only, weight updates to all; see `actors.vllm.lockstep`.

vllm is imported when the engine starts, not before, so that a controller can read the config.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from actors.vllm.driver import Driver
from actors.vllm.engine_config import GeneratorConfig
from actors.vllm.lockstep import Lockstep, Request
from actors.vllm.requests import (
    Begun,
    Call,
    Sample,
    Scored,
    check_call,
    check_sequences,
    completion_call,
    scoring_call,
)
from rl.config.configurable import Configurable
from rl.distributed.process_group import World
from rl.models.hf import HFFolder
from rl.models.prompt_requests import End
from rl.models.spec import ModelSpec
from rl.models.stop_texts import spells_any
from rl.random_states import process_states, restore_process_states
from rl.rollouts.tokenizer import open_tokenizer
from rl.types import Completion, SamplingParams
from rl.worker_thread import WorkerThread

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
"""What vllm has to find when it is imported."""
CLOSE_TIMEOUT_S = 10.0


class GeneratorEngine(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(GeneratorConfig):
        """All of its fields."""

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
        self._tokenizer: Any = None
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
        _check_assets(self.config, self._model_spec, self._hf_assets_path)
        self._thread = WorkerThread("vllm-engine")
        try:
            self._core, lockstep = await self._thread.run(self._build)
        except BaseException:
            await self.close()
            raise
        self._driver = Driver(
            core=self._core, lockstep=lockstep, thread=self._thread, on_update=self.config.on_update
        )
        if self.config.initial_weights == "folder":
            self._driver.policy_version = 0
        self._task = asyncio.create_task(self._driver.run(), name="generator engine")

    def model_state_dict(self) -> dict[str, Tensor]:
        """This rank's weights by the trainer's names, DTensors where they are sharded.

        Written to only inside `update_weights`.
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
        """Completions of each prompt ([T] int token ids), `sampling.num_samples` each, in order.

        Cancelling the call ends its requests. Ranks other than 0 answer nothing.

        Args:
            call_id: for `abort`.
            begun: [prompt][sample] what an aborted call returned. Its finished completions are returned
                as they are, the others continued: `max_tokens` counts the tokens they have. With the same
                prompts and `sampling`, a seed in it, and equal weights, they get the tokens that they would
                have got undisturbed.

        Raises:
            ValueError: a prompt or a setting that cannot be served, or `begun` does not fit them, before
                anything is started.
            GeneratorError: there are no weights, or the engine was closed or has failed.
        """
        self._driver.check_serving()
        limits = {"max_model_len": self.config.max_model_len, "vocab_size": self._core.vocab_size}
        check_call(prompts, sampling, begun, **limits)
        if self.world.rank != 0 or not prompts:
            return []
        end = await self._end_of(sampling.stop_texts)
        self._driver.check_weights()
        call, requests, samples = completion_call(
            prompts,
            sampling,
            seed=self._rng.getrandbits(62) if sampling.seed is None else sampling.seed,
            first_id=self._next_id,
            call_id=call_id,
            begun=begun,
            end=end,
        )
        return await self._answer(call, requests, samples)

    async def abort(self, call_ids: Sequence[str] | None = None) -> int:
        """End the completions of these `generate` calls as they are, of every call when None.

        The calls return, with finish reason "abort" for what had not finished. Calls that have ended, or
        have not arrived, are ignored. Returns how many completions were ended, on rank 0; elsewhere 0.
        """
        if isinstance(call_ids, str):
            raise ValueError(f"call_ids={call_ids!r}: must be a list of ids, or None for all calls")
        self._driver.check_serving()
        return self._driver.abort(call_ids)

    async def compute_logprobs(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """[T] float32 nats for each sequence ([T] int token ids): its tokens' logprobs at temperature 1.

        Entry 0 is 0. Scored beside running requests, before those that wait; all of a sequence under one
        version of the weights. It reads no cached keys and values.

        Raises:
            ValueError: a sequence that is empty, too long, or has a token id out of range.
            GeneratorError: there are no weights, or the engine was closed or has failed.
        """
        self._driver.check_serving()
        check_sequences(sequences, max_model_len=self.config.max_model_len, vocab_size=self._core.vocab_size)
        if self.world.rank != 0 or not sequences:
            return []
        self._driver.check_weights()
        call, requests, samples = scoring_call(sequences, first_id=self._next_id)
        return [logprobs for (logprobs,) in await self._answer(call, requests, samples)]

    async def update_weights(self, write: Callable[[dict[str, Tensor]], Awaitable[T]], *, version: int) -> T:
        """Let `write` overwrite `model_state_dict()` in place; its weights are then `version`.

        Called on every rank; returns what `write` did, when all have written. After a failure there are
        no valid weights: running requests fail, and there is no generation until an update succeeds.

        Raises:
            GeneratorError: another rank failed to write, or the engine was closed or has failed.
            Exception: what `write` raised.
        """
        self._driver.check_serving()
        async with self._driver.update(version):
            return await write(self.model_state_dict())

    async def sleep(self) -> None:
        """Give back the memory of weights and key-value cache until `wake`; for a device used by turns.

        Called on every rank. Running requests finish first (see `abort`), others fail. There are no
        weights afterwards: after `wake`, a version must be written before anything is generated.

        Raises:
            ValueError: the engine was not started for this.
        """
        if not self.config.can_sleep:
            raise ValueError("generator.can_sleep=False: must be True for a generator that sleeps")
        await self._driver.rest(asleep=True)

    async def wake(self) -> None:
        """Take the memory again; nothing happens if it is there. Called on every rank."""
        await self._driver.rest(asleep=False)

    def random_states(self) -> bytes:
        """Of what calls without a seed are drawn with, and of this process."""
        return pickle.dumps((self._rng.getstate(), process_states()))

    def restore_random_states(self, states: bytes) -> None:
        """Set what `random_states` returned."""
        own, of_process = pickle.loads(states)
        self._rng.setstate(own)
        restore_process_states(of_process)

    async def aside(self, function: Callable[[], T]) -> T:
        """Its result, called in the engine's thread between two steps; on rank 0."""
        self._driver.check_serving()
        assert self._thread is not None
        return await self._thread.run(function)

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

    async def _answer(
        self, call: Call[T], requests: Sequence[Request], samples: Sequence[Sample | Scored]
    ) -> list[list[T]]:
        self._next_id += len(requests)
        self._driver.submit(requests, samples)
        try:
            return await call.future
        except asyncio.CancelledError:
            self._driver.withdraw(requests)
            raise

    async def _end_of(self, texts: Sequence[str]) -> End | None:
        """What ends completions that spell one of these; the folder's tokenizer is opened at first need."""
        if not texts:
            return None
        if self._tokenizer is None:
            self._tokenizer, _ = await asyncio.to_thread(open_tokenizer, Path(self._hf_assets_path))
        return partial(spells_any, texts, tokenizer=self._tokenizer)

    def _build(self) -> tuple[VLLMCore, Lockstep]:
        """In the engine's thread, which from here on is the only one to touch vllm."""
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
        # The first steps allocate, and on a GPU compile; no call should wait for that.
        core.add(
            Request(
                id=-1, prompt=np.zeros(1, dtype=np.int32), max_tokens=1, temperature=1.0, top_p=1.0, top_k=0,
                stop_token_ids=(), seed=0,
            )
        )  # fmt: skip
        while core.has_requests:
            core.step()
        core.weights_changed()
        return core, lockstep


def _check_assets(config: GeneratorConfig, spec: ModelSpec, path: str) -> None:
    """The folder fits the settings and, if the weights come from it, is whole."""
    if config.initial_weights == "store":
        file = Path(path) / "config.json"
        config.check_model(spec.from_hf_config(json.loads(file.read_text("utf-8"))))
        return
    folder = HFFolder(path)
    model_config: Any = spec.from_hf_config(folder.config)
    config.check_model(model_config)
    with torch.device("meta"):
        folder.check(model_config.build(), spec.adapter(model_config))
