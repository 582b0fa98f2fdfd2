"""Rules between the options of a run, all in one list.

A run raises the first that is broken, `--explain` shows every one, and `tests/config/test_rules.py`
has an example for each. What needs the model, the devices or a file is checked by functions
(`actors.preflight.checks`, `rl.training.checks`).
"""

from __future__ import annotations

import math
from typing import Any

from rl.config.rules import (
    Check,
    Rule,
    above,
    at_least,
    at_most,
    below,
    none_of,
    one_of,
    same_as,
    satisfies,
)
from rl.distributed.stages import FOLDED
from rl.models.batch_invariant.model import ROW_MULTIPLE


def is_divisor(number: int, total: int) -> bool:
    """Return whether a number divides a total."""
    return total % number == 0


def is_at_most_one_more(number: int, other: int) -> bool:
    """Return whether a number is at most one more than another."""
    return number <= other + 1


def is_bit_exact(converter: Any) -> bool:
    """Return whether the trainer's products are those of the generators."""
    return bool(converter.keeps_bits)


def is_whole_rows(num_tokens: int | None) -> bool:
    """Return whether chunks of this many tokens consist of whole groups of rows."""
    return num_tokens is None or num_tokens % ROW_MULTIPLE == 0


IS_SET = satisfies("set", lambda value: value is not None)
COMPILES_BLOCKS = satisfies("with 'model'", lambda components: "model" in components)
WHOLE_ROWS = satisfies(f"None or a multiple of {ROW_MULTIPLE}", is_whole_rows)
KEEPS_BITS = satisfies("a converter that keeps the bits", is_bit_exact)

# Lengths: a sample that fits into the generator must fit everywhere after it, or the run stops in
# the middle.
LENGTHS = (
    Rule(
        must={"loop.sampling.max_tokens": below("generator.max_model_len")},
        because="a prompt needs room too",
    ),
    Rule(
        must={
            "trainer.training.max_tokens_per_microbatch": at_least("generator.max_model_len"),
            "trainer.training.max_sequence_length": at_least("generator.max_model_len"),
        },
        because="the longest sample would not fit",
    ),
    Rule(
        when={"loop.overlong.enable": True},
        must={"loop.overlong.buffer_tokens": at_most("loop.sampling.max_tokens")},
        because="the buffer is the end of a completion",
    ),
)

# Steps and groups of the loop.
STEPS = (
    Rule(
        must={
            "loop.num_minibatches": Check(
                text="a divisor of", compare=is_divisor, limit="loop.groups_per_batch"
            )
        },
        because="each optimizer step takes as many groups",
    ),
    Rule(
        must={
            "loop.publish_every": Check(
                text="at most one more than",
                compare=is_at_most_one_more,
                limit="loop.max_off_policy_steps",
            )
        },
        because="no batch could meet the bound on its staleness",
    ),
    Rule(
        when={"loop.group_size": 1},
        must={
            "loop.advantage.baseline": none_of("group_mean", "leave_one_out"),
            "loop.advantage.scale": none_of("group_std"),
            "loop.drop_zero_advantage_groups": False,
        },
        because="the samples of a prompt are compared: for one sample a prompt take baseline "
        "'batch_mean' with scale 'batch_std' (REINFORCE++), and keep all groups",
    ),
    Rule(
        when={"loop.group_size": 1, "loop.groups_per_batch": 1},
        must={"loop.advantage.baseline": none_of("batch_mean")},
        because="the only sample of a batch is its own baseline",
    ),
)

# Agents ask for sampling of their own, which training must not follow.
AGENTS = (
    Rule(
        when={"agents.honours_sampling": True},
        must={"loop.num_steps": 0},
        because="logprobs must be those of the policy that is trained",
    ),
)

# The reference policy costs one more forward a step, so that it is never made by default.
REFERENCE = (
    Rule(
        when={"loop.kl_reward.coef": above(0)},
        must={"trainer.reference.enable": True},
        because="the KL needs a reference policy",
    ),
    Rule(
        when={"trainer.loss.kl_coef": above(0)},
        must={"trainer.reference.enable": True},
        because="the KL needs a reference policy",
    ),
)

# Each of these options changes the order of a sum, and with it the last bit of a logprob. The mode
# promises equal bits, so that it is refused instead of being nearly kept.
BATCH_INVARIANT = (
    Rule(
        when={"batch_invariant": True},
        must={
            "generator.dtype": same_as("trainer.training.param_dtype"),
            "generator.tensor_parallel_degree": same_as(
                "trainer.parallelism.tensor_parallel_degree"
            ),
        },
        because="trainer and generator have to compute the same bits",
    ),
    Rule(
        when={"batch_invariant": True},
        must={"trainer.converters.*": KEEPS_BITS},
        because="the generator has the plain weights, whose products round differently",
    ),
    Rule(
        when={"batch_invariant": True},
        must={"trainer.compile.enable": False, "trainer.training.logits_chunk_tokens": WHOLE_ROWS},
        because="other kernels round differently",
    ),
    Rule(
        when={"batch_invariant": True},
        must={"trainer.parallelism.tensor_parallel_degree": at_most(2)},
        because="a sum over more ranks depends on the order that a collective takes",
    ),
    Rule(
        when={"batch_invariant": True, "trainer.parallelism.tensor_parallel_degree": above(1)},
        must={"trainer.parallelism.loss_parallel": False},
        because="the generator normalises whole logits, in another order than sums over ranks",
    ),
)

STEP_IN_BACKWARD = (
    Rule(
        when={"trainer.optimizer.early_step_in_backward": True},
        must={
            "trainer.optimizer.name": one_of("AdamW", "Adam"),
            # A loss without the field is checked by its first call.
            "trainer.loss.normalization": "none",
            "trainer.training.max_norm": math.inf,
            "trainer.training.cpu_offload": False,
            "trainer.parallelism.pipeline_parallel_degree": 1,
        },
        because="a parameter is stepped before the other gradients are known",
    ),
    Rule(
        when={"trainer.optimizer.early_step_in_backward": True},
        must={"warmup": None},
        because="the loss of a warm-up is divided by its number of tokens",
    ),
)

# The zero-bubble schedules split a block's backward, which neither checkpointing nor compiled
# blocks can follow.
PIPELINE = (
    Rule(
        when={"trainer.parallelism.pipeline_parallel_degree": above(1)},
        must={"trainer.training.reduce_dtype": "float32"},
        because="FSDP would add the gradients of micro-batches in it",
    ),
    # A schedule from a file is judged when the file is read (rl.training.checks).
    Rule(
        when={
            "trainer.parallelism.pipeline_parallel_schedule": FOLDED,
            "trainer.parallelism.pipeline_parallel_degree": above(1),
            "trainer.parallelism.pipeline_parallel_schedule_csv": None,
        },
        must={"trainer.activation_checkpoint.mode": "none"},
        because="the schedule takes the backwards of inputs and of weights apart",
    ),
    Rule(
        when={
            "trainer.parallelism.pipeline_parallel_schedule": FOLDED,
            "trainer.parallelism.pipeline_parallel_degree": above(1),
            "trainer.parallelism.pipeline_parallel_schedule_csv": None,
            "trainer.compile.components": COMPILES_BLOCKS,
        },
        must={"trainer.compile.enable": False},
        because="the schedule takes the backwards of inputs and of weights apart",
    ),
)

EXPERTS = (
    Rule(
        when={"trainer.experts.force_load_balance": True},
        must={"trainer.experts.load_balance_rate": 0},
        because="scores and biases are ignored",
    ),
)

# Where the weights come from: an option that would be ignored is refused, since a run that starts
# from other weights than it was told to looks like any other run.
STARTING_WEIGHTS = (
    Rule(
        when={"warmup": IS_SET},
        must={"trainer.converters.*.initial_adapter": None},
        because="a warm-up starts from weights without the adapter: set warmup to None, and "
        "hf_assets_path to the weights that the adapter belongs to",
    ),
    Rule(
        when={"trainer.checkpoint.enable": False},
        must={"trainer.checkpoint.initial_load_path": None},
        because="nothing is loaded",
    ),
    Rule(
        when={"trainer.checkpoint.initial_load_model_only": False},
        must={"trainer.checkpoint.initial_load_path": IS_SET},
        because="there is no run to continue",
    ),
    Rule(
        when={"trainer.checkpoint.initial_load_model_only": False},
        must={"trainer.checkpoint.initial_load_in_hf": False},
        because="a Hugging Face folder holds only the model",
    ),
)

# Taking turns needs one machine, and steps in which either side waits for the other.
SHARED_GPUS = (
    Rule(
        when={"launch.share_gpus": True},
        must={"loop.max_off_policy_steps": 0},
        because="trainer and generators take turns",
    ),
    Rule(
        when={"launch.share_gpus": True},
        must={"launch.hosts": "this", "launch.generator_gpus": None},
        because="the generators have the trainer's devices",
    ),
)

HOSTS = (
    Rule(
        when={"launch.hosts": "this"},
        must={
            "launch.trainer_hosts": 1,
            "launch.generator_hosts": 1,
            "launch.replicas_per_host": 1,
            "launch.reward_hosts": 0,
        },
        because="this machine is one host",
    ),
    Rule(
        when={"launch.hosts": one_of("this", "process")},
        must={"launch.gpus_per_host": None},
        because="GPUs of this machine are counted: choose them by launch.trainer_gpus and "
        "launch.generator_gpus",
    ),
    Rule(
        when={"launch.replicas_per_host": above(1)},
        must={"launch.generator_hosts": 1},
        because="replicas that share a host need to fit on it",
    ),
    Rule(
        when={"launch.hosts": one_of("slurm", "kubernetes")},
        must={"launch.isolate_network": one_of(None, False)},
        because="the hosts of a cluster reach each other over its network",
    ),
    Rule(
        when={"launch.hosts": "kubernetes"},
        must={
            "launch.kubernetes.image": satisfies("the name of an image", lambda image: bool(image))
        },
        because="each pod starts from an image with this project",
    ),
)

# A part that may wait longer than the call around it would never report what it waited for.
TIMES = (
    Rule(
        must={"weights.timeout_s": at_most("timeouts.sync_s")},
        because="the run stops after that: raise timeouts.sync_s too",
    ),
    Rule(
        when={"trainer.checkpoint.saves": True},
        must={"trainer.checkpoint.timeout_s": at_most("timeouts.checkpoint_s")},
        because="the run stops after that: raise timeouts.checkpoint_s too",
    ),
    Rule(
        must={"recovery.max_pause_s": at_least("recovery.pause_s")},
        because="the wait before a restart grows from the one to the other",
    ),
)

RULES = (
    *HOSTS,
    *SHARED_GPUS,
    *STEPS,
    *LENGTHS,
    *AGENTS,
    *REFERENCE,
    *BATCH_INVARIANT,
    *STEP_IN_BACKWARD,
    *PIPELINE,
    *EXPERTS,
    *STARTING_WEIGHTS,
    *TIMES,
)
"""All rules, in the order in which a run checks them: first what the placement builds on."""
