"""The generator engine: concurrent completions from one vLLM engine, and its weight updates.

Calls of `generate` and `compute_logprobs` overlap, and their requests share the engine's steps.
`update_weights` writes the weights in place between two steps; `on_update` decides what happens to
running requests. In every mode no request is dropped, each token's version is the version of the
weights that drew it, and a request that comes after an update reads no keys or values from before
it.

One loop steps the engine. It waits for work (calls, aborts, pauses, the close), for the engine's
thread, and during a pause for the caller that writes the weights. With tensor parallelism each rank
has an engine in its own process. Requests are given to rank 0 only, weight updates to all ranks;
`actors.vllm.lockstep` keeps the ranks in step, and `actors.vllm.pauses` shows how a caller and the
loops of all ranks come together for an update.

vllm is imported when the engine starts, so that a controller can read the config without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch

from actors.vllm.adapters import AdapterRoomError, AdapterShelf
from actors.vllm.config import GeneratorConfig
from actors.vllm.environment import ENVIRONMENT
from actors.vllm.lockstep import EngineTurn, Lockstep
from actors.vllm.pauses import Pause, PauseRequest, Pauses
from actors.vllm.requests import (
    Begun,
    Drawn,
    EngineFailedError,
    EngineTimeoutError,
    GeneratorError,
    Queue,
    Request,
    check_call,
    check_sequences,
    make_completion_samples,
    make_scoring_samples,
)
from actors.vllm.updates import EngineUpdates
from rl.config.configurable import Configurable
from rl.distributed.process_group import World
from rl.models.files.hf import read_hf_config
from rl.models.files.tokenizer import open_tokenizer
from rl.models.sampling import End, spells_any
from rl.models.spec import ModelSpec
from rl.types import Completion, SamplingParams
from rl.utils.processes import disable_collections
from rl.utils.threads import WorkerThread

if TYPE_CHECKING:
    from actors.vllm.core import VLLMCore

logger = logging.getLogger(__name__)

T = TypeVar("T")
CLOSE_TIMEOUT_S = 10.0


class GeneratorEngine(EngineUpdates, Configurable):
    """One rank's vLLM engine, with concurrent calls and weight updates.

    Only `_build`, `_take_turn` and `_end_pause` run in the engine's thread.

    Example:
        engine = config.build(model_spec=spec, hf_assets_path="Qwen3-0.6B")
        await engine.start()
        await engine.update_weights(write, version=1)
        sampling = SamplingParams(max_tokens=16, seed=1)
        [[completion]] = await engine.generate([np.array([9707, 11])], sampling=sampling)
    """

    Config: TypeAlias = GeneratorConfig

    def __init__(
        self,
        *,
        config: GeneratorConfig,
        model_spec: ModelSpec,
        hf_assets_path: str,
        world: World | None = None,
    ) -> None:
        """
        Args:
            hf_assets_path: folder with config.json and, for stop texts, the tokenizer.
            world: this tensor-parallel rank; None: a single rank.

        Raises:
            ValueError: there are not `tensor_parallel_degree` processes.
        """
        self.config = config
        self.world = world or World()
        if self.world.size != config.tensor_parallel_degree:
            raise ValueError(
                f"generator.tensor_parallel_degree={config.tensor_parallel_degree} needs as many "
                f"processes: there are {self.world.size}"
            )
        self.policy_version: int | None = None
        """Version of the weights in use, without adapters; None while there are none."""
        self.base_id: int | None = None
        """Checksum of the weights in use, for adapters that were trained beside them."""
        self._model_spec = model_spec
        self._hf_assets_path = hf_assets_path
        self._rng = random.Random(config.seed)
        self._ids = itertools.count()
        self._tokenizer: Any = None
        self._opening = asyncio.Lock()
        self._thread: WorkerThread | None = None
        self._core: VLLMCore
        self._lockstep: Lockstep
        self._task: asyncio.Task[None] | None = None
        self._drains = config.on_update == "drain"
        self._queue = Queue()
        self._shelf = AdapterShelf(limit_bytes=int(config.adapter_memory_gib * 2**30))
        self._pauses = Pauses(self._queue.changed)
        self._closing = False
        self._failure: GeneratorError | None = None

    @property
    def newest_version(self) -> int | None:
        """Version that new requests get which name no adapter; None while there are no weights."""
        return self.policy_version if self._shelf.newest is None else self._shelf.newest

    async def start(self) -> None:
        """Import vllm, build the engine and make its first steps; collective over the ranks.

        A process can have one engine, as vllm keeps much of its state in globals. Raises ValueError
        if the settings do not fit the model or the memory.
        """
        self.config.check_model(
            self._model_spec.adapter.config_from_hf(read_hf_config(self._hf_assets_path))
        )
        self._thread = WorkerThread("vllm-engine")
        try:
            self._core, self._lockstep = await self._thread.run(self._build)
        except BaseException:
            await self.close()
            raise
        self._task = asyncio.create_task(self._run(self._thread), name="generator engine")

    async def generate(
        self,
        prompts: Sequence[np.ndarray],
        *,
        sampling: SamplingParams,
        call_id: str = "",
        begun: Begun | None = None,
        adapter: int | None = None,
    ) -> list[list[Completion]]:
        """Return `sampling.num_samples` completions of each prompt ([T] int token ids), in order.

        Cancelling the call ends its requests. Ranks other than 0 return an empty list.

        Args:
            call_id: identifies the call for `abort`.
            begun: [prompt][sample] completions that an aborted call returned. Finished ones are
                returned unchanged, the others continued: `max_tokens` counts the tokens they have.
                With a seed, equal arguments and equal weights, they get the tokens that they would
                have got without the abort.
            adapter: version of the adapter to use; None for the newest weights when a request
                begins. A request keeps its adapter to its end.

        Raises:
            ValueError: a prompt or a setting cannot be served, or `begun` does not fit them.
            MissingAdapterError: the adapter is not loaded.
            GeneratorError: there are no weights, or the engine was closed or has failed.
        """
        self._check_serving()
        limits = {"max_model_len": self.config.max_model_len, "vocab_size": self._core.vocab_size}
        check_call(prompts, sampling, begun, **limits)
        if self.world.rank != 0 or not prompts:
            return []

        end = await self._build_stop_check(sampling.stop_texts)
        # After the wait for the tokenizer: the weights may have become invalid meanwhile.
        self._check_weights()
        self._use_adapter(adapter)
        samples = make_completion_samples(
            prompts,
            sampling,
            seed=self._rng.getrandbits(62) if sampling.seed is None else sampling.seed,
            ids=self._ids,
            call_id=call_id,
            begun=begun,
            end=end,
            adapter=adapter,
        )
        completions = await self._queue.submit(samples)

        num_samples = sampling.num_samples
        starts = range(0, len(completions), num_samples)
        return [completions[start : start + num_samples] for start in starts]

    async def abort(self, call_ids: Sequence[str] | None = None) -> int:
        """End the completions of these `generate` calls (None: every call) as they are.

        Return the number of ended completions on rank 0. The calls return, with finish reason
        "abort" for unfinished completions. Unknown calls are ignored.
        """
        self._check_serving()
        return self._queue.abort(call_ids)

    async def compute_logprobs(
        self, sequences: Sequence[np.ndarray], *, adapter: int | None = None
    ) -> list[np.ndarray]:
        """Return each sequence's logprobs at temperature 1, [T] float32 nats for [T] token ids.

        Entry 0 is 0. Sequences are scored beside running requests and before waiting ones; all
        tokens of a sequence under one version of the weights, without cached keys and values.

        Raises:
            ValueError: a sequence is empty, too long, or has a token id out of range.
            MissingAdapterError: the adapter is not loaded.
            GeneratorError: there are no weights, or the engine was closed or has failed.
        """
        self._check_serving()
        check_sequences(
            sequences, max_model_len=self.config.max_model_len, vocab_size=self._core.vocab_size
        )
        if self.world.rank != 0 or not sequences:
            return []
        self._check_weights()
        self._use_adapter(adapter)
        samples = make_scoring_samples(sequences, ids=self._ids, adapter=adapter)
        return await self._queue.submit(samples)

    async def run_between_steps(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread between two steps; on rank 0 only."""
        self._check_serving()
        assert self._thread is not None
        return await self._thread.run(function)

    async def close(self) -> None:
        """End the engine and its thread; waiting calls fail.

        Idempotent. Other ranks end after rank 0.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return

        if self._task is not None:
            self._closing = True
            self._queue.changed.set()
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)
            # While a step hangs, the thread would not come to the close.
            if self._task.done():
                await thread.run(self._core.close)
        if not await asyncio.to_thread(thread.stop, timeout_s=CLOSE_TIMEOUT_S):
            logger.warning(
                "the engine's thread was still busy %g s after the close", CLOSE_TIMEOUT_S
            )

    def _use_adapter(self, version: int | None) -> None:
        if version is not None:
            self._shelf.use(version)

    def _check_weights(self) -> None:
        if self._core.asleep:
            raise GeneratorError(
                "the generator sleeps: wake must be called, and a version pulled, first"
            )
        if self.policy_version is None and not self._pauses.bring_weights:
            raise GeneratorError("the generator has no weights: a version must be pulled first")

    async def _build_stop_check(self, texts: Sequence[str]) -> End | None:
        """Return the check for completions that spell a stop text; at first open the tokenizer."""
        if not texts:
            return None
        async with self._opening:  # calls that begin together would open one each
            if self._tokenizer is None:
                folder = Path(self._hf_assets_path)
                self._tokenizer, _ = await asyncio.to_thread(open_tokenizer, folder)
        return partial(spells_any, texts, tokenizer=self._tokenizer)

    async def _run(self, thread: WorkerThread) -> None:
        """Step the engine until it is closed or fails; then fail every waiting caller."""
        try:
            # Other ranks go on until rank 0's last turn: rank 0 may be in a turn that needs them.
            while not self._closing or self._lockstep.rank != 0:
                turn, drawn = await thread.run(self._take_turn, await self._decide())
                if drawn is not None:
                    assert self.policy_version is not None
                    self._queue.deliver(drawn, self.policy_version)
                if turn.pause is not None:
                    await self._run_pause(turn.pause, thread, refusal=turn.refusal)
                if turn.stop:
                    break

            self._fail(GeneratorError("the generator was closed"))
        except Exception as error:
            logger.exception("the generator's engine failed")
            kind = EngineTimeoutError if isinstance(error, TimeoutError) else EngineFailedError
            failure = kind(
                f"the engine of generator rank {self._lockstep.rank} failed: "
                f"{type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._fail(failure)

            # Leaving the process groups tells the other ranks, which would wait for this one.
            with contextlib.suppress(Exception):
                await thread.run(self._core.close)

    async def _decide(self) -> EngineTurn | None:
        """Wait until there is something to do and return the turn; None on ranks other than 0."""
        if self._lockstep.rank != 0:
            return None

        while not self._closing:
            await self._queue.gather(self._may_gather)
            # Cleared before queue and pauses are read, so that no later change is lost.
            self._queue.changed.clear()
            aborted = self._queue.take_aborted()

            asked = self._pauses.choose_next()
            if asked is not None:
                pause = asked.pause
                # Under drain, and before a sleep, running requests finish first.
                waits = pause.adapter is None and (self._drains or pause.version is None)
                if self._core.has_requests and waits:
                    return EngineTurn(abort=aborted, step=True)
                return self._begin_pause(asked, aborted)

            drop = self._shelf.take_unwanted(self._count_users())
            new_requests = self._queue.take_waiting()
            if new_requests or aborted or drop or self._core.has_requests:
                step = bool(new_requests) or self._core.has_requests
                return EngineTurn(admit=new_requests, abort=aborted, drop=drop, step=step)

            try:
                async with asyncio.timeout(self._lockstep.idle_turn_s):
                    await self._queue.changed.wait()
            except TimeoutError:
                return EngineTurn()  # Tells the other ranks that this rank lives.

        return EngineTurn(stop=True)

    def _begin_pause(self, asked: PauseRequest, aborted: tuple[int, ...]) -> EngineTurn:
        """Return the turn that begins a pause; one for an adapter makes room for it, if it can."""
        pause = asked.pause
        drop: tuple[int, ...] = ()
        refusal: str | None = None
        if pause.adapter is not None:
            try:
                drop = self._shelf.make_room(pause.adapter, asked.num_bytes, self._count_users())
            except AdapterRoomError as error:
                refusal = str(error)
        return EngineTurn(abort=aborted, drop=drop, pause=pause, refusal=refusal)

    def _count_users(self) -> Counter[int]:
        """Return the number of requests of each adapter, waiting or running."""
        return self._queue.count_by_adapter() + self._core.count_by_adapter()

    def _may_gather(self) -> bool:
        """Return whether only completions wait that the engine could begin, and not enough."""
        is_free = not self._core.has_requests and self._queue.has_only_completions
        is_asked = self._closing or self._pauses.choose_next() is not None
        return is_free and not is_asked and self._queue.num_waiting < self.config.max_num_seqs

    def _take_turn(self, decided: EngineTurn | None) -> tuple[EngineTurn, Drawn | None]:
        """Do what rank 0 decided; `decided` is None on other ranks."""
        turn = self._lockstep.exchange(decided)
        for request in turn.admit:
            self._core.add(request)
        self._core.abort(turn.abort)

        drawn: Drawn | None = None
        if turn.step:
            drawn = self._core.step()
        elif turn.pause is not None:
            # Tokens of a step that vLLM has begun ahead belong to the weights before the pause.
            drawn = self._core.finish_step_ahead()
        for version in turn.drop:
            self._core.drop_adapter(version)

        if drawn is not None:
            self._lockstep.record(drawn)
        return turn, drawn

    async def _run_pause(self, pause: Pause, thread: WorkerThread, *, refusal: str | None) -> None:
        """Let this rank's caller change the engine, and agree with all ranks that it is changed."""
        request = await self._pauses.wait_for_request(
            pause, rank=self._lockstep.rank, timeout_s=self._lockstep.timeout_s
        )

        if refusal is not None:
            self._pauses.remove(request)
            request.fail(AdapterRoomError(refusal))
            return

        if pause.adapter is None:
            # Until all ranks agree, the weights belong to no version.
            self.policy_version = None
        changed = await request.let_caller_change()
        everywhere = await thread.run(self._end_pause, pause, changed)

        if pause.adapter is not None:
            if everywhere:
                self._shelf.add(
                    pause.adapter, num_bytes=request.num_bytes, is_newest=pause.is_newest
                )
        elif not everywhere:
            self._queue.fail(GeneratorError(f"{pause} failed"))
        elif pause.version is None:
            self._queue.fail(GeneratorError("the generator went to sleep"))
        else:
            self.policy_version = pause.version  # Requests go on, with the new weights.

        # Removed only now: until here a failure of the loop has to reach the caller.
        self._pauses.remove(request)
        request.end(everywhere=everywhere)

    def _end_pause(self, pause: Pause, changed: bool) -> bool:
        """Return whether all ranks succeeded, and prepare the engine for the next step."""
        everywhere = self._lockstep.all_agree(changed)
        if pause.adapter is not None:
            if everywhere and pause.is_newest:
                self._core.follow_adapter(pause.adapter)
            elif changed and not everywhere:
                self._core.drop_adapter(pause.adapter)
            return everywhere
        if not everywhere:
            self._core.abort_all()
        # Also after a failure: some weights may be written, and their old cache must not stay.
        if pause.version is not None:
            self._core.weights_changed()
        return everywhere

    def _fail(self, failure: GeneratorError) -> None:
        self._failure = failure
        self._queue.fail(failure)
        self._pauses.fail(failure)

    def _build(self) -> tuple[VLLMCore, Lockstep]:
        """Build the engine in its thread, which from here on is the only one to touch vllm."""
        os.environ.update(ENVIRONMENT)
        if self._model_spec.batch_invariant and torch.cuda.is_available():
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        with disable_collections():
            from actors.vllm.core import VLLMCore  # Reads the variables when it is imported.

            core = VLLMCore(
                config=self.config,
                model_spec=self._model_spec,
                hf_assets_path=self._hf_assets_path,
                world=self.world,
            )
        lockstep = Lockstep(
            rank=self.world.rank, size=self.world.size, timeout_s=self.config.rank_timeout_s
        )

        # The first steps allocate, and on a GPU compile; calls should not wait for that.
        core.add(Request(id=-1, prompt=np.zeros(1, dtype=np.int32), max_tokens=1))
        while core.has_requests:
            core.step()
        core.weights_changed()
        return core, lockstep
