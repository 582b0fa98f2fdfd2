"""Options without effect because of what another component says, or what the run is: the rest of
`rl.config.effect`, whose conditions stand beside the fields."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields

from actors.explain.known import Known
from rl.distributed.mesh import Degrees
from rl.models.qwen3_moe.model import MoE


def run_effects(known: Known, *, on_gpu: bool) -> Iterator[tuple[str, str]]:
    """Path of a field, and why it changes nothing."""
    yield from _of_generator(known, on_gpu=on_gpu)
    yield from _of_trainer(known, on_gpu=on_gpu)
    yield from _of_loop(known)
    config = known.config
    if config.weights.transport == "auto" and config.launch.hosts in ("this", "process"):
        yield "weights.rdma", "all processes are on one machine, and share its memory"
    if not config.sinks.enabled:
        for name in ("write_s", "close_s"):
            yield f"sinks.{name}", "nothing but the console and metrics.jsonl is written"


def _of_generator(known: Known, *, on_gpu: bool) -> Iterator[tuple[str, str]]:
    config = known.config
    if config.loop.max_policy_age == 0:
        yield "generator.on_update", "with loop.max_policy_age=0 nothing is generated while weights change"
    for name in ("cpu_kv_cache_gib",) if on_gpu else ("gpu_memory_utilization", "enforce_eager"):
        yield f"generator.{name}", f"the generator computes on {'a GPU' if on_gpu else 'a CPU'}"
    if not config.launch.share_gpus:
        yield "generator.can_sleep", "with launch.share_gpus=False nobody lets it sleep"
    if config.generator.tensor_parallel_degree == 1:
        yield "generator.rank_timeout_s", "with generator.tensor_parallel_degree=1 no rank waits for another"


def _of_trainer(known: Known, *, on_gpu: bool) -> Iterator[tuple[str, str]]:
    trainer = known.config.trainer
    degrees: Degrees | None = None
    with suppress(ValueError):  # refused anyway
        degrees = trainer.parallelism.degrees(trainer.num_procs)
    if trainer.num_procs == 1:
        for field in fields(trainer.comm):
            yield f"trainer.comm.{field.name}", "with trainer.num_procs=1 no rank waits for another"
    if degrees is not None and degrees.dp_replicate * degrees.fsdp == 1 and not trainer.training.cpu_offload:
        whole = "no rank shares parameters or samples with another"
        yield "trainer.parallelism.reshard_after_forward", whole
        yield "trainer.training.reduce_dtype", whole
    if degrees is not None and degrees.tp == 1:
        yield (
            "trainer.parallelism.loss_parallel",
            "with trainer.parallelism.tensor_parallel_degree=1 each rank has the whole vocabulary",
        )
    why = _why_no_prompt_is_shared(known, degrees)
    if why:
        yield "trainer.training.share_prompts", why
    if not on_gpu:
        yield (
            "trainer.training.cpu_offload",
            "on a CPU it changes the way of the tensors alone",
        )


def _why_no_prompt_is_shared(known: Known, degrees: Degrees | None) -> str:
    """Empty where some may be."""
    if degrees is not None and degrees.cp > 1:
        return f"with trainer.parallelism.context_parallel_degree={degrees.cp} each sample brings its prompt"
    if known.config.trainer.compile.includes("model"):
        return "with trainer.compile.enable=True each sample brings its prompt"
    if isinstance(known.spec.model.block.feed_forward, MoE.Config):  # type: ignore[attr-defined]
        return "a mixture of experts counts each sample's prompt"
    return ""


def _of_loop(known: Known) -> Iterator[tuple[str, str]]:
    config = known.config
    if known.single_turn:
        for name in ("max_turns", "step_timeout_s", "timeout_s"):
            yield f"loop.episode.{name}", "the task's episodes are one reply"
    if known.task is not None and not known.task.rubric(seed=config.seed).has_async_functions:
        yield "reward.max_concurrency", "the task has no async reward function"
    exact = config.batch_invariant and config.loop.max_policy_age == 0 and config.loop.num_minibatches == 1
    if exact:
        for field in fields(config.trainer.loss):  # type: ignore[arg-type]
            if field.name.startswith("clip_"):
                yield (
                    f"trainer.loss.{field.name}",
                    "one update on tokens of the same weights, in the batch-invariant mode: every ratio is 1",
                )
