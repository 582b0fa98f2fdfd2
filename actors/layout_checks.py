"""What is checked of degrees, lengths and devices before anything starts, and of settings that go together.

Every error names field, value and what is valid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

from actors.fleet import place_fleet
from actors.fleet_config import FleetConfig
from actors.roles import trains_on_gpu
from actors.trainer import PolicyTrainer
from rl.config.configurable import Configurable
from rl.loop import Loop
from rl.models.spec import ModelSpec
from rl.training import layout
from rl.training.checkpointer import check_device
from rl.training.policy import check_sequence_length
from rl.training.reference import check_reference
from rl.training.schedule import check_total_steps


def check_layout(fleet: FleetConfig, *, model_spec: ModelSpec, loop: Loop.Config, num_gpus: int) -> None:
    """Degrees, lengths and devices; `num_gpus` of this machine.

    Raises:
        ValueError: names the field.
    """
    for check in layout_checks(fleet, model_spec=model_spec, loop=loop, num_gpus=num_gpus):
        check()


def layout_checks(
    fleet: FleetConfig, *, model_spec: ModelSpec, loop: Loop.Config, num_gpus: int
) -> list[Callable[[], object]]:
    """The parts of `check_layout`, in its order: each can be made whatever the others say."""
    trainer, generator = fleet.trainer, fleet.generator
    on_gpu = trains_on_gpu(fleet.launch, num_gpus=num_gpus)
    named = partial(_named, trainer)
    checks: list[Callable[[], object]] = [
        trainer.parallelism.__post_init__,  # A field may have been edited since.
        # First what no number of processes could mend.
        named(check_divisible, trainer.parallelism.tensor_parallel_degree, model_spec=model_spec),
        named(model_spec.check_layout, model_spec.model, trainer.parallelism),
        named(
            layout.check_layout,
            parallelism=trainer.parallelism,
            activation_checkpoint=trainer.activation_checkpoint,
            compile=trainer.compile,
            world_size=trainer.num_procs,
            device_type="cuda" if on_gpu else "cpu",
        ),
        named(trainer.check_model, model_spec),
        partial(generator.check_model, model_spec.model, on_gpu=on_gpu),
        partial(check_lengths, fleet, loop=loop),
        partial(
            check_total_steps,
            trainer.lr_scheduler,
            num_steps=loop.num_steps,
            num_minibatches=loop.num_minibatches,
        ),
        partial(_check_kl_reward, fleet, loop=loop),
        named(check_reference, trainer.reference, loss=trainer.loss, kl_in_reward=loop.kl_reward.coef > 0),
        partial(_check_overlong, loop),
        partial(check_sequence_length, model_spec, trainer.training),
        partial(check_device, trainer.checkpoint, has_gpu=on_gpu),
        partial(place_fleet, fleet, num_gpus=num_gpus),
    ]
    if model_spec.batch_invariant:
        checks.append(partial(check_same_arithmetic, fleet))
    if fleet.launch.share_gpus:
        checks.append(partial(check_turns, fleet, loop=loop))
    return checks


def check_lengths(fleet: FleetConfig, *, loop: Loop.Config) -> None:
    """The longest sample has room for a prompt, and fits the trainer.

    Raises:
        ValueError: names both fields.
    """
    max_model_len, training = fleet.generator.max_model_len, fleet.trainer.training
    if loop.sampling.max_tokens >= max_model_len:
        raise ValueError(
            f"loop.sampling.max_tokens={loop.sampling.max_tokens} leaves no room for a prompt in "
            f"generator.max_model_len={max_model_len}"
        )
    if training.max_tokens_per_microbatch < max_model_len:
        raise ValueError(
            f"trainer.training.max_tokens_per_microbatch={training.max_tokens_per_microbatch} is less than "
            f"generator.max_model_len={max_model_len}: the longest sample would not fit a micro-batch"
        )
    max_length = training.max_sequence_length
    if max_length is not None and max_length < max_model_len:
        raise ValueError(
            f"trainer.training.max_sequence_length={max_length} is less than "
            f"generator.max_model_len={max_model_len}: the longest sample would be refused"
        )


def _check_kl_reward(fleet: FleetConfig, *, loop: Loop.Config) -> None:
    if loop.kl_reward.coef > 0 and not fleet.trainer.reference.enable:
        raise ValueError(
            f"loop.kl_reward.coef={loop.kl_reward.coef} needs the reference policy: must be 0, or "
            "trainer.reference.enable True"
        )


def _check_overlong(loop: Loop.Config) -> None:
    try:
        loop.overlong.check(max_tokens=loop.sampling.max_tokens)
    except ValueError as error:
        raise ValueError(f"loop.overlong.{error} (loop.sampling.max_tokens)") from error


def _named(
    trainer: PolicyTrainer.Config, check: Callable[..., object], *args: Any, **kwargs: Any
) -> Callable[[], object]:
    """The check, whose errors name the options of `trainer`."""

    def named() -> None:
        with named_as_options(trainer):
            check(*args, **kwargs)

    return named


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
