"""Division of a model into the stages of a pipeline, and the rank of each stage.

1F1B on 2 ranks              stage 0 on rank 0, 1 on 1
Interleaved1F1B on 2         stages 0 and 2 on rank 0, 1 and 3 on 1
ZBVZeroBubble on 2           stages 0 and 3 on rank 0, 1 and 2 on 1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from rl.distributed.mesh import ParallelismConfig
from rl.distributed.schedule_private import FileSchedule, read_csv_schedule

STAGES_OF_RANK = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}
"""Stages of each rank by schedule, unless layers_per_stage says otherwise."""
FOLDED = "ZBVZeroBubble"
"""Schedule that returns through the ranks: the first rank has the first stage and the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """The stages of a model, in order."""

    modules: tuple[tuple[str, ...], ...]
    """Names of the modules of each stage."""
    ranks: tuple[int, ...]
    """Rank of each stage on the `pp` axis."""
    file: FileSchedule | None = None
    """The schedule, where a file describes it."""

    def of_rank(self, rank: int) -> list[int]:
        """Return the stages of a rank, in order."""
        return [stage for stage, owner in enumerate(self.ranks) if owner == rank]

    def list_modules(self, rank: int) -> set[str]:
        """Return the names of the modules of a rank's stages."""
        return {name for stage in self.of_rank(rank) for name in self.modules[stage]}

    def check_trained(self, trained: Iterable[str]) -> None:
        """Raise ValueError for a stage without any of the trained parameters."""
        # The backward of such a stage would fail, after minutes of loading.
        trained = list(trained)
        for stage, modules in enumerate(self.modules):
            # The head's adapter is beside the head.
            own = tuple(f"{module}{end}" for module in modules for end in (".", "_lora."))
            if not any(name.startswith(own) for name in trained):
                raise ValueError(
                    f"stage {stage} of the pipeline ({', '.join(modules)}) has no parameter that "
                    "is trained: adapt layers of every stage (converters), or set "
                    "parallelism.pipeline_parallel_degree to 1"
                )

    def count_held(self, rank: int, *, schedule: str) -> float:
        """Return for how many micro-batches a rank keeps activations at once.

        GPipe keeps all; here as if there were one for each stage.
        """
        if self.file is not None:
            return self.file.count_held(rank)
        # Later ranks begin later and so hold fewer: the last takes each backward at once.
        size, num_stages = max(self.ranks) + 1, len(self.ranks)
        if schedule == "1F1B":
            return size - rank
        if schedule == "Interleaved1F1B":
            return (num_stages - size + 2 * (size - rank - 1) + 1) * size / num_stages
        return size


def plan_stages(config: ParallelismConfig, modules: Sequence[str]) -> StagePlan:
    """Divide a model's modules (embed_tokens, layers.0, ..., norm, lm_head), in order, into stages.

    Raises ValueError for a division that the schedule or the model does not allow.
    """
    degree, schedule = config.pipeline_parallel_degree, config.pipeline_parallel_schedule
    path, file = config.pipeline_parallel_schedule_csv, None
    num_default = STAGES_OF_RANK[schedule] * degree
    if path is not None:
        file = read_csv_schedule(path, num_ranks=degree)
        num_default = len(file.ranks)

    divided = _divide(config, modules, default=num_default)
    if file is None:
        ranks = _assign_ranks(schedule, degree=degree, num_stages=len(divided))
    elif len(divided) == len(file.ranks):
        ranks = file.ranks
    else:
        raise ValueError(
            f"pipeline_parallel_schedule_csv={path!r} has {len(file.ranks)} stages, but the model "
            f"is divided into {len(divided)}"
        )
    plan = StagePlan(modules=divided, ranks=ranks, file=file)
    # The last stage computes the loss, for which it needs both.
    if "norm" not in plan.modules[-1]:
        raise ValueError(
            "module_fqns_per_model_part: norm and lm_head must be in one stage, the last"
        )
    return plan


def _assign_ranks(schedule: str, *, degree: int, num_stages: int) -> tuple[int, ...]:
    """Return the rank of each stage; raise ValueError for a number that the schedule refuses."""
    per_rank, rest = divmod(num_stages, degree)
    several = schedule == "Interleaved1F1B"
    if rest or (per_rank < 2 if several else per_rank != STAGES_OF_RANK[schedule]):
        valid = "2 or more" if several else STAGES_OF_RANK[schedule]
        raise ValueError(
            f"pipeline_parallel_schedule={schedule!r} on pipeline_parallel_degree={degree} "
            f"ranks: the model is divided into {num_stages} stages: must be {valid} for each "
            "rank"
        )
    ranks: list[int] = []
    for turn in range(per_rank):
        is_return = schedule == FOLDED and turn % 2 == 1
        ranks += reversed(range(degree)) if is_return else range(degree)
    return tuple(ranks)


def _divide(
    config: ParallelismConfig, modules: Sequence[str], *, default: int
) -> tuple[tuple[str, ...], ...]:
    """Return the modules of each stage; their number is `default` unless the config names it."""
    if config.module_fqns_per_model_part is not None:
        parts = []
        for part in config.module_fqns_per_model_part:
            names = part.split(",")
            parts.append(tuple(name.strip() for name in names))
        if list(chain.from_iterable(parts)) != list(modules):
            raise ValueError(
                f"module_fqns_per_model_part={config.module_fqns_per_model_part}: must have, in "
                f"this order and once each, {', '.join(modules)}"
            )
        return tuple(parts)

    # The embedding and the head count as some layers, so that stages take about as long.
    layers = [name for name in modules if name.startswith("layers.")]
    first = config.pipeline_parallel_first_stage_less_layers
    last = config.pipeline_parallel_last_stage_less_layers
    total, of_stage = len(layers) + first + last, config.pipeline_parallel_layers_per_stage
    num_stages = default if of_stage is None else -(-total // of_stage)
    counts = [total // num_stages + (stage < total % num_stages) for stage in range(num_stages)]
    counts[0] -= first
    counts[-1] -= last
    if min(counts) < 1:
        raise ValueError(
            f"pipeline_parallel_degree={config.pipeline_parallel_degree}: {len(layers)} layers "
            f"cannot be divided into {num_stages} stages with "
            f"pipeline_parallel_first_stage_less_layers={first} and "
            f"pipeline_parallel_last_stage_less_layers={last}: a stage would have {min(counts)} "
            "layers: lower these, or the number of stages"
        )

    rest = iter(layers)
    stages = [[next(rest) for _ in range(count)] for count in counts]
    begin, end = modules.index(layers[0]), modules.index(layers[-1]) + 1
    stages[0] = [*modules[:begin], *stages[0]]
    stages[-1] += modules[end:]
    return tuple(map(tuple, stages))
