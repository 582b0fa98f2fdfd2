"""The Tinker backend over actors: a trainer of any layout, and vLLM generators.

All models in training are in the trainer's processes; those with LoRA share the base's frozen
weights. A snapshot is a version in the weight store with adapters merged, which the generators pull
when its turn comes. All hosts of the trainer need to see the folders that models are saved in.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from monarch.actor import ActorError, concurrent_endpoint

from actors.cluster.clients import TrainerClient, make_router
from actors.cluster.cluster import Cluster, start_cluster
from actors.config import ClusterConfig, LaunchConfig, RecoveryConfig, Timeouts
from actors.generator import VLLMGenerator
from actors.launch.calls import ActorCallError, ActorLostError
from actors.launch.cleanup import guard_temporary_files
from actors.launch.launcher import Launcher
from actors.launch.member import LogSettings
from actors.launch.placement import count_gpus, place_actors, trains_on_gpu
from actors.reward import RewardActor
from actors.trainer import PolicyTrainer
from actors.vllm.requests import SMALLEST_TEMPERATURE, DivergedError
from rl.config.rules import check_rules, select_rules
from rl.config.tree import name_as_options
from rl.models.generate import Interrupted, PromptLogprobs
from rl.models.lora import LoRA
from rl.observability.console import print_line
from rl.observability.spans import span
from rl.run_rules import RULES
from rl.tinker.backend import TinkerBackend, TinkerWorkers
from rl.tinker.base_model import BaseModelFolder
from rl.tinker.types import LimitReachedError
from rl.training.checks import list_trainer_checks
from rl.training.engine import TrainingEngine
from rl.training.models_by_id import ModelError, TrainedModels, check_config
from rl.types import Completion, PullResult, SamplingParams
from rl.utils.files import make_folder, make_temporary_folder, remove_leftovers
from rl.weights.store import WeightStore
from rl.weights.types import SharedMemoryError, WeightStoreError


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
        """Its `max_model_len` is the context that is offered, for training too."""
        weights: WeightStore.Config = field(
            default_factory=lambda: WeightStore.Config(keep_versions=16)
        )
        """Its `keep_versions` is the largest number of snapshots, the base among them: whole models
        each.
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
            generator=config.generator,
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
        return ActorWorkers(cluster, resources=resources)


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


def _count_tokens(groups: Sequence[Sequence[Completion]]) -> int:
    return sum(len(completion.token_ids) for completion in chain.from_iterable(groups))


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
        self._generators = itertools.cycle(cluster.pool.members)
        self._router = make_router(cluster.pool)
        self.num_sequences = cluster.config.generator.max_num_seqs * len(cluster.pool.members)
        self._numbers = itertools.count(1)
        self._versions: set[int] = set()

    async def create_model(self, model_id: str, lora: LoRA.Config | None) -> None:
        await self.trainer.call(TinkerTrainer.create_model, model_id, lora, timeout="setup_s")

    async def delete_model(self, model_id: str) -> None:
        await self.trainer.call(TinkerTrainer.delete_model, model_id, timeout="train_s")

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
        # No more than `keep_versions`: `GeneratorPool.pull` deletes the oldest beyond them.
        limit, version = self._cluster.store.config.keep_versions, next(self._numbers)
        if len(self._versions) >= limit:
            raise LimitReachedError(
                f"there are {limit} snapshots in memory, which is the limit "
                "(weights.keep_versions): end a session that has some, or save the weights"
            )
        try:
            await self._pool.push(model_id=model_id, version=version)
        except WeightStoreError as error:
            # Some ranks may have put their part of it.
            await self._cluster.store.delete(version)
            if isinstance(error, SharedMemoryError):
                raise LimitReachedError(
                    f"there is no room for another snapshot: {error}"
                ) from error
            raise
        self._versions.add(version)
        return version

    async def pull(self, version: int) -> PullResult:
        return await self._pool.pull(version)

    async def forget(self, version: int) -> None:
        self._versions.discard(version)
        await self._cluster.store.delete(version)

    async def generate_in_turns(
        self,
        prompts: Sequence[np.ndarray],
        *,
        sampling: SamplingParams,
        begun: list[list[Completion]] | None = None,
    ) -> list[list[Completion]] | Interrupted[list[list[Completion]]]:
        with _translate_errors():
            groups = await self._router.generate(prompts, sampling=sampling, begun=begun)
        completions = chain.from_iterable(groups)
        if all(completion.finish_reason != "abort" for completion in completions):
            return groups
        go_on = partial(self.generate_in_turns, prompts, sampling=sampling, begun=groups)
        return Interrupted(
            resume=go_on, has_advanced=_count_tokens(groups) > _count_tokens(begun or ())
        )

    async def interrupt(self) -> None:
        await self._router.abort()

    async def prompt_logprobs(self, prompt: np.ndarray, *, top_k: int) -> PromptLogprobs:
        assert top_k == 0, "the base model says that there are none"
        with _translate_errors():
            answers = await next(self._generators).call(
                VLLMGenerator.compute_logprobs, [prompt], timeout="train_s"
            )
        # The first token has no logprob: the engine says 0, `PromptLogprobs` NaN.
        logprobs: np.ndarray = answers[0][0].copy()
        logprobs[0] = np.nan
        none = np.empty((len(prompt), 0))
        return PromptLogprobs(logprobs=logprobs, top_ids=none.astype(np.int32), top_logprobs=none)

    async def aclose(self) -> None:
        """End the actors, then kill processes that are left."""
        with self._resources:
            try:
                await self._cluster.close()
            finally:
                await self._cluster.launcher.stop_all()
