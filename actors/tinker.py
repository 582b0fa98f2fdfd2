"""The Tinker backend over actors: a trainer of any layout, and vLLM generators.

All models in training are in the trainer's processes; those with LoRA share the base's frozen
weights. A snapshot is a version in the weight store: an adapter, which a generator loads beside the
base with the first request for it, or the whole weights of a model without adapters, which all
generators pull when its turn comes. All hosts of the trainer need to see the folders that models
are saved in.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from monarch.actor import ActorError, concurrent_endpoint

from actors.cluster.clients import GeneratorClient, TrainerClient
from actors.cluster.cluster import Cluster, start_cluster
from actors.cluster.group import ActorGroup
from actors.config import ClusterConfig, LaunchConfig, RecoveryConfig, Timeouts
from actors.generator import VLLMGenerator
from actors.launch.calls import ActorCallError, ActorLostError
from actors.launch.cleanup import guard_temporary_files
from actors.launch.launcher import Launcher
from actors.launch.member import LogSettings
from actors.launch.placement import count_gpus, place_actors, trains_on_gpu
from actors.reward import RewardActor
from actors.trainer import PolicyTrainer
from actors.vllm.adapters import AdapterRoomError, MissingAdapterError
from actors.vllm.requests import SMALLEST_TEMPERATURE, DivergedError
from rl.config.rules import check_rules, select_rules
from rl.config.tree import name_as_options
from rl.models.generate import PromptLogprobs
from rl.models.lora import LoRA
from rl.observability.console import print_line
from rl.observability.spans import span
from rl.run_rules import RULES
from rl.tinker.backend import TinkerBackend, TinkerWorkers
from rl.tinker.base_model import BaseModelFolder
from rl.tinker.types import LimitReachedError
from rl.training.checks import list_trainer_checks
from rl.training.engine import TrainingEngine
from rl.training.models_by_id import KEEPER, ModelError, TrainedModels, check_config
from rl.types import BASE, Completion, SamplingParams
from rl.utils.files import make_folder, make_temporary_folder, remove_leftovers
from rl.weights.store import WeightStore
from rl.weights.types import SharedMemoryError, WeightStoreError

T = TypeVar("T")

ROOM_S = 60.0
"""Longest wait of an adapter until the requests of others have ended, so that it has room."""
ROOM_LOOK_S = 0.2
"""Time between two tries to load an adapter without room."""
MAX_LOADS = 5
"""Times that an adapter is loaded for one request, if others take its room again and again."""


class TinkerTrainer(PolicyTrainer):
    """A trainer of models by id, none at the start, instead of the one model of a run."""

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyTrainer.Config):
        pass

    _models: TrainedModels | None = None
    """None until `setup`."""

    @property
    def models(self) -> TrainedModels:
        if self._models is None:
            raise RuntimeError("the trainer is not set up: call setup first")
        return self._models

    def find_engine(self, model_id: str) -> TrainingEngine:
        return self.models[model_id]

    @concurrent_endpoint
    @span("create_model")
    async def create_model(self, model_id: str, lora: LoRA.Config | None) -> None:
        await self._compute(self.models.create, model_id, lora)

    @concurrent_endpoint
    @span("delete_model")
    async def delete_model(self, model_id: str) -> None:
        await self._change_weights(self.models.delete, model_id)

    @concurrent_endpoint
    @span("save")
    async def save_model(self, model_id: str, folder: str, optimizer: bool) -> None:
        await self._compute(partial(self.models.save, optimizer=optimizer), model_id, folder)

    @concurrent_endpoint
    @span("load")
    async def load_model(self, model_id: str, folder: str, optimizer: bool) -> None:
        await self._change_weights(partial(self.models.load, optimizer=optimizer), model_id, folder)

    def _open(self, hf_assets_path: str) -> None:
        self._models = TrainedModels(
            self.config, spec=self.model_spec, hf_assets_path=hf_assets_path
        )

    def _close(self) -> None:
        self.models.close()


class ActorBackend(TinkerBackend):
    """Backend of a process that has no other actors."""

    @dataclass(kw_only=True, slots=True)
    class Config(TinkerBackend.Config):
        """Settings of trainer, generators and weight store behind a Tinker server."""

        trainer: TinkerTrainer.Config = field(default_factory=TinkerTrainer.Config)
        """Layout, dtypes and sizes of micro-batches of every model in training. Clipping is up to
        the client.
        """
        generator: VLLMGenerator.Config = field(
            default_factory=lambda: VLLMGenerator.Config(dtype="float32", max_model_len=1024)
        )
        """Its `max_model_len` is the context that is offered, for training too; `base` has the
        largest rank of adapters."""
        weights: WeightStore.Config = field(
            default_factory=lambda: WeightStore.Config(keep_versions=16)
        )
        """Its `keep_versions` is the largest number of snapshots of models that train all
        parameters, whole models each. Snapshots of adapters are limited by memory alone.
        """
        timeouts: Timeouts = field(default_factory=lambda: Timeouts(close_s=5.0))
        launch: LaunchConfig = field(default_factory=LaunchConfig)
        log_folder: str | None = None
        """Folder of the actors' logs; None keeps none."""

    def __init__(self, *, config: Config) -> None:
        super().__init__(config=config)
        self.config = config
        if not isinstance(config.trainer, TinkerTrainer.Config):
            raise ValueError(
                f"trainer={type(config.trainer).__qualname__}: must be TinkerTrainer.Config"
            )
        check_config(config.trainer)
        check_rules(config, select_rules(RULES, "launch"))
        if config.launch.share_gpus:
            raise ValueError(
                "launch.share_gpus=True: must be False, as models train while others are sampled "
                "from; give trainer and generators devices of their own"
            )
        if config.generator.can_sleep:
            raise ValueError(
                "generator.can_sleep=True: must be False, as sessions sample at any time"
            )
        if (
            config.weights.transport == "files"
            and config.launch.on_cluster
            and config.log_folder is None
        ):
            raise ValueError(
                f"weights.transport='files' with launch.hosts={config.launch.hosts!r} and "
                "log_folder=None: set log_folder to a folder that all hosts share, where the files "
                "lie"
            )
        self._cluster = ClusterConfig(
            trainer=config.trainer,
            # A model that a client may train is one that generators serve.
            generator=replace(config.generator, max_lora_rank=config.base.max_lora_rank),
            reward=RewardActor.Config(num_procs=0),
            timeouts=config.timeouts,
            launch=config.launch,
            # Models live in the trainer's memory, so nothing is restarted.
            recovery=RecoveryConfig(max_restarts=0),
        )
        place_actors(self._cluster, num_gpus=count_gpus())

    def _open_base(self) -> BaseModelFolder:
        config, trainer = self.config, self.config.trainer
        base: BaseModelFolder = config.base.build(
            training=trainer.training, cache=config.cache, context=config.generator.max_model_len
        )
        spec = base.spec
        with name_as_options("trainer", trainer):
            device_type = "cuda" if trains_on_gpu(config.launch, num_gpus=count_gpus()) else "cpu"
            for check in list_trainer_checks(
                trainer, spec, world_size=trainer.num_procs, device_type=device_type
            ):
                check()
        config.generator.check_model(spec.model)
        config.generator.check_adapters(on_gpu=device_type == "cuda")
        base.info = replace(
            base.info, min_temperature=SMALLEST_TEMPERATURE, topk_prompt_logprobs=False
        )
        return base

    async def _start_workers(self, base: BaseModelFolder) -> TinkerWorkers:
        if Launcher.current is not None:
            raise RuntimeError("this process has actors already: close what runs them first")
        config, resources = self.config, ExitStack()
        if not config.launch.on_cluster:
            resources.enter_context(guard_temporary_files())
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="relay-tinker-")))
        logs = (
            Path(config.log_folder).expanduser().absolute()
            if config.log_folder
            else folder / "logs"
        )
        launcher = Launcher()
        try:
            make_folder(logs, "the folder of the logs")
            remove_leftovers(logs)
            # Other hosts see the folder of the logs, which servers may share.
            weights = resources.enter_context(make_temporary_folder(logs / "weights"))
            store: WeightStore = config.weights.build(
                dtype=config.generator.dtype, run_folder=weights
            )
            cluster = await start_cluster(
                self._cluster,
                launcher=launcher,
                model_spec=base.spec,
                hf_assets_path=str(base.folder),
                store=store,
                logs=LogSettings(folder=logs, console_level="WARNING"),
                trainer_arguments={"model_spec": base.spec},
            )
            # The first line on stdout is the address.
            print_line(cluster.network, stream=sys.stderr)
        except BaseException:
            # No caller has workers to close yet.
            with resources:
                await launcher.stop_all()
            raise
        workers = ActorWorkers(cluster, resources=resources)
        if not count_gpus():
            # Of a GPU only the engine knows the room for keys and values.
            num_tokens = config.generator.count_cpu_cache_tokens(base.spec.model)
            workers.tokens_per_sequence = num_tokens / config.generator.max_num_seqs
        return workers


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Turn errors of a request that leave the generator alive into those that end nothing else."""
    try:
        yield
    except DivergedError as error:
        raise ModelError(f"the sampler's weights have diverged: {error}") from error
    except ActorCallError as error:
        if isinstance(error.__cause__, ActorError) and not isinstance(error, ActorLostError):
            raise RuntimeError(str(error)) from error
        raise


@dataclass(kw_only=True, slots=True, eq=False)
class _Sampler:
    """A generator, and the adapters that it was given."""

    group: ActorGroup
    client: GeneratorClient
    num_running: int = 0
    """Sequences that were sent to it."""
    loads: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Loads of adapters by version, ended or under way. The generator drops adapters by itself."""
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the load that waits for room: later ones do not overtake it."""


class ActorWorkers(TrainerClient, TinkerWorkers):
    """The actors of a cluster: a `TinkerTrainer`, called as by a run's `TrainerClient`, and
    generators.
    """

    def __init__(self, cluster: Cluster, *, resources: ExitStack) -> None:
        """`resources` are closed after the actors."""
        super().__init__(cluster.trainer)
        self._cluster = cluster
        self._resources = resources
        self._pool = cluster.pool
        self._samplers: list[_Sampler] = []
        for member in cluster.pool.members:
            self._samplers.append(_Sampler(group=member, client=GeneratorClient(member)))
        self.num_sequences = cluster.config.generator.max_num_seqs * len(self._samplers)
        self._numbers = itertools.count(1)
        self._whole_models: set[str] = set()
        """Models that train all parameters."""
        self._whole: set[int] = set()
        """Versions of such models."""
        self._adapters: set[int] = set()

    async def create_model(self, model_id: str, lora: LoRA.Config | None) -> None:
        await self.trainer.call(TinkerTrainer.create_model, model_id, lora, timeout="setup_s")
        if lora is None:
            self._whole_models.add(model_id)

    async def delete_model(self, model_id: str) -> None:
        await self.trainer.call(TinkerTrainer.delete_model, model_id, timeout="train_s")
        self._whole_models.discard(model_id)

    async def save_model(self, model_id: str, folder: str, *, optimizer: bool) -> None:
        await self.trainer.call(
            TinkerTrainer.save_model,
            model_id,
            folder,
            optimizer=optimizer,
            timeout="checkpoint_s",
        )

    async def load_model(self, model_id: str, folder: str, *, optimizer: bool) -> None:
        await self.trainer.call(
            TinkerTrainer.load_model,
            model_id,
            folder,
            optimizer=optimizer,
            timeout="checkpoint_s",
        )

    async def push(self, *, model_id: str) -> int:
        is_whole, version = model_id in self._whole_models, next(self._numbers)
        versions = self._whole if is_whole else self._adapters
        limit = self._cluster.store.config.keep_versions
        if is_whole and len(self._whole) >= limit:
            raise LimitReachedError(
                f"there are {limit} snapshots of whole models in memory, which is the limit "
                "(weights.keep_versions): end a session that has some, or save the weights"
            )
        try:
            await self._pool.push(model_id=model_id, version=version)
        except WeightStoreError as error:
            # Some ranks may have put their part of it.
            await self._cluster.store.delete(version)
            if isinstance(error, SharedMemoryError):
                raise LimitReachedError(
                    "there is no room for another snapshot, beside "
                    f"{len(self._adapters)} of adapters and {len(self._whole)} of whole models: "
                    f"{error}"
                ) from error
            raise
        versions.add(version)
        return version

    def get_weights(self, version: int) -> int:
        return BASE if version in self._adapters else version

    async def switch(self, weights: int) -> None:
        if weights == BASE:
            await self._pool.serve_base(KEEPER)
        else:
            # Without a limit, old versions would be those of clients.
            await self._pool.pull(weights, prunes=False)

    async def forget(self, version: int) -> None:
        self._whole.discard(version)
        self._adapters.discard(version)
        # First of the generators: a load that is under way reads it from the store.
        for sampler in self._samplers:
            load = sampler.loads.get(version)
            if load is not None:
                # A sample that was cancelled may have begun it.
                await asyncio.wait([load])
                sampler.loads.pop(version, None)
                await sampler.group.call(
                    VLLMGenerator.give_up_adapters, [version], timeout="sync_s"
                )
        await self._cluster.store.delete(version)

    async def generate(
        self, prompts: Sequence[np.ndarray], *, sampling: SamplingParams, version: int | None
    ) -> list[list[Completion]]:
        adapter = version if version in self._adapters else None
        # Of those that are equally busy, one that has the adapter.
        sampler = min(self._samplers, key=lambda one: (one.num_running, adapter not in one.loads))
        num_sequences = sampling.num_samples * len(prompts)
        draw = partial(sampler.client.generate, prompts, sampling=sampling, adapter=adapter)
        # Counted before the first await, so that calls made together are spread.
        sampler.num_running += num_sequences
        try:
            with _translate_errors():
                return await self._call_with_adapter(sampler, adapter, draw)
        finally:
            sampler.num_running -= num_sequences

    async def prompt_logprobs(
        self, prompt: np.ndarray, *, top_k: int, version: int | None
    ) -> PromptLogprobs:
        assert top_k == 0, "the base model says that there are none"
        adapter = version if version in self._adapters else None
        sampler = min(self._samplers, key=lambda one: (one.num_running, adapter not in one.loads))

        async def read() -> list[list[np.ndarray]]:
            return await sampler.group.call(
                VLLMGenerator.compute_logprobs, [prompt], adapter=adapter, timeout="train_s"
            )

        with _translate_errors():
            answers = await self._call_with_adapter(sampler, adapter, read)
        # The first token has no logprob: the engine says 0, `PromptLogprobs` NaN.
        logprobs: np.ndarray = answers[0][0].copy()
        logprobs[0] = np.nan
        none = np.empty((len(prompt), 0))
        return PromptLogprobs(logprobs=logprobs, top_ids=none.astype(np.int32), top_logprobs=none)

    async def _call_with_adapter(
        self, sampler: _Sampler, adapter: int | None, call: Callable[[], Awaitable[T]]
    ) -> T:
        """Return the result of a call to a generator, which has the adapter first.

        Raises LimitReachedError if there is no room for it.
        """
        if adapter is None:
            return await call()
        for _ in range(MAX_LOADS):
            load = self._start_load(sampler, adapter)
            # Shared with other requests: one that is cancelled must not stop it.
            await asyncio.shield(load)
            try:
                return await call()
            except MissingAdapterError:
                # The generator has dropped it, as it was not used for longest.
                if sampler.loads.get(adapter) is load:
                    del sampler.loads[adapter]
        raise LimitReachedError(
            f"the generators have too little room for the adapters in use: {MAX_LOADS} times this "
            "one was dropped for others before its request began (generator.adapter_memory_gib)"
        )

    def _start_load(self, sampler: _Sampler, adapter: int) -> asyncio.Task[None]:
        """Return the load of an adapter, which may have ended or be under way."""
        if adapter in sampler.loads:
            return sampler.loads[adapter]

        def forget_failed(load: asyncio.Task[None]) -> None:
            # The next request tries again; those that wait have the error.
            if load.cancelled() or load.exception() is not None:
                sampler.loads.pop(adapter, None)

        load = asyncio.create_task(self._load(sampler, adapter), name=f"load of adapter {adapter}")
        load.add_done_callback(forget_failed)
        sampler.loads[adapter] = load
        return load

    async def _load(self, sampler: _Sampler, adapter: int) -> None:
        deadline_s = asyncio.get_running_loop().time() + ROOM_S
        while True:
            try:
                async with sampler.loading:
                    return await self._pool.load_adapter(adapter, generators=[sampler.group])
            except AdapterRoomError as error:
                if asyncio.get_running_loop().time() > deadline_s:
                    raise LimitReachedError(str(error)) from error
            # Requests of others end meanwhile, and smaller adapters may fit.
            await asyncio.sleep(ROOM_LOOK_S)

    async def aclose(self) -> None:
        """End the actors, then kill processes that are left."""
        with self._resources:
            try:
                await self._cluster.close()
            finally:
                await self._cluster.launcher.stop_all()
