"""What is said of a run before it starts: plain data, for a reader's eye (`text.py`) or as JSON.

Bytes are bytes, times are in steps. Where something cannot be known, an `Unknown` says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Unknown:
    """What cannot be said here."""

    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Both ends included."""

    fewest: int
    most: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """What the run is explained for."""

    on_gpu: bool
    """Whether trainer and generators compute on GPUs."""
    num_gpus: int
    """Of this machine, or of the one that is assumed; 0 where hosts bring theirs."""
    gpu_bytes: int | None
    """Memory of each; None on a CPU."""
    assumed: str
    """Why these are not this machine's; empty: they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A field that is not as its registry function has it; values as in config.json."""

    path: str
    value: Any
    registry: Any
    """None too where the registry function has no such field."""
    source: str
    """Where its value comes from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigView:
    """The resolved config."""

    module: str
    function: str
    changes: tuple[Change, ...]
    values: dict[str, Any]
    """Every leaf by its path, as in config.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepArithmetic:
    """Of one step: a round of generate, train, publish."""

    num_prompts: int
    num_samples: int
    """Of each prompt."""
    samples: int
    optimizer_steps: int
    samples_of_optimizer_step: int
    data_ranks: int
    """Ranks of the trainer that see different samples."""
    sample_tokens_most: int
    """Of one sample, prompt and replies together."""
    reply_tokens_most: int
    """That the model produces in the step, all samples together."""
    prompt_tokens: Range | Unknown
    """Of the prompts of step 1."""
    trained_tokens: Range
    """Inputs of the trainer in the step, one fewer than its tokens for each sample: where every reply is one
    token, and where every reply is as long as it may be."""
    micro_batches: Range
    """Of each rank in the step, in these two cases. A mix of lengths rarely needs one more than the second,
    where ranks cannot be given equally many."""
    exact_prompts: bool
    """Whether the last two are of the prompts of step 1, and not of bounds on any prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunArithmetic:
    """Of the whole run."""

    num_steps: int
    done_steps: int
    """Of a run that goes on: up to its newest checkpoint."""
    optimizer_steps: int
    samples: int
    reply_tokens_most: int
    """Of training."""
    publishes: int
    """Of the weights, the first before step 1."""
    evaluations: tuple[int, ...]
    """The steps after which there is one; 0 is before step 1."""
    eval_problems: dict[str, int] | Unknown
    """Of each set."""
    eval_replies_of_problem: int
    checkpoints: tuple[int, ...]
    """The steps after which one is saved."""
    warmup_steps: int
    """Supervised, before step 1, unless an earlier run made them; 0: none."""
    warmup_demonstrations: int
    """Of each of these steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """One process of a role."""

    rank: int
    host: int
    """Of its role's, from 0."""
    gpu: int | None
    group: str
    """Which part of the role's work its row of ranks has, such as `shard 1`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolePlace:
    """Where a role runs."""

    role: str
    hosts: str | None
    """Name of its group of hosts; None: where the controller runs."""
    num_hosts: int
    threads: int
    """Of each process."""
    shape: str
    """How its processes share the work."""
    ranks: tuple[RankPlace, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMemory:
    """Of each rank, estimated."""

    num_ranks: int
    parts: dict[str, int]
    """Bytes, as `rl.training.memory.MemoryEstimate` has them."""
    held: int
    """Between steps, and in them."""
    total: int
    """At the peak of a step; not all parts are there at once."""
    available: int
    """Of a rank's GPU, or of this machine for all ranks."""
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorMemory:
    """Of each rank of each generator."""

    num_ranks: int
    """Of all generators."""
    weights: int
    cache: int
    """Keys and values; on a GPU an upper bound, as vLLM takes its activations off its share too."""
    cache_tokens: int
    """That fit into the cache."""
    longest_requests: int
    """Requests of generator.max_model_len tokens that the cache holds at once."""
    available: int
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerMemory:
    """Of the controller's machine, and of the trainer's hosts."""

    rollouts: int
    """Token ids, logprobs and versions of all rollouts that may be outstanding at once, at their longest."""
    shared_weights: int
    """Shared memory for published weights, of all hosts of the trainer together; 0 where none is used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    trainer: TrainerMemory | Unknown
    generator: GeneratorMemory | Unknown
    controller: ControllerMemory | Unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class Staleness:
    """How old the weights may be that drew a token, when it is trained on."""

    steps: int
    updates: int
    """Optimizer steps, which is how policy versions count."""
    groups_ahead: int
    """Prompts whose samples may be outstanding at once."""
    sentence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncBytes:
    """Of one publish of the weights."""

    num_tensors: int
    pushed: int
    """By all trainer ranks together, in the generator's dtype."""
    pulled_by_rank: int
    """By each rank of each generator."""
    pulled: int
    """By all."""
    dtype: str
    way: str
    """How they travel."""
    publishes: int
    run_pushed: int
    """In the whole run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionNote:
    """An option, and what there is to say of it."""

    path: str
    """Ends in `.*` for a component with all of its fields."""
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    refused: tuple[str, ...]
    """Why this config cannot run anywhere, as a run would say it: all reasons, not the first alone."""
    refused_here: tuple[str, ...]
    """Why it cannot run on this machine, as it is now."""
    set_in_vain: tuple[OptionNote, ...]
    """Without effect, though they are not at their default."""
    idle: tuple[OptionNote, ...]
    """Others without effect."""
    fixed: tuple[OptionNote, ...]
    """Any other value would be refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    devices: Devices
    model: str
    config: ConfigView
    step: StepArithmetic | Unknown
    run: RunArithmetic | Unknown
    layout: tuple[RolePlace, ...] | Unknown
    memory: Memory
    staleness: Staleness
    sync: SyncBytes | Unknown
    options: Options
    unknown: tuple[str, ...]
    """What was not looked at, or cannot be known without files that are not there."""
