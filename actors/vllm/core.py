"""The part of a generator that knows vLLM: one rank's engine core, called from one thread.

vLLM's outer engine (`LLMEngine`) turns every token of every request into an output object with
text, logprob dictionaries and statistics. Here its core is driven directly, in this process, by
the same client that the outer engine uses.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed import cleanup_dist_env_and_memory, get_tp_group
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from actors.vllm.invariant import check_generators_machine
from actors.vllm.lockstep import Drawn, Request
from actors.vllm.memory import CPU_BLOCK, GIB, LentMemory
from actors.vllm.model import FROM_STORE, register_policy
from actors.vllm.sampler import PolicySampler
from actors.vllm.scheduler import DecodeScheduler
from rl.distributed.process_group import World
from rl.distributed.threads import use_threads
from rl.models.spec import ModelSpec
from rl.types import FinishReason

if TYPE_CHECKING:
    from actors.vllm.engine import GeneratorEngine

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
START_TIMEOUT_S = 300
"""For all ranks to appear and to load the model."""


class VLLMCore:
    """Builds the engine of this rank in the calling thread, which must be the one that uses it."""

    def __init__(
        self,
        *,
        config: GeneratorEngine.Config,
        model_spec: ModelSpec,
        hf_assets_path: str,
        world: World,
    ) -> None:
        _quieten()
        use_threads(config.num_threads)
        check_generators_machine(config, model_spec=model_spec, hf_assets_path=hf_assets_path)
        vllm_config = engine_args(
            config, architecture=register_policy(model_spec), hf_assets_path=hf_assets_path
        ).create_engine_config()
        if world.size == 1 and current_platform.is_cpu() and not dist.is_initialized():
            # vLLM's own is over a file in /tmp, which a killed process leaves behind.
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        set_num_threads = torch.set_num_threads
        try:
            self._client = InprocClient(vllm_config, _executor_class(vllm_config, world), log_stats=False)
        except BaseException:
            # Otherwise the next engine of this process finds half of this one.
            cleanup_dist_env_and_memory()
            raise
        finally:
            # On a CPU vLLM puts a function there that does nothing, for the rest of the process.
            torch.set_num_threads = set_num_threads
        if world.size > 1:
            _set_rank_timeout(config.rank_timeout_s)
        runner = self._client.engine_core.model_executor.driver_worker.worker.model_runner
        self._sampler = PolicySampler(runner)
        runner.sampler = self._sampler
        self.model = runner.model.model
        self._buffer_names: tuple[str, ...] = runner.model.buffer_names
        self.vocab_size: int = self.model.config.vocab_size
        self._on_update = config.on_update
        self._scheduler: Any = self._client.engine_core.scheduler
        self._running: dict[int, Request] = {}
        self._num_updates = 0
        self._caches: list[Tensor] = list(runner.kv_caches)
        self._cache_is_tainted = False
        self._memory = LentMemory([*self.model.parameters(), *self._caches])
        self.asleep = False

    @property
    def has_requests(self) -> bool:
        return bool(self._running)

    def weights(self) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers by the trainer's names, to be written in place;
        DTensors where sharded."""
        parameters = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return parameters | {name: self.model.get_buffer(name) for name in self._buffer_names}

    def add(self, request: Request) -> None:
        """Takes part in steps from the next one on; a sequence to be scored as soon as there is a place."""
        self._sampler.add(request)
        self._running[request.id] = request
        # A scored one takes a step, and who asks for it waits before going on.
        self._enqueue(request, first=request.scored is not None)

    def abort(self, request_ids: Iterable[int]) -> None:
        """Ids that have ended already are ignored."""
        for request_id in [i for i in request_ids if i in self._running]:
            # One by one: given several, vLLM goes through them in an order that differs between ranks.
            self._client.abort_requests([str(request_id)])
            self._end(request_id)

    def abort_all(self) -> None:
        self.abort(list(self._running))

    def step(self) -> Drawn:
        """One forward of every running request, as far as they fit; some may get no token."""
        drawn = Drawn(request_ids=[], token_ids=[], logprobs=[], finished={})
        outputs = self._client.get_output().outputs
        logprobs = self._sampler.drawn_logprobs() if outputs else {}
        for output in outputs:
            request_id = int(output.request_id)
            if output.new_prompt_logprobs_tensors is not None:
                drawn.prompt_logprobs[request_id] = output.new_prompt_logprobs_tensors.logprobs[:, 0].numpy()
            if output.finish_reason is not None:
                drawn.finished[request_id] = _finish_reason(output)
                self._end(request_id)
            if output.new_token_ids:
                drawn.request_ids.append(request_id)
                drawn.token_ids.append(output.new_token_ids[0])
                drawn.logprobs.append(logprobs[output.request_id])
        own = zip(drawn.request_ids, drawn.logprobs, strict=True)
        drawn.diverged.update(request_id for request_id, logprob in own if math.isnan(logprob))
        scored = drawn.prompt_logprobs.items()
        drawn.diverged.update(request_id for request_id, logprobs in scored if np.isnan(logprobs).any())
        self._cache_is_tainted |= bool(drawn.diverged)
        return drawn

    def weights_changed(self) -> None:
        """Between two steps, after the weights were written: what they mean for requests and cache.

        The prefix cache never mixes weights. Under "keep" blocks in use cannot be dropped from it, so
        requests look for blocks by the number of updates at their start; those that run go on with the
        blocks they have, of which later requests will find none.
        """
        self._num_updates += 1
        if self._on_update == "recompute":
            self._client.reset_prefix_cache(reset_running_requests=True)
        elif not self._running and not self._client.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not reset: some of its blocks are still in use")
        if self._cache_is_tainted and not self._running:
            # A kernel may multiply what a block held before by 0, which of NaN is NaN.
            for cache in self._caches:
                cache.zero_()
            self._cache_is_tainted = False
        # Those that are still at their prompt begin it again: nothing of them is drawn yet.
        at_prompt = [r.request_id for r in self._scheduler.running if r.num_output_tokens == 0]
        for request_id in at_prompt:
            self._client.abort_requests([request_id])
        # They have computed nothing yet, or nothing any more.
        for waiting in self._scheduler.waiting:
            waiting.cache_salt = self._salt
            waiting.block_hashes = []
            waiting.update_block_hashes()
        for request_id in reversed(at_prompt):
            self._enqueue(self._running[int(request_id)], first=True)

    @property
    def _salt(self) -> str:
        return str(self._num_updates)

    def _enqueue(self, request: Request, *, first: bool) -> None:
        self._client.add_request(
            EngineCoreRequest(
                request_id=str(request.id),
                prompt_token_ids=request.prompt.tolist(),
                mm_features=None,
                sampling_params=_sampling_params(request),
                pooling_params=None,
                # Only for vLLM's own statistics, and to be the same on all ranks.
                arrival_time=0.0,
                lora_request=None,
                cache_salt=self._salt,
                data_parallel_rank=None,
            )
        )
        if first:
            waiting = self._scheduler.waiting
            waiting.prepend_request(waiting.pop())

    def rest(self, *, asleep: bool) -> None:
        """Give back the memory of weights and cache, or take it again. Only when nothing is running."""
        if asleep == self.asleep:
            return
        if not current_platform.is_cpu():
            # Level 2 keeps no copy of the weights: they come with the next update.
            engine = self._client.engine_core
            engine.sleep(level=2) if asleep else engine.wake_up()
        elif asleep:
            self._client.reset_prefix_cache()
            self._memory.give_back()
        else:
            self._memory.take()
        self.asleep = asleep

    def close(self) -> None:
        self._client.shutdown()

    def _end(self, request_id: int) -> None:
        self._running.pop(request_id, None)
        self._sampler.remove(str(request_id))


def engine_args(config: GeneratorEngine.Config, *, architecture: str, hf_assets_path: str) -> EngineArgs:
    """vLLM's settings for ours."""
    platform: dict[str, Any] = {
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "block_size": config.block_size,
        "enable_sleep_mode": config.can_sleep,
    }
    if current_platform.is_cpu():
        platform = {
            "kv_cache_memory_bytes": int(config.cpu_kv_cache_gib * GIB),
            "block_size": config.block_size or CPU_BLOCK,
        }
    return EngineArgs(
        model=hf_assets_path,
        hf_overrides={"architectures": [architecture]},
        load_format=FROM_STORE if config.initial_weights == "store" else "safetensors",
        use_tqdm_on_load=False,
        # Sampling is what the request says, and text is not made here.
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        dtype=config.dtype,
        seed=config.seed,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        enforce_eager=config.enforce_eager,
        tensor_parallel_size=config.tensor_parallel_degree,
        distributed_executor_backend="uni" if config.tensor_parallel_degree == 1 else "external_launcher",
        distributed_timeout_seconds=START_TIMEOUT_S,
        cpu_distributed_timeout_seconds=START_TIMEOUT_S,
        # The sampler reads the number of tokens each request has, which must be that of this step.
        async_scheduling=False,
        scheduler_cls=DecodeScheduler,
        disable_log_stats=True,
        **platform,
    )


def _executor_class(vllm_config: VllmConfig, world: World) -> type[Executor]:
    if world.size == 1:
        return Executor.get_class(vllm_config)

    class RankExecutor(ExecutorWithExternalLauncher):
        """One rank among processes that somebody else has started."""

        def _distributed_args(self) -> tuple[str, int, int]:
            # From the end of the address vLLM makes the name of a shared memory for collectives on a
            # CPU, which our model does not use and which a killed process leaves behind. With a name
            # of its own on each rank it is not made; PyTorch ignores the query.
            address = f"tcp://{world.master_addr}:{world.master_port}?own={world.rank}"
            return address, world.rank, world.local_rank

    return RankExecutor


def _set_rank_timeout(timeout_s: float) -> None:
    """Of collectives from now on; until now ranks waited for each other to import and load."""
    group = get_tp_group()
    for process_group in (None, group.device_group, group.cpu_group):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), process_group)


def _finish_reason(output: EngineCoreOutput) -> FinishReason:
    reason = str(output.finish_reason)
    if reason not in _FINISH_REASONS:
        raise RuntimeError(f"vLLM ended request {output.request_id} with {reason!r}")
    return _FINISH_REASONS[reason]


def _sampling_params(request: Request) -> SamplingParams:
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop_token_ids=list(request.stop_token_ids),
        prompt_logprobs=None if request.scored is None else 0,
        detokenize=False,
    )


def _has_attribute(value: object, name: str) -> bool:
    """Of its own: of what stands for something else (flask's `request`, llvmlite's library) the builtin
    function asks that other thing, which may raise, or have every name."""
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True


# With it vLLM looks at everything that any loaded module holds, when an engine starts.
dispatcher.hasattr = _has_attribute


def _quieten() -> None:
    # On a failed step vLLM logs its whole input, about 100 kB; the error itself is raised.
    logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
