"""What is checked of a run before anything starts; every error names field, value and what is valid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch
from torch import nn

from actors.fleet import place_fleet
from actors.fleet_config import FleetConfig
from actors.roles import trains_on_gpu
from rl.config.configurable import Configurable
from rl.loop import Loop
from rl.models.converters.converter import ModelConverters
from rl.models.converters.lora import LoRA
from rl.models.hf import HFFolder
from rl.models.spec import ModelSpec
from rl.starting_point import StartingPoint
from rl.training import layout
from rl.training.checkpoint import model_tensors, optimizer_tensors
from rl.training.checkpoint_config import LoadSource
from rl.training.checkpoint_files import ADAPTER_FOLDER, check_sizes, is_checkpoint, read_state
from rl.training.checkpoint_match import Destination, matching_tensors
from rl.training.checkpointer import check_device
from rl.training.memory import too_large
from rl.training.optimizer import Optimizer
from rl.training.policy import check_sequence_length
from rl.training.reference import check_reference
from rl.training.schedule import check_total_steps
from rl.training.starting_weights import reference_folder
from rl.training.tokenizer_match import check_tokenizer
from rl.weights.store import WeightStore


def check_layout(fleet: FleetConfig, *, model_spec: ModelSpec, loop: Loop.Config, num_gpus: int) -> None:
    """Degrees, lengths and devices; `num_gpus` of this machine.

    Raises:
        ValueError: names the field.
    """
    trainer, on_gpu = fleet.trainer, trains_on_gpu(fleet.launch, num_gpus=num_gpus)
    trainer.parallelism.__post_init__()  # A field may have been edited since.
    with named_as_options(trainer):
        # First what no number of processes could mend.
        check_divisible(trainer.parallelism.tensor_parallel_degree, model_spec=model_spec)
        model_spec.check_layout(model_spec.model, trainer.parallelism)
        layout.check_layout(
            parallelism=trainer.parallelism,
            activation_checkpoint=trainer.activation_checkpoint,
            compile=trainer.compile,
            world_size=trainer.num_procs,
            device_type="cuda" if on_gpu else "cpu",
        )
        trainer.check_model(model_spec)
    fleet.generator.check_model(model_spec.model)
    if model_spec.batch_invariant:
        check_same_arithmetic(fleet)
    max_model_len = fleet.generator.max_model_len
    if loop.sampling.max_tokens >= max_model_len:
        raise ValueError(
            f"loop.sampling.max_tokens={loop.sampling.max_tokens} leaves no room for a prompt in "
            f"generator.max_model_len={max_model_len}"
        )
    max_tokens = fleet.trainer.training.max_tokens_per_microbatch
    if max_tokens < max_model_len:
        raise ValueError(
            f"trainer.training.max_tokens_per_microbatch={max_tokens} is less than "
            f"generator.max_model_len={max_model_len}: the longest sample would not fit a micro-batch"
        )
    check_total_steps(trainer.lr_scheduler, num_steps=loop.num_steps, num_minibatches=loop.num_minibatches)
    if loop.kl_reward.coef > 0 and not trainer.reference.enable:
        raise ValueError(
            f"loop.kl_reward.coef={loop.kl_reward.coef} needs the reference policy: must be 0, or "
            "trainer.reference.enable True"
        )
    with named_as_options(trainer):
        check_reference(trainer.reference, loss=trainer.loss, kl_in_reward=loop.kl_reward.coef > 0)
    _check_overlong(loop)
    check_sequence_length(model_spec, fleet.trainer.training)
    max_length = fleet.trainer.training.max_sequence_length
    if max_length is not None and max_length < max_model_len:
        raise ValueError(
            f"trainer.training.max_sequence_length={max_length} is less than "
            f"generator.max_model_len={max_model_len}: the longest sample would be refused"
        )
    check_device(fleet.trainer.checkpoint, has_gpu=on_gpu)
    place_fleet(fleet, num_gpus=num_gpus)
    if fleet.launch.share_gpus:
        check_turns(fleet, loop=loop)


def _check_overlong(loop: Loop.Config) -> None:
    try:
        loop.overlong.check(max_tokens=loop.sampling.max_tokens)
    except ValueError as error:
        raise ValueError(f"loop.overlong.{error} (loop.sampling.max_tokens)") from error


@contextmanager
def named_as_options(trainer: Configurable.Config) -> Iterator[None]:
    """The engine calls its fields by their names in its config: here they are those of `trainer`."""
    try:
        yield
    except ValueError as error:
        first = re.match(r"\w*", str(error))
        assert first is not None
        if first[0] not in {field.name for field in fields(trainer)}:
            raise
        raise ValueError(f"trainer.{error}") from error


def check_same_arithmetic(fleet: FleetConfig) -> None:
    """What trainer and generator must have in common to compute the same bits.

    Raises:
        ValueError: names both fields.
    """
    trainer, generator = fleet.trainer, fleet.generator
    for theirs, ours, trainers, generators in (
        ("training.param_dtype", "dtype", trainer.training.param_dtype, generator.dtype),
        (
            "parallelism.tensor_parallel_degree",
            "tensor_parallel_degree",
            trainer.parallelism.tensor_parallel_degree,
            generator.tensor_parallel_degree,
        ),
    ):
        if trainers != generators:
            raise ValueError(
                f"trainer.{theirs}={trainers}, generator.{ours}={generators}: must be the same with "
                "batch_invariant=True, as trainer and generator are to compute the same bits"
            )


def check_turns(fleet: FleetConfig, *, loop: Loop.Config) -> None:
    """What trainer and generators that share their devices must be able to do.

    Raises:
        ValueError: names both fields.
    """
    if loop.max_policy_age > 0:
        raise ValueError(
            f"launch.share_gpus=True with loop.max_policy_age={loop.max_policy_age}: must be 0, as who "
            "shares a device takes turns and cannot work at the same time; or give each its own"
        )
    if not fleet.generator.can_sleep:
        raise ValueError(
            "launch.share_gpus=True with generator.can_sleep=False: must be True, or the generator could not "
            "leave the device to the trainer"
        )


def check_divisible(tensor_parallel_degree: int, *, model_spec: ModelSpec) -> None:
    """Raise ValueError unless that many ranks can share heads and vocabulary."""
    kv_heads = model_spec.model.block.attention.num_kv_heads  # type: ignore[attr-defined]
    vocab_size = model_spec.model.vocab_size  # type: ignore[attr-defined]
    of_model = f"of {model_spec.name} {model_spec.flavor}"
    for size, named in (
        (kv_heads, f"the {kv_heads} key-value heads {of_model}"),
        (vocab_size, f"the vocab_size of {vocab_size} {of_model}"),
    ):
        if size % tensor_parallel_degree:
            raise ValueError(
                f"trainer.parallelism.tensor_parallel_degree={tensor_parallel_degree} does not divide {named}"
            )


def check_load_source(
    source: LoadSource | None, *, fleet: FleetConfig, model_spec: ModelSpec, num_steps: int, num_gpus: int
) -> None:
    """What is loaded fits the model with its converters, and the optimizer, and has steps left.

    Raises:
        ValueError: names the folder, the first tensor that does not fit with both shapes, and the difference.
    """
    if source is None:
        return
    if source.position is not None and source.position.step >= num_steps and not source.whole:
        raise ValueError(
            f"loop.num_steps={num_steps}: {source.path} has done {source.position.step} steps already; "
            "give more to continue"
        )
    trainer = fleet.trainer
    adapter = model_spec.adapter(model_spec.model)
    model, converters = converted_model(fleet, model_spec=model_spec, num_gpus=num_gpus)
    if source.in_hf:
        HFFolder(source.path).check(model, adapter, names=set(converters.plain_names))
        return
    tensors = model_tensors(model)
    if not source.model_only:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer: Optimizer = trainer.optimizer.build(parameters=trained, adapter=adapter)
        tensors |= optimizer_tensors(trained, optimizer)
    matching_tensors(
        source.path,
        read_state(source.path),
        Destination(tensors=tensors, converters=converters),
        model_only=source.model_only,
        exclude=() if source.whole else trainer.checkpoint.exclude_from_loading,
    )


def check_reference_weights(
    source: LoadSource | None, *, start: StartingPoint, fleet: FleetConfig, num_gpus: int
) -> Path | None:
    """The folder that the reference policy of a run that is continued is loaded from; None: it has none, or
    the weights of `start`.

    Raises:
        ValueError: it is gone, does not fit the model, or it is not known which it is.
    """
    if not fleet.trainer.reference.enable or source is None or source.model_only:
        return None
    folder = reference_folder(
        source.started_from,
        of=source.path,
        present=start.origin,
        exclude=() if source.whole else fleet.trainer.checkpoint.exclude_from_loading,
    )
    if folder is None:
        return None
    model, converters = converted_model(fleet, model_spec=start.spec, num_gpus=num_gpus)
    if is_checkpoint(folder):
        check_sizes(folder)
        into = Destination(tensors=model_tensors(model), converters=converters)
        matching_tensors(folder, read_state(folder), into, model_only=True, exclude=())
    else:
        adapter = start.spec.adapter(start.spec.model)
        HFFolder(folder).check(model, adapter, names=set(converters.plain_names))
    return folder


def check_same_tokenizer(source: LoadSource | None, *, start: StartingPoint, fleet: FleetConfig) -> None:
    """What is loaded was made with the tokenizer of `start`; a Hugging Face folder notes none.

    Raises:
        ValueError: it was not; names both folders and what differs.
    """
    if source is None or source.in_hf:
        return
    saved = read_state(source.path).tokenizer
    exclude = fleet.trainer.checkpoint.exclude_from_loading
    check_tokenizer(
        source.path, saved, start.tokenizer_print(), model_only=source.model_only, exclude=exclude
    )


def check_converters(fleet: FleetConfig, *, model_spec: ModelSpec, num_gpus: int) -> None:
    """What the trainer's converters ask of model, layout and machine, on a model without memory.

    Raises:
        ValueError: names the converter by its number, and the field.
    """
    converted_model(fleet, model_spec=model_spec, num_gpus=num_gpus)


def converted_model(
    fleet: FleetConfig, *, model_spec: ModelSpec, num_gpus: int
) -> tuple[nn.Module, ModelConverters]:
    """The trainer's model, without memory, and what changed it."""
    degrees = fleet.trainer.parallelism.degrees(fleet.trainer.num_procs)
    # A GPU is asked by its own process: this one is to hold nothing on it.
    device = torch.device("meta" if trains_on_gpu(fleet.launch, num_gpus=num_gpus) else "cpu")
    with named_as_options(fleet.trainer):
        converters = ModelConverters(
            fleet.trainer.converters, spec=model_spec, degrees=degrees, device=device
        )
        with torch.device("meta"):
            model: nn.Module = model_spec.model.build()
            converters.convert(model)
    return model, converters


def has_lora(fleet: FleetConfig) -> bool:
    """Whether the trainer trains adapters."""
    return any(isinstance(converter, LoRA.Config) for converter in fleet.trainer.converters)


def check_end(fleet: FleetConfig, *, warms_up: bool, resumes: bool = False) -> None:
    """What would only be noticed when a run starts to train, or when it ends.

    `resumes`: the run replaces what an earlier end of it left.

    Raises:
        ValueError: names the field.
    """
    checkpoint, timeouts = fleet.trainer.checkpoint, fleet.timeouts
    if checkpoint.saves and checkpoint.timeout_s > timeouts.checkpoint_s:
        raise ValueError(
            f"trainer.checkpoint.timeout_s={checkpoint.timeout_s:g} is more than timeouts.checkpoint_s="
            f"{timeouts.checkpoint_s:g}, after which the run stops: raise that too"
        )
    if not has_lora(fleet):
        return
    if checkpoint.saves and checkpoint.shared_folder is not None and not resumes:
        adapter = checkpoint.shared_folder / ADAPTER_FOLDER
        if adapter.exists():
            raise ValueError(
                f"trainer.checkpoint.folder={checkpoint.folder!r}: {adapter} is there already, of a run that "
                "ended; move it away"
            )
    for number, converter in enumerate(fleet.trainer.converters):
        if warms_up and isinstance(converter, LoRA.Config) and converter.initial_adapter is not None:
            raise ValueError(
                f"trainer.converters.{number}.initial_adapter={converter.initial_adapter!r} with a warm-up, "
                "which starts from weights without it: set warmup to None, and hf_assets_path to the weights "
                "that the adapter belongs to"
            )


def check_memory(fleet: FleetConfig, *, model_spec: ModelSpec, memory_bytes: int) -> None:
    """On a machine without GPUs: the trainer's ranks together against all of its memory.

    A GPU's memory is checked by each rank, which knows it, before it allocates anything.

    Raises:
        ValueError: names the model, both sizes and what they are made of; with compile this is a warning.
    """
    trainer = fleet.trainer
    degrees = trainer.parallelism.degrees(trainer.num_procs)
    rank = trainer.estimate_memory(model_spec, degrees=degrees, on_gpu=False)
    if trainer.num_procs * rank.total > memory_bytes:
        too_large(
            f"{model_spec.name} {model_spec.flavor} needs {trainer.num_procs * rank.total / 1e9:.0f} GB on "
            f"{trainer.num_procs} rank{'s' if trainer.num_procs > 1 else ''} of the trainer, "
            f"{rank.describe()}; this machine has {memory_bytes / 1e9:.0f} GB and no GPU",
            compiled=trainer.compile.enable,
        )


def check_replicas(fleet: FleetConfig, *, num_cores: int, memory_bytes: int) -> None:
    """On a machine without GPUs, whose devices are its cores: the generators against cores and memory.

    Raises:
        ValueError: names the field, and what there is.
    """
    generator = fleet.generator
    num_procs = generator.num_replicas * generator.tensor_parallel_degree
    if generator.num_replicas > num_cores:
        raise ValueError(
            f"generator.num_replicas={generator.num_replicas}: must be at most {num_cores}, the cores of "
            "this machine, which has no GPU"
        )
    if num_procs * generator.cpu_kv_cache_gib * 2**30 > memory_bytes:
        raise ValueError(
            f"generator.cpu_kv_cache_gib={generator.cpu_kv_cache_gib:g} of each of {num_procs} generator "
            f"processes is more than the {memory_bytes / 2**30:.0f} GiB of this machine, which has no GPU"
        )


def check_waits(fleet: FleetConfig, *, store: WeightStore.Config) -> None:
    """Deadlines within deadlines, of which the inner one says more.

    Raises:
        ValueError: names both fields.
    """
    if store.timeout_s > fleet.timeouts.sync_s:
        raise ValueError(
            f"weights.timeout_s={store.timeout_s:g} is more than timeouts.sync_s={fleet.timeouts.sync_s:g}, "
            "after which the run stops: raise that too"
        )
