"""vLLM's engine core of one rank, called from one thread.

vLLM's outer engine (`LLMEngine`) turns every token of every request into an output object with
text, logprob dictionaries and statistics. Here its core is driven directly, in this process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequest

from actors.vllm.compat import (
    adapt_vllm,
    call_before_forwards,
    count_steps_ahead,
    get_model_runner,
    make_client,
    set_rank_timeout,
    shorten_allocation,
)
from actors.vllm.config import CPU_BLOCK, GeneratorConfig
from actors.vllm.model import VLLMPolicy, register_policy
from actors.vllm.requests import Drawn, Request
from actors.vllm.sampler import PolicySampler
from rl.distributed.process_group import World
from rl.distributed.sharding import local_tensor
from rl.models.batch_invariant.probe import check_machine, has_equal_bits
from rl.models.files.hf import read_hf_config
from rl.models.lora import LoRA
from rl.models.low_rank.layer import Factors
from rl.models.low_rank.shapes import KnownShapes
from rl.models.low_rank.types import NONE, Bank
from rl.models.spec import ModelSpec
from rl.types import FinishReason
from rl.utils.load import ComputeThreads
from rl.utils.processes import use_threads

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
START_TIMEOUT_S = 300
"""Longest time for all ranks to appear and load the model."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """An adapter on its way into the engine."""

    tensors: dict[str, Tensor]
    """This rank's factors by the trainer's names, as `WeightStore.pull` fills them."""
    factors: dict[str, Factors]
    """The same by layer."""
    num_bytes: int
    """Memory that it will take."""


class VLLMCore:
    """One rank's engine; only the thread that builds the engine may use it."""

    def __init__(
        self, *, config: GeneratorConfig, model_spec: ModelSpec, hf_assets_path: str, world: World
    ) -> None:
        self._config = config
        adapt_vllm()
        use_threads(config.num_threads)
        model_config: Any = model_spec.adapter.config_from_hf(read_hf_config(hf_assets_path))
        is_safe = _find_thread_check(config, model_spec=model_spec, model=model_config)
        self._threads = ComputeThreads(
            config.num_threads, is_safe=is_safe if config.follow_load else None
        )
        architecture = register_policy(model_spec)
        arguments = build_engine_args(
            config, model=model_config, architecture=architecture, hf_assets_path=hf_assets_path
        )
        self._client = make_client(arguments.create_engine_config(), world=world)
        if world.size > 1:
            # Only now: ranks may load at different speeds, and wait for each other longer.
            set_rank_timeout(config.rank_timeout_s)

        shorten_allocation(self._client)
        runner = get_model_runner(self._client)
        self._sampler = PolicySampler(runner)
        runner.sampler = self._sampler
        self._policy: VLLMPolicy = runner.model
        self.model = self._policy.model
        self._buffer_names: tuple[str, ...] = self._policy.buffer_names
        self.vocab_size: int = self.model.config.vocab_size

        self._on_update = config.on_update
        self._scheduler: Any = self._client.engine_core.scheduler
        self._running: dict[int, Request] = {}
        self._num_updates = 0

        self._adapters: dict[int, int] = {}
        """Adapters of the requests that have one, which do not change while they run."""
        self._loads: dict[int, int] = {}
        """The load that brought each adapter, by number: a version may come again with other
        bits."""
        self._num_loads = 0
        self._newest_adapter: int | None = None
        """Adapter of requests that ask for none; None: the weights alone."""
        self._shapes = KnownShapes(model_spec, mesh=self._policy.tp_mesh)
        call_before_forwards(runner, self._assign_adapters)

        self._caches: list[Tensor] = list(runner.kv_caches)
        self._cache_is_tainted = False
        """True after a request with NaN logprobs has written keys and values."""
        self._lent = [local_tensor(tensor) for tensor in (*self.model.parameters(), *self._caches)]
        """Tensors whose memory is given back while the engine sleeps; they and their views stay."""
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in self._lent]
        self.asleep = False

    @property
    def has_requests(self) -> bool:
        return bool(self._running)

    def get_weights(self) -> dict[str, Tensor]:
        """Return this rank's parameters and persistent buffers by the trainer's names.

        They are the tensors that the engine computes with, not copies: relay's own Decoder runs
        inside vLLM (model.py). On a CPU, linear layers multiply with reordered copies, which
        `weights_changed` makes anew. With tensor parallelism sharded parameters are DTensors.
        """
        parameters = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return parameters | {name: self.model.get_buffer(name) for name in self._buffer_names}

    # Adapters beside the weights

    def prepare_adapter(self, lora: LoRA.Config) -> Adapter:
        """Return an adapter with these settings to be filled.

        Raises ValueError as `LoRA`, or for an engine with CUDA graphs, which leave products out.
        """
        weight = local_tensor(self.model.embed_tokens.weight)
        self._config.check_adapters(on_gpu=weight.device.type != "cpu")
        shapes = self._shapes.find(lora)
        tensors = shapes.allocate(weight.dtype, device=weight.device)
        factors = shapes.read(tensors)
        return Adapter(
            tensors=tensors, factors=factors, num_bytes=self.adapters.count_bytes(factors)
        )

    @property
    def adapters(self) -> Bank:
        """The adapters that are loaded."""
        return self._policy.use_adapters()

    def load_adapter(self, version: int, adapter: Adapter) -> None:
        """Add an adapter between two steps, which no request uses yet."""
        self.adapters.load(version, adapter.factors)
        self._num_loads += 1
        self._loads[version] = self._num_loads

    def follow_adapter(self, version: int) -> None:
        """Give an adapter to requests that name none and have not begun; those that run keep
        theirs.
        """
        self._newest_adapter = version
        for waiting in self._scheduler.waiting:
            request = self._running[int(waiting.request_id)]
            # Preempted requests wait too, and have begun.
            if request.adapter is None and waiting.num_output_tokens == 0:
                self._adapters[request.id] = version
                self._salt(waiting, request.id)

    def drop_adapter(self, version: int) -> None:
        """Free an adapter that no request uses."""
        users = [request for request, used in self._adapters.items() if used == version]
        assert not users, f"requests {users} use adapter {version}"
        self.adapters.drop(version)
        del self._loads[version]
        if self._newest_adapter == version:
            self._newest_adapter = None

    def count_by_adapter(self) -> Counter[int]:
        """Return the number of running and waiting requests of each adapter."""
        return Counter(self._adapters.values())

    def _assign_adapters(self, request_ids: Sequence[str], num_rows_S: np.ndarray) -> None:
        if self._adapters:
            versions = [self._adapters.get(int(request_id), NONE) for request_id in request_ids]
            self._policy.assign_adapters(np.repeat(versions, num_rows_S))

    def add(self, request: Request) -> None:
        version = self._newest_adapter if request.adapter is None else request.adapter
        if version is not None and version not in self.adapters.versions:
            raise ValueError(f"adapter {version} is not loaded")
        if version is not None:
            self._adapters[request.id] = version
        self._sampler.add(request)
        self._running[request.id] = request
        # A scored sequence takes one step, and its caller waits for it.
        self._enqueue(request, first=request.scored is not None)

    def abort(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            # A request may have ended by itself since its caller cancelled it.
            if request_id not in self._running:
                continue
            # One by one: vLLM orders several ids differently on each rank.
            self._client.abort_requests([str(request_id)])
            self._end(request_id)

    def abort_all(self) -> None:
        self.abort(list(self._running))

    def step(self) -> Drawn:
        """Make one engine step, in which some requests may get no token.

        On a GPU vLLM begins the next step before it waits for this one.
        """
        drawn = Drawn()
        adapters = self._adapters.copy()  # Requests that end in this step are forgotten below.
        with self._threads.work():
            outputs = self._client.get_output().outputs
        # After the output, whose wait also brings the logprobs of the step from the GPU.
        logprobs = self._sampler.take_logprobs(num_ahead=count_steps_ahead(self._client))

        for output in outputs:
            request_id = int(output.request_id)
            if output.new_prompt_logprobs_tensors is not None:
                scored = output.new_prompt_logprobs_tensors.logprobs[:, 0].numpy()
                drawn.prompt_logprobs[request_id] = scored
                if np.isnan(scored).any():
                    drawn.diverged.add(request_id)

            if output.finish_reason is not None:
                drawn.finished[request_id] = _FINISH_REASONS[str(output.finish_reason)]
                self._end(request_id)

            if output.new_token_ids:
                logprob = logprobs[output.request_id]
                drawn.tokens.append((request_id, output.new_token_ids[0], logprob))
                if request_id in adapters:
                    drawn.adapters[request_id] = adapters[request_id]
                if math.isnan(logprob):
                    drawn.diverged.add(request_id)

        self._cache_is_tainted |= bool(drawn.diverged)
        return drawn

    def finish_step_ahead(self) -> Drawn | None:
        """Return the tokens of a step that has begun and not ended, None if there is none."""
        if not count_steps_ahead(self._client):
            return None
        # A step begins the next before it waits; paused, the scheduler has nothing to begin.
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            return self.step()
        finally:
            self._scheduler.set_pause_state(PauseState.UNPAUSED)

    def weights_changed(self) -> None:
        """Adapt kernels, prefix cache and requests to new weights, between two steps.

        A request that starts from here on reads no key or value of older weights. Requests that
        have tokens already keep theirs, unless `on_update` is "recompute".
        """
        self._policy.pack_weights()
        # Part of the salt: a request that is enqueued from here on finds no older block.
        self._num_updates += 1

        self._reset_prefix_cache()
        self._zero_tainted_cache()

        at_prompt = self._abort_requests_at_prompt()
        self._salt_waiting_requests()
        # Backwards, as each goes to the front: they keep their order, before all that wait.
        for request in reversed(at_prompt):
            self._enqueue(request, first=True)

    def _reset_prefix_cache(self) -> None:
        """Drop the cached blocks; under "keep" they stay while requests run, hidden by the salt."""
        if self._on_update == "recompute":
            # Running requests wait again, and compute the keys and values of their tokens anew.
            self._client.reset_prefix_cache(reset_running_requests=True)
        elif not self._running and not self._client.reset_prefix_cache():
            raise RuntimeError(
                "the prefix cache was not reset: some of its blocks are still in use"
            )

    def _zero_tainted_cache(self) -> None:
        if self._cache_is_tainted and not self._running:
            # A kernel may multiply the old content of a block by 0, and NaN * 0 is NaN.
            for cache in self._caches:
                cache.zero_()
            self._cache_is_tainted = False

    def _abort_requests_at_prompt(self) -> list[Request]:
        """End the running requests that have no token yet, and return them to be started again."""
        ids: list[str] = []
        for running in self._scheduler.running:
            if running.num_output_tokens == 0:
                ids.append(running.request_id)

        for request_id in ids:
            self._client.abort_requests([request_id])
        return [self._running[int(request_id)] for request_id in ids]

    def _salt_waiting_requests(self) -> None:
        """Give waiting requests, which have no computed tokens, the new salt."""
        for waiting in self._scheduler.waiting:
            self._salt(waiting, int(waiting.request_id))

    def _salt(self, waiting: Any, request_id: int) -> None:
        waiting.cache_salt = self._get_salt(request_id)
        waiting.block_hashes = []
        waiting.update_block_hashes()

    def _get_salt(self, request_id: int) -> str:
        """Return part of the hash of a request's blocks: it finds none of other weights."""
        version = self._adapters.get(request_id, NONE)
        return f"{self._num_updates} {self._loads.get(version, 0)}"

    def _enqueue(self, request: Request, *, first: bool) -> None:
        sampling = request.sampling
        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=list(sampling.stop_token_ids),
            prompt_logprobs=None if request.scored is None else 0,
            detokenize=False,
        )
        self._client.add_request(
            EngineCoreRequest(
                request_id=str(request.id),
                prompt_token_ids=request.prompt.tolist(),
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                # Used for vLLM's statistics only; it must be equal on all ranks.
                arrival_time=0.0,
                lora_request=None,
                cache_salt=self._get_salt(request.id),
                data_parallel_rank=None,
            )
        )
        if first:
            waiting = self._scheduler.waiting
            waiting.prepend_request(waiting.pop())

    def set_asleep(self, asleep: bool) -> None:
        """Give back the memory of weights and cache, or take it again, while nothing is running."""
        if asleep == self.asleep:
            return
        if asleep and self._policy.bank is not None:
            # They come with the weights, which are pulled again.
            for version in list(self._policy.bank.versions):
                self.drop_adapter(version)
        if not current_platform.is_cpu():
            # Level 2 keeps no copy of the weights: they come with the next update.
            engine: Any = self._client.engine_core
            engine.sleep(level=2) if asleep else engine.wake_up()
        else:
            # The blocks lose their content, so that later prompts must not find them.
            self._client.reset_prefix_cache()
            self._policy.unpack_weights()
            for tensor, size in zip(self._lent, self._sizes, strict=True):
                tensor.untyped_storage().resize_(0 if asleep else size)
                if not asleep:
                    tensor.zero_()
        self.asleep = asleep

    def close(self) -> None:
        self._client.shutdown()

    def _end(self, request_id: int) -> None:
        self._running.pop(request_id, None)
        self._adapters.pop(request_id, None)
        self._sampler.remove(str(request_id))


def _find_thread_check(
    config: GeneratorConfig, *, model_spec: ModelSpec, model: Any
) -> Callable[[], bool] | None:
    """Return what tells whether the number of threads may follow the load; None: it may not.

    Raises ValueError if this machine cannot keep what the batch-invariant mode promises.
    """
    if not current_platform.is_cpu():
        return None
    if model_spec.batch_invariant:
        products: dict[str, Any] = {
            "dtype": getattr(torch, config.dtype),
            "max_rows": config.max_num_batched_tokens,
            "tensor_parallel_degree": config.tensor_parallel_degree,
            "float32_head": model_spec.float32_head,
        }
        # Before vLLM starts, which fixes the number of threads of its process.
        check_machine(model, **products)
        return partial(has_equal_bits, model, num_threads=config.num_threads, **products)
    # Bits depend on the batch anyway. But tensor-parallel ranks must draw the same tokens.
    return (lambda: True) if config.tensor_parallel_degree == 1 else None


def build_engine_args(
    config: GeneratorConfig, *, model: Any, architecture: str, hf_assets_path: str
) -> EngineArgs:
    """Return vLLM's settings for an engine without text, statistics and weights of its own."""
    platform: dict[str, Any] = {
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enable_sleep_mode": config.can_sleep,
        "enforce_eager": config.enforce_eager,
        # The next step is scheduled while the GPU computes; it takes the drawn tokens where they
        # are.
        "async_scheduling": True,
    }
    if current_platform.is_cpu():
        platform = {
            "kv_cache_memory_bytes": config.count_cpu_cache_bytes(model),
            "block_size": CPU_BLOCK,
            "enforce_eager": True,
            "async_scheduling": False,
        }

    has_one_rank = config.tensor_parallel_degree == 1
    return EngineArgs(
        model=hf_assets_path,
        config_format="hf",
        # The trainer's weights are not quantized, also if those in the folder are.
        hf_overrides={"architectures": [architecture], "quantization_config": None},
        load_format="relay_store",
        use_tqdm_on_load=False,
        # The request gives all sampling settings, and text is not made here.
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        dtype=config.dtype,
        seed=config.seed,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        tensor_parallel_size=config.tensor_parallel_degree,
        distributed_executor_backend="uni" if has_one_rank else "external_launcher",
        distributed_timeout_seconds=START_TIMEOUT_S,
        cpu_distributed_timeout_seconds=START_TIMEOUT_S,
        disable_log_stats=True,
        **platform,
    )
