"""Checks of a run's config before anything starts; every error names the field, its value and what
is valid.

`find_config_faults` and `find_machine_faults` return all that is wrong: a run raises the first,
`--explain` shows every one. Rules between options are data (`rl.run_rules`); here is what needs the
model, the devices or a file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from actors.config import RunConfig
from actors.launch.placement import count_gpus, fits_shared, place_actors, trains_on_gpu
from actors.preflight.agents import check_address, check_agent_limits
from actors.preflight.capability import CUDA_CAPABILITY, FLASH_CAPABILITY
from actors.trainer import PolicyTrainer
from actors.vllm.config import GeneratorConfig
from rl.config.rules import find_faults
from rl.config.tree import name_as_options
from rl.distributed.stages import plan_stages
from rl.models.batch_invariant.model import check_capability
from rl.models.converter import ModelConverter, ModelConverters
from rl.models.decoder import list_module_names
from rl.models.files.hf import HFFolder
from rl.models.lora import LoRA
from rl.models.model_cost import count_work
from rl.models.spec import ModelSpec
from rl.observability.sinks import check_installed
from rl.run_rules import RULES
from rl.starting_point import StartingPoint
from rl.training.checkpoints.config import CheckpointConfig, LoadSource
from rl.training.checkpoints.files import ADAPTER_FOLDER, is_checkpoint, read_state
from rl.training.checkpoints.tensors import (
    REFERENCE,
    check_tokenizer,
    collect_model_tensors,
    collect_optimizer_tensors,
    match_tensors,
    select_own_exclusions,
)
from rl.training.checks import list_model_checks
from rl.training.memory import check_memory, estimate_memory
from rl.training.optimizer import Optimizer, check_total_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Devices and memory of a machine; `--explain` makes one up for a config that needs GPUs."""

    num_gpus: int
    gpu_bytes: int | None
    """Memory of the smallest GPU; None without GPUs."""
    gpu_capability: tuple[int, int] | None = None
    """Compute capability of the oldest GPU; None without GPUs."""
    num_cores: int
    memory_bytes: int

    @classmethod
    def here(cls) -> Machine:
        gpus = list(map(torch.cuda.get_device_properties, range(count_gpus())))
        # The weakest GPU decides: every rank runs the same program with the same sizes.
        return cls(
            num_gpus=len(gpus),
            gpu_bytes=min((gpu.total_memory for gpu in gpus), default=None),
            gpu_capability=min(((gpu.major, gpu.minor) for gpu in gpus), default=None),
            # Not os.cpu_count(): a container or taskset may leave this process fewer.
            num_cores=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        )


class Faults(list[str]):
    """Reasons to refuse a config."""

    @contextmanager
    def collect(self, prefix: str = "") -> Iterator[None]:
        """Add the message of an error that the block raises."""
        try:
            yield
        except (ValueError, OSError, ImportError) as error:
            self.append(f"{prefix}{error}")


def check_run(
    config: RunConfig, *, spec: ModelSpec, machine: Machine, resumes: bool = False
) -> None:
    """Raise ValueError for the first fault of a config that keeps the rules between options."""
    faults = find_model_faults(config, spec=spec, num_gpus=machine.num_gpus, resumes=resumes)
    for fault in faults or find_machine_faults(config, spec=spec, machine=machine):
        raise ValueError(fault)
    check_disk(config, spec=spec)


def find_config_faults(
    config: RunConfig, *, spec: ModelSpec, num_gpus: int, resumes: bool = False
) -> Faults:
    """Return the broken rules between options, then the faults of `find_model_faults`."""
    faults = Faults(find_faults(config, RULES))
    faults += find_model_faults(config, spec=spec, num_gpus=num_gpus, resumes=resumes)
    return faults


def find_model_faults(
    config: RunConfig, *, spec: ModelSpec, num_gpus: int, resumes: bool = False
) -> Faults:
    """Return what does not fit the model or the devices.

    `num_gpus` are on this machine. With `resumes` the run replaces the results of its earlier end.
    """
    faults = Faults()
    trainer, loop = config.trainer, config.loop
    on_gpu = trains_on_gpu(config.launch, num_gpus=num_gpus)
    device_type = "cuda" if on_gpu else "cpu"

    # In this order, as a run raises the first: an error of the layout would otherwise appear as one
    # of the placement or of a converter, which come after it.
    for check in list_model_checks(
        trainer, spec, world_size=trainer.num_procs, device_type=device_type
    ):
        with faults.collect(), name_as_options("trainer", trainer):
            check()
    with faults.collect(), name_as_options("generator", config.generator):
        config.generator.check_model(spec.model, on_gpu=on_gpu)
    with faults.collect():
        check_total_steps(
            trainer.lr_scheduler, num_steps=loop.num_steps, num_minibatches=loop.num_minibatches
        )
    # A run that goes on replaces the adapter of its earlier end.
    if has_lora(trainer.converters) and not resumes:
        with faults.collect():
            _check_adapter_folder(trainer.checkpoint)
    with faults.collect():
        _check_placement(config, num_gpus=num_gpus)
    with faults.collect():
        _, converters = build_converted_model(trainer, spec=spec, on_gpu=on_gpu)
        for converter in converters.members:
            if isinstance(converter, LoRA) and converter.config.is_served_apart:
                # Requests that run keep their version: so many may be in use beside the newest.
                num_versions = 2 + loop.max_off_policy_steps
                _check_served_adapter(
                    converter,
                    generator=config.generator,
                    num_versions=num_versions,
                    on_gpu=on_gpu,
                )
    return faults


def _check_served_adapter(
    lora: LoRA, *, generator: GeneratorConfig, num_versions: int, on_gpu: bool
) -> None:
    """Raise ValueError for adapters that the generators could not serve beside the base."""
    if lora.config.rank > generator.max_lora_rank:
        raise ValueError(
            f"trainer.converters: LoRA has rank={lora.config.rank}, more than "
            f"generator.max_lora_rank={generator.max_lora_rank}: must be at most that"
        )
    needed = num_versions * _count_served_bytes(lora, generator=generator, on_gpu=on_gpu)
    if needed > generator.adapter_memory_gib * 2**30:
        raise ValueError(
            f"generator.adapter_memory_gib={generator.adapter_memory_gib:g}: {num_versions} "
            f"versions of the adapter of rank {lora.config.rank} take {needed / 2**30:.3g} GiB, "
            "must be at least that"
        )
    try:
        generator.check_adapters(on_gpu=on_gpu)
    except ValueError as error:
        raise ValueError(
            f"{error}; or let LoRA's merge be True, for generators that get whole weights"
        ) from None


def _count_served_bytes(lora: LoRA, *, generator: GeneratorConfig, on_gpu: bool) -> float:
    """Return the least memory that a version takes in a rank of the generators."""
    dtype = getattr(torch, generator.dtype)
    if on_gpu:
        num_numbers = sum(one.lora_a.numel() + one.lora_b.numel() for one in lora.adapters)
    else:
        # Imported here, because only adapters on a CPU need numba.
        from rl.models.low_rank.bank import find_kernel_dtype
        from rl.models.low_rank.products import count_packed

        dtype = find_kernel_dtype(dtype)
        shapes = [shape for one in lora.adapters for shape in count_packed(one.factors)]
        num_numbers = sum(shape.numel() for shape in shapes)
    # Each rank has a share of most factors.
    return num_numbers * dtype.itemsize / generator.tensor_parallel_degree


def _check_placement(config: RunConfig, *, num_gpus: int) -> None:
    """Raise ValueError for actors without devices; it says so if they could take turns instead."""
    try:
        place_actors(config, num_gpus=num_gpus)
    except ValueError as error:
        if config.launch.share_gpus or not fits_shared(config, num_gpus=num_gpus):
            raise
        raise ValueError(
            f"{error}: set launch.share_gpus to True and loop.max_off_policy_steps to 0, and they "
            "take turns"
        ) from None


def _check_adapter_folder(checkpoint: CheckpointConfig) -> None:
    """Raise ValueError for a folder in which the adapter could not be written at the end."""
    if not checkpoint.saves or checkpoint.shared_folder is None:
        return
    adapter = checkpoint.shared_folder / ADAPTER_FOLDER
    if adapter.exists():
        raise ValueError(
            f"trainer.checkpoint.folder={checkpoint.folder!r}: {adapter} is there already, of a "
            "run that ended; move it away"
        )


def find_machine_faults(config: RunConfig, *, spec: ModelSpec, machine: Machine) -> Faults:
    """Return missing packages, GPUs that are too old, and too little memory or too few cores of a
    machine without GPUs.

    A GPU's memory is checked by each rank, which knows it, before it allocates anything.
    """
    faults = Faults()
    with faults.collect():
        check_installed(config.sinks)
    with faults.collect():
        check_address(config)
    with faults.collect():
        check_agent_limits(config)
    if machine.gpu_capability is not None and not config.launch.on_cluster:
        faults += _find_capability_faults(
            machine.gpu_capability,
            trainer_dtype=config.trainer.training.param_dtype,
            generator_dtype=config.generator.dtype,
            batch_invariant=bool(config.batch_invariant),
        )
    if config.launch.on_cluster or machine.num_gpus:
        return faults

    # On CPUs all processes share one memory, so that they are checked together, and here.
    with faults.collect():
        _check_memory(config.trainer, spec=spec, memory_bytes=machine.memory_bytes)

    generator = config.generator
    num_procs = generator.num_replicas * generator.tensor_parallel_degree
    # More replicas than cores only slow each other down.
    if generator.num_replicas > machine.num_cores:
        faults.append(
            f"generator.num_replicas={generator.num_replicas}: must be at most "
            f"{machine.num_cores}, the cores of this machine, which has no GPU"
        )
    cache_gib = generator.count_cpu_cache_bytes(spec.model) / 2**30
    if num_procs * cache_gib * 2**30 > machine.memory_bytes:
        faults.append(
            f"generator.cpu_kv_cache_gib={generator.cpu_kv_cache_gib:g}: the caches of {num_procs} "
            f"generator processes, {cache_gib:.2g} GiB each, are more than the "
            f"{machine.memory_bytes / 2**30:.0f} GiB of this machine, which has no GPU"
        )
    return faults


def check_disk(config: RunConfig, *, spec: ModelSpec) -> None:
    """Raise ValueError if a checkpoint certainly does not fit on this machine's disk.

    A run would notice it at its first save, when all steps until then are lost.
    """
    checkpoint = config.trainer.checkpoint
    if config.launch.on_cluster or not checkpoint.saves or has_lora(config.trainer.converters):
        return
    folder = checkpoint.shared_folder or Path(config.dump_folder).expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    # The weights alone, in the smaller of the two dtypes, are the least that it holds.
    dtypes = (config.trainer.training.dtype, checkpoint.export_dtype)
    itemsize = min(getattr(torch, dtype).itemsize for dtype in dtypes)
    num_bytes, free = itemsize * count_work(spec.model).parameters, shutil.disk_usage(there).free
    if free < num_bytes:
        named = "dump_folder" if checkpoint.shared_folder is None else "trainer.checkpoint.folder"
        raise ValueError(
            f"{named}={str(folder)!r}: its disk has {free / 1e6:,.1f} MB free, but a checkpoint "
            f"has at least {num_bytes / 1e6:,.1f} MB: free some, choose another folder, or "
            "--trainer.checkpoint.enable False"
        )


def _find_capability_faults(
    capability: tuple[int, int], *, trainer_dtype: str, generator_dtype: str, batch_invariant: bool
) -> Iterator[str]:
    if capability < CUDA_CAPABILITY:
        yield (
            f"a GPU of this machine has compute capability {'.'.join(map(str, capability))}: CUDA "
            f"13 has kernels from {'.'.join(map(str, CUDA_CAPABILITY))} on; RELAY_DEVICE=cpu "
            "trains on the CPU"
        )
        return
    for option, dtype in (
        ("trainer.training.param_dtype", trainer_dtype),
        ("generator.dtype", generator_dtype),
    ):
        if dtype != "float32" and capability < FLASH_CAPABILITY:
            yield (
                f"{option}={dtype}: must be float32 on a GPU of compute capability "
                f"{'.'.join(map(str, capability))}, because flash attention needs at least "
                f"{'.'.join(map(str, FLASH_CAPABILITY))}"
            )
    if batch_invariant:
        try:
            check_capability(capability)
        except ValueError as error:
            yield str(error)


def _check_memory(trainer: PolicyTrainer.Config, *, spec: ModelSpec, memory_bytes: int) -> None:
    """Check the trainer's ranks against all memory, like `check_memory`."""
    degrees = trainer.parallelism.resolve_degrees(trainer.num_procs)
    rank = estimate_memory(trainer, spec=spec, degrees=degrees, on_gpu=False)
    check_memory(
        rank,
        message=f"{spec.name} {spec.flavor} needs {trainer.num_procs * rank.total / 1e9:.0f} GB on "
        f"{trainer.num_procs} rank{'s' if trainer.num_procs > 1 else ''} of the trainer, "
        f"{rank.describe()}; this machine has {memory_bytes / 1e9:.0f} GB and no GPU",
        rank_bytes=memory_bytes / trainer.num_procs,
        compiled=trainer.compile.enable,
    )


def build_converted_model(
    trainer: PolicyTrainer.Config, *, spec: ModelSpec, on_gpu: bool
) -> tuple[nn.Module, ModelConverters]:
    """Return the trainer's model on the meta device and its converters; a ValueError names
    converter and field.
    """
    # Only the trainer's own processes may hold memory on a GPU.
    device = torch.device("meta" if on_gpu else "cpu")
    with name_as_options("trainer", trainer):
        degrees = trainer.parallelism.resolve_degrees(trainer.num_procs)
        converters = ModelConverters(trainer.converters, spec=spec, degrees=degrees, device=device)
        with torch.device("meta"):
            model: nn.Module = spec.model.build()
            converters.convert(model)
        # A stage in which nothing is trained has no backward, and the schedule would wait for it.
        if degrees.pp > 1:
            plan = plan_stages(trainer.parallelism, list_module_names(spec.model))
            plan.check_trained(_find_trained(model))
    return model, converters


def _find_trained(model: nn.Module) -> dict[str, nn.Parameter]:
    trained: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained[name] = parameter
    return trained


def has_lora(converters: Iterable[ModelConverter.Config]) -> bool:
    return any(isinstance(converter, LoRA.Config) for converter in converters)


def check_source(
    source: LoadSource | None,
    *,
    start: StartingPoint,
    trainer: PolicyTrainer.Config,
    num_steps: int,
    on_gpu: bool,
) -> None:
    """Check that a checkpoint fits tokenizer, model, converters and optimizer, and leaves some of a
    run's `num_steps` to do.

    Raises:
        ValueError: names the folder and what differs, such as the first tensor that does not fit
            with both shapes.
    """
    if source is None:
        return

    path, model_only = source.path, source.model_only
    position, adapter = source.position, start.spec.adapter(start.spec.model)
    model, converters = build_converted_model(trainer, spec=start.spec, on_gpu=on_gpu)
    if not is_checkpoint(path):  # a Hugging Face folder, which does not record its tokenizer
        folder = HFFolder(path)
        folder.spec(expected=start.spec)
        folder.check(model, adapter, names=set(converters.plain_names))
        return

    saved = read_state(path)
    exclude = trainer.checkpoint.exclude_from_loading
    present = start.compute_fingerprint()
    check_tokenizer(path, saved.tokenizer, present, model_only=model_only, exclude=exclude)
    if position is not None and position.step >= num_steps and not source.whole:
        raise ValueError(
            f"loop.num_steps={num_steps}: {path} has done {position.step} steps already; give more "
            "to continue"
        )

    # Names and shapes come from the meta device, so that no tensor of the checkpoint is read.
    tensors = collect_model_tensors(model)
    if not model_only:
        trained = _find_trained(model)
        optimizer: Optimizer = trainer.optimizer.build(parameters=trained, adapter=adapter)
        tensors |= collect_optimizer_tensors(trained, optimizer)
        if trainer.reference.enable:
            tensors |= collect_model_tensors(model, prefix=REFERENCE)
    if source.whole:
        exclude = select_own_exclusions(exclude, model_only=model_only)
    match_tensors(path, saved, into=tensors, converters=converters, exclude=exclude)
