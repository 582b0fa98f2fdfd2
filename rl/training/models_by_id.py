"""Several models in training in one process, by id: an engine each, which share one process group.

A run has one model, and its trainer needs none of this. The Tinker API has as many as its clients
create. All are LoRA's adapters on one base, whose frozen weights exist once, or copies of all of
its parameters. Every rank makes the same models and calls the same methods in the same order.

Files of a saved model, of which nothing is ever unpickled:

    model.json               base and adapters, and size and checksum of each other file
    weights.safetensors      trained tensors: LoRA's factors, or all parameters
    optimizer.safetensors    the optimizer's running means; missing in weights to sample from
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl.distributed.collectives import run_on_all_ranks
from rl.distributed.process_group import RankInfo, World
from rl.distributed.sharding import gather_whole, local_tensor, slice_local_shard
from rl.models.files.hf import HFFolder
from rl.models.lora import LoRA
from rl.models.spec import ModelSpec
from rl.training.checkpoints.files import sum_of_file
from rl.training.checkpoints.tensors import collect_optimizer_tensors
from rl.training.checks import check_trainer
from rl.training.compat import replace_local_shard
from rl.training.engine import TrainingEngine
from rl.utils.errors import RunError, describe_disk_error
from rl.utils.processes import process_states, restore_process_states

FORMAT = 3
DESCRIPTION, WEIGHTS, OPTIMIZER = "model.json", "weights.safetensors", "optimizer.safetensors"
KEEPER = "keeper of the base"
"""Id of a model that no client trains; the base beside all adapters is read from it."""
_SAMPLED_BYTES = 1 << 20


class ModelError(RunError, ValueError):
    """A request about a model that is refused and changes nothing; raised on every rank."""


class UnsavedModelError(ModelError):
    """A model that the disk has refused, for the reason given; it is trained on."""


class TrainedModels:
    """Models in training by id, all on one base; one engine each.

    Example:
        models = TrainedModels(config, spec=spec, hf_assets_path="/models/Qwen3-0.6B")
        models.create("a", LoRA.Config(rank=32, alpha=64.0))
        models["a"].forward_backward(samples)  # a `TrainingEngine`
        models.save("a", "saved/a", optimizer=True)
    """

    def __init__(
        self,
        config: TrainingEngine.Config,
        *,
        spec: ModelSpec,
        hf_assets_path: str,
        device: torch.device | str | None = None,
        world: World | None = None,
    ) -> None:
        """Join the other ranks; `config` is that of every model, except for its converters.

        Raises ValueError if the config does not fit the model or the number of ranks.
        """
        self.config = config
        self.spec = spec
        self._world = World.from_env() if world is None else world
        self.device = self._world.default_device() if device is None else torch.device(device)
        self._folder = hf_assets_path
        self._base = _hash_files(HFFolder(hf_assets_path))
        check_config(config)
        degrees = check_trainer(config, spec=spec, world_size=self._world.size, device=self.device)
        self._rank = RankInfo.join(
            degrees, world=self._world, device=self.device, comm=config.comm, always=False
        )
        self.frozen: dict[str, Tensor] = {}
        """This rank's shards of the parameters that LoRA models do not train, by our names."""
        self._engines: dict[str, TrainingEngine] = {}
        self._adapters: dict[str, LoRA.Config | None] = {}

    def __getitem__(self, model_id: str) -> TrainingEngine:
        return self._engines[model_id]

    def lora(self, model_id: str) -> LoRA.Config | None:
        return self._adapters[model_id]

    def create(self, model_id: str, lora: LoRA.Config | None) -> None:
        """Create a fresh model: adapters with products of zero, or a copy of the base."""
        converters = () if lora is None else (lora,)
        config = replace(self.config, training=replace(self.config.training), converters=converters)
        # An engine seeds the process's random generators, which belong to a notebook as well.
        states = process_states()
        try:
            engine = TrainingEngine(
                config=config,
                model_spec=self.spec,
                hf_assets_path=self._folder,
                device=self.device,
                world=self._world,
                rank=self._rank,
            )
        except ValueError as error:
            raise ModelError(f"the model cannot be created: {error}") from error
        finally:
            restore_process_states(states)
        if lora is not None:
            share_frozen(engine.policy.parameters, self.frozen)
        self._engines[model_id], self._adapters[model_id] = engine, lora

    def delete(self, model_id: str) -> None:
        self._engines.pop(model_id).close()
        del self._adapters[model_id]
        gc.collect()  # An engine's hooks refer to it, and would keep its memory for some time.

    def save(self, model_id: str, folder: str | Path, *, optimizer: bool) -> None:
        """Write a model's trained tensors into an empty folder from the first rank.

        All ranks take part, as each gathers every tensor.

        Raises:
            UnsavedModelError: the disk is full, or refuses a file for another reason; on the first
                rank alone.
        """
        whole: dict[str, dict[str, Tensor]] = {}
        for file, content in self._collect_tensors(model_id, optimizer=optimizer).items():
            whole[file] = {}
            for name, tensor in content.items():
                # Tensor by tensor to the host: a GPU has room for one whole tensor, not for all.
                whole[file][name] = gather_whole(tensor).detach().cpu()
        if self._world.rank:
            return
        try:
            self._write(Path(folder), whole, description=self._describe(model_id))
        except (OSError, SafetensorError) as error:
            raise UnsavedModelError(describe_disk_error(error)) from error

    def _write(
        self,
        folder: Path,
        tensors: Mapping[str, Mapping[str, Tensor]],
        *,
        description: Mapping[str, Any],
    ) -> None:
        """Write the files, and last the description, without which a folder is no model."""
        sums = {}
        for file, content in tensors.items():
            # safetensors refuses views of larger tensors.
            save_file({key: tensor.contiguous() for key, tensor in content.items()}, folder / file)
            sums[file] = dataclasses.asdict(sum_of_file(folder / file))
        text = json.dumps({**description, "files": sums}, indent=2)
        (folder / DESCRIPTION).write_text(f"{text}\n", encoding="utf-8")

    def load(self, model_id: str, folder: str | Path, *, optimizer: bool) -> None:
        """Load a folder of `save` and drop the gradient.

        Without `optimizer` the optimizer starts anew.

        Raises:
            ModelError: a file is missing, damaged or of another model; the text names it, nothing
                has changed.
        """
        into = self._collect_tensors(model_id, optimizer=optimizer)
        # All ranks read all files before any rank changes a tensor.
        group = dist.group.WORLD if dist.is_initialized() else None
        saved = run_on_all_ranks(lambda: self._read(model_id, Path(folder), into), group=group)

        self[model_id].drop_gradient()
        with torch.no_grad():
            for file, present in into.items():
                for key, tensor in present.items():
                    local_tensor(tensor).copy_(slice_local_shard(saved[file][key], tensor))
        if not optimizer:
            self[model_id].optimizer.reset()

    def close(self) -> None:
        """Close every model and leave the other ranks."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()
        self._rank.leave()

    def _collect_tensors(self, model_id: str, *, optimizer: bool) -> dict[str, dict[str, Tensor]]:
        """Return a model's trained tensors by file and name, without copying."""
        engine = self[model_id]
        trained = engine.policy.trained_parameters
        tensors = {WEIGHTS: {name: p.detach() for name, p in trained.items()}}
        if optimizer:
            tensors[OPTIMIZER] = collect_optimizer_tensors(trained, engine.optimizer)
        return tensors

    def _describe(self, model_id: str) -> dict[str, Any]:
        lora = self.lora(model_id)
        settings = None
        if lora is not None:
            settings = {
                "rank": lora.rank,
                "alpha": lora.alpha,
                "target_modules": sorted(lora.target_modules or ()),
                "unembedding": lora.unembedding,
            }
        return {"format": FORMAT, "base": self._base, "lora": settings}

    def _read(
        self, model_id: str, folder: Path, into: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of a folder of `save` by file; raises ModelError as `load`."""
        file = folder / DESCRIPTION
        try:
            description = json.loads(file.read_text(encoding="utf-8"))
            for name, value in self._describe(model_id).items():
                if description[name] != value:
                    raise ModelError(
                        f"the saved model's {name} is {description[name]!r}, but this model's is "
                        f"{value!r}"
                    )

            saved: dict[str, dict[str, Tensor]] = {}
            for name, present in into.items():
                file = folder / name
                if name not in description["files"]:
                    raise ModelError(f"the saved model has no {name}: it was saved to sample from")
                if dataclasses.asdict(sum_of_file(file)) != description["files"][name]:
                    raise ModelError(
                        f"the saved model's file {name} is damaged: its checksum is another one"
                    )
                saved[name] = load_file(file)
                if _list_shapes(saved[name]) != _list_shapes(present):
                    raise ModelError(
                        f"the saved model's file {name} has other tensors than the model"
                    )
        except ModelError:
            raise
        except FileNotFoundError as error:
            raise ModelError(f"the saved model's file {file.name} is missing") from error
        except (OSError, KeyError, TypeError, ValueError, AttributeError, SafetensorError) as error:
            raise ModelError(f"the saved model's file {file.name} is damaged: {error!r}") from error
        return saved


def _list_shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def check_config(config: TrainingEngine.Config) -> None:
    """Raise ValueError for options that several models cannot have."""
    if config.training.cpu_offload:
        raise ValueError(
            "training.cpu_offload=True: must be False, models share their base's memory"
        )
    if config.optimizer.early_step_in_backward:
        raise ValueError(
            "optimizer.early_step_in_backward=True: must be False, clients give the settings of a "
            "step after its gradient"
        )
    degree = config.parallelism.pipeline_parallel_degree
    if degree > 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree={degree}: must be 1, each rank keeps the "
            "adapters of all layers"
        )
    if config.converters:
        raise ValueError("converters: must be (), each model has adapters of its own")


def share_frozen(parameters: Mapping[str, nn.Parameter], frozen: dict[str, Tensor]) -> None:
    """Replace the memory of frozen parameters by `frozen`, and add to `frozen` what it lacks.

    Must run before the first forward, when FSDP2 looks where its shards are. A shard that FSDP2
    pads to the length of the others stays a copy.
    """
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            continue
        # The first model's shard stays; the shards of later models are freed.
        shard = frozen.setdefault(name, local_tensor(parameter).detach())
        if isinstance(parameter, DTensor):
            replace_local_shard(parameter, shard)
        else:
            parameter.data = shard


def _hash_files(folder: HFFolder) -> str:
    """Return a hash of the config and of the sizes, headers and ends of the weights files."""
    # Enough to tell models apart, and quick for a model of any size.
    digest = hashlib.sha256(json.dumps(folder.config, sort_keys=True).encode())
    for file in sorted(set(folder.files.values())):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLED_BYTES))
            stream.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(stream.read(_SAMPLED_BYTES))
    return digest.hexdigest()
