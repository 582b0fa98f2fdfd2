"""Pipeline parallelism: which layers each rank has, and the way of the micro-batches through them.

A model is divided into stages. Each rank of the `pp` axis has one of them, or several, and a schedule of
`torch.distributed.pipelining` orders their forwards and backwards. Between stages travel hidden states, and their
gradients on the way back. All micro-batches of a call have the same length.

Every rank has all micro-batches. What a schedule passes on is the number of one; a hook on each stage replaces it
by the stage's arguments. The last stage computes the loss within its forward, so that its result is one number.

Shape legend: t tokens of a micro-batch on one context- and tensor-parallel rank, E model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from rl.distributed.compat import FileSchedule, csv_schedule, read_csv_schedule
from rl.distributed.mesh import ParallelismConfig
from rl.distributed.sharding import local_tensor, reshard, whole_tensor

T = TypeVar("T")

STAGES_OF_RANK = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}
"""Stages of each rank by schedule, unless layers_per_stage says otherwise."""
FORWARDS_OF_STAGE = 8
"""Micro-batches a stage of a forward without backward: each is held from its arrival until all are sent."""
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

    def modules_of(self, rank: int) -> set[str]:
        """Return the names of the modules of a rank's stages."""
        return {name for stage in self.of_rank(rank) for name in self.modules[stage]}

    def check_trained(self, trained: Iterable[str]) -> None:
        """Raise ValueError for a stage without any of the trained parameters, whose backward would fail."""
        trained = list(trained)
        for stage, modules in enumerate(self.modules):
            # The head's adapter is beside the head.
            own = tuple(f"{module}{end}" for module in modules for end in (".", "_lora."))
            if not any(name.startswith(own) for name in trained):
                raise ValueError(
                    f"stage {stage} of the pipeline ({', '.join(modules)}) has no parameter that is trained: adapt "
                    "layers of every stage (converters), or set parallelism.pipeline_parallel_degree to 1"
                )

    def held_at_once(self, rank: int, *, schedule: str) -> float:
        """Return for how many micro-batches a rank keeps activations at once.

        GPipe keeps all; here as if there were one for each stage.
        """
        if self.file is not None:
            return self.file.held_at_once(rank)
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
    path, file, needed = config.pipeline_parallel_schedule_csv, None, STAGES_OF_RANK[schedule] * degree
    if path is not None:
        file = read_csv_schedule(path, num_ranks=degree)
        needed = len(file.ranks)
    divided = _divide(config, modules, default=needed)
    num_stages = len(divided)
    if file is not None:
        ranks = file.ranks
        if num_stages != needed:
            raise ValueError(
                f"pipeline_parallel_schedule_csv={path!r} has {needed} stages, but the model is divided into "
                f"{num_stages}"
            )
    else:
        per_rank, rest = divmod(num_stages, degree)
        several = schedule == "Interleaved1F1B"
        if rest or (per_rank < 2 if several else per_rank != STAGES_OF_RANK[schedule]):
            valid = "2 or more" if several else STAGES_OF_RANK[schedule]
            raise ValueError(
                f"pipeline_parallel_schedule={schedule!r} on pipeline_parallel_degree={degree} ranks: the model is "
                f"divided into {num_stages} stages: must be {valid} for each rank"
            )
        turns = [list(range(degree)), list(range(degree))[:: -1 if schedule == FOLDED else 1]]
        ranks = tuple(rank for turn in range(per_rank) for rank in turns[turn % 2])
    plan = StagePlan(modules=divided, ranks=ranks, file=file)
    if "norm" not in plan.modules[-1]:
        raise ValueError("module_fqns_per_model_part: norm and lm_head must be in one stage, the last")
    return plan


def _divide(
    config: ParallelismConfig, modules: Sequence[str], *, default: int
) -> tuple[tuple[str, ...], ...]:
    """Return the modules of each stage; `default` is the number of stages if nothing says otherwise."""
    if config.module_fqns_per_model_part is not None:
        parts = tuple(
            tuple(name.strip() for name in part.split(",")) for part in config.module_fqns_per_model_part
        )
        if [name for part in parts for name in part] != list(modules):
            raise ValueError(
                f"module_fqns_per_model_part={config.module_fqns_per_model_part}: must have, in this order and once "
                f"each, {', '.join(modules)}"
            )
        return parts
    layers = [name for name in modules if name.startswith("layers.")]
    first, last = (
        config.pipeline_parallel_first_stage_less_layers,
        config.pipeline_parallel_last_stage_less_layers,
    )
    total, of_stage = len(layers) + first + last, config.pipeline_parallel_layers_per_stage
    num_stages = default if of_stage is None else -(-total // of_stage)
    counts = [total // num_stages + (stage < total % num_stages) for stage in range(num_stages)]
    counts[0] -= first
    counts[-1] -= last
    if min(counts) < 1:
        raise ValueError(
            f"pipeline_parallel_degree={config.pipeline_parallel_degree}: {len(layers)} layers cannot be divided into "
            f"{num_stages} stages with "
            f"pipeline_parallel_first_stage_less_layers={first} and pipeline_parallel_last_stage_less_layers={last}: "
            f"a stage would have {min(counts)} layers: lower these, or the number of stages"
        )
    rest = iter(layers)
    stages = [[next(rest) for _ in range(count)] for count in counts]
    begin, end = modules.index(layers[0]), modules.index(layers[-1]) + 1
    stages[0] = [*modules[:begin], *stages[0]]
    stages[-1] += modules[end:]
    return tuple(map(tuple, stages))


@dataclass(frozen=True, kw_only=True, slots=True)
class Hidden:
    """Hidden states that travel between stages."""

    num_tokens: int
    width: int
    dtype: torch.dtype

    def like(self, *, device: torch.device | str = "meta", requires_grad: bool = False) -> Tensor:
        """Return an uninitialized [t, E]."""
        return torch.empty(
            self.num_tokens, self.width, dtype=self.dtype, device=device, requires_grad=requires_grad
        )


Arguments = Callable[[int, bool], tuple[Tensor, dict[str, Any]]]
"""(number of the micro-batch, whether the stage is the last) -> the model's input ids and other arguments."""


class Pipeline:
    """One rank's stages, and their connection to those of other ranks."""

    def __init__(
        self, config: ParallelismConfig, plan: StagePlan, *, axis: DeviceMesh, device: torch.device
    ) -> None:
        self.config, self.plan, self.device = config, plan, device
        self.group = axis.get_group()
        self.size, self.rank = axis.size(), axis.get_local_rank()
        self.stages = plan.of_rank(self.rank)
        """Numbers of this rank's stages."""
        self.num_stages = len(plan.ranks)
        self.parts: list[nn.Module] = []
        self.tied: tuple[Tensor | None, Tensor | None] = (None, None)
        """Weight of the embedding, if this rank has it, and the copy that serves as output head, if this rank has that;
        both None for a model whose head has a weight of its own."""
        self._arguments: Arguments | None = None

    def attach(self, parts: Sequence[nn.Module]) -> None:
        """Take this rank's stages, sharded, in order."""
        self.parts = list(parts)
        for stage, part in zip(self.stages, parts, strict=True):
            # Before FSDP's own hook, which casts the arguments.
            part.register_forward_pre_hook(
                lambda _, args, kwargs, stage=stage: self._with_arguments(stage, args, kwargs),
                prepend=True,
                with_kwargs=True,
            )

    def _with_arguments(
        self, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Tensor], dict[str, Any]]:
        """Return a stage's arguments, given hidden states (to the first stage anything) and a micro-batch's number."""
        assert self._arguments is not None, "a stage computes only within a pass"
        ids, options = self._arguments(int(kwargs["number"]), stage == self.num_stages - 1)
        return (args[0] if stage else ids,), options

    def num_allowed(self, num_micro_batches: int) -> int:
        """Return the smallest number of micro-batches that the schedule takes, from the given one up."""
        if (file := self.plan.file) is not None:
            return -(-num_micro_batches // file.num_micro_batches) * file.num_micro_batches
        number = max(num_micro_batches, self.num_stages)
        if self.config.pipeline_parallel_schedule == "Interleaved1F1B":
            while number % max(1, number // self.size):  # rounds of about one micro-batch a rank
                number += 1
        return number

    def run(
        self,
        num_micro_batches: int,
        arguments: Arguments,
        *,
        hidden: Hidden,
        backward: bool,
    ) -> None:
        """Take all micro-batches forward through all stages and, if asked, backward from the numbers that the last
        stage returns."""
        self._arguments = arguments
        try:
            self._copy_tied()
            if not backward:
                at_once = FORWARDS_OF_STAGE * self.num_stages
                for begin in range(0, num_micro_batches, at_once):
                    self._forward(range(begin, min(begin + at_once, num_micro_batches)), hidden)
                return
            file = self.plan.file
            of_pass = num_micro_batches if file is None else file.num_micro_batches
            for begin in range(0, num_micro_batches, of_pass):
                with self._earlier_gradients_added():
                    self._forward_backward(range(begin, begin + of_pass), hidden)
            self._add_tied_gradient()
        finally:
            self._arguments = None
            if (head := self.tied[1]) is not None:
                head.grad = None  # Also after an error.

    @torch.no_grad()
    def _forward(self, numbers: Sequence[int], hidden: Hidden) -> None:
        """Take micro-batches through one stage of this rank after the other."""
        sent: list[tuple[dist.Work | None, Tensor]] = []
        kept: dict[tuple[int, int], Tensor] = {}
        """Hidden states for another stage of this rank, by stage and micro-batch."""
        for stage, part in zip(self.stages, self.parts, strict=True):
            source = self.plan.ranks[stage - 1] if stage else self.rank
            received: list[tuple[dist.Work | None, Tensor]] = []
            if source != self.rank:
                # All before the first send: NCCL takes those to and from one rank in their order.
                for _ in numbers:
                    x = hidden.like(device=self.device)
                    received.append((dist.irecv(x, group_src=source, group=self.group), x))
            for place, number in enumerate(numbers):
                given: Tensor | None = None
                if received:
                    work, given = received[place]
                    if work is not None:
                        work.wait()
                elif stage:
                    given = kept.pop((stage, number))
                out = part(given, number=number)
                if stage == self.num_stages - 1:
                    continue
                if (to := self.plan.ranks[stage + 1]) == self.rank:
                    kept[stage + 1, number] = out
                else:
                    out = out.contiguous()
                    sent.append((dist.isend(out, group_dst=to, group=self.group), out))
        for work, _ in sent:
            if work is not None:
                work.wait()

    @contextmanager
    def _earlier_gradients_added(self) -> Iterator[None]:
        """Add the gradients from before the block to its own; a new `PipelineStage` drops those that it finds."""
        for part in self.parts:
            reshard(part)
        parameters = [parameter for part in self.parts for parameter in part.parameters()]
        earlier = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        yield
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _forward_backward(self, numbers: Iterable[int], hidden: Hidden) -> None:
        which = torch.tensor(list(numbers))
        stages = []
        for stage, part in zip(self.stages, self.parts, strict=True):
            is_last = stage == self.num_stages - 1
            stages.append(
                PipelineStage(
                    part,
                    stage,
                    self.num_stages,
                    self.device,
                    input_args=hidden.like(requires_grad=True) if stage else which[:1],
                    output_args=torch.empty(()) if is_last else hidden.like(requires_grad=True),
                    group=self.group,
                )
            )
        schedule = self._schedule(stages, len(which))
        try:
            schedule.step(which, number=which, target=which, return_outputs=False)
        except RuntimeError as error:
            # The pipeline wraps a stage's error in a description of all its tensors.
            raise error.__cause__ or error from None

    def _schedule(self, stages: list[PipelineStage], num_micro_batches: int) -> Any:
        settings: dict[str, Any] = {"loss_fn": lambda output, _: output, "scale_grads": False}
        if self.plan.file is not None:
            return csv_schedule(self.plan.file, stages, **settings)
        make = get_schedule_class(self.config.pipeline_parallel_schedule)
        if issubclass(make, PipelineScheduleSingle):
            return make(stages[0], num_micro_batches, **settings)
        return make(stages, num_micro_batches, **settings)

    @torch.no_grad()
    def _copy_tied(self) -> None:
        """Give the output head the embedding's weight as it is now."""
        embedding, head = self.tied
        self._move(embedding, head, backward=False)

    @torch.no_grad()
    def _add_tied_gradient(self) -> None:
        """Move the head's gradient to the embedding."""
        embedding, head = self.tied
        trained = embedding if head is None else head
        if trained is None or not trained.requires_grad:
            return
        if embedding is not None and embedding.grad is None:
            embedding.grad = torch.zeros_like(embedding)
        self._move(head, embedding, backward=True)

    def _move(self, source: Tensor | None, target: Tensor | None, *, backward: bool) -> None:
        """Copy this rank's part of a parameter, or add that of its gradient, between the first and the last stage."""

        def part_of(parameter: Tensor) -> Tensor:
            tensor = parameter.grad if backward else parameter.data
            assert tensor is not None
            return local_tensor(tensor)

        ends = (self.plan.ranks[-1], self.plan.ranks[0])
        sender, receiver = ends if backward else ends[::-1]
        found: Tensor | None = None
        if source is not None:
            found = part_of(source)
            if receiver != self.rank:
                dist.send(found.contiguous(), group_dst=receiver, group=self.group)
        if target is None:
            return
        if found is None:
            found = torch.empty_like(part_of(target), memory_format=torch.contiguous_format)
            dist.recv(found, group_src=sender, group=self.group)
        part_of(target).add_(found) if backward else part_of(target).copy_(found)

    def from_last(self, value: T) -> T:
        """Return the last stage's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, group_src=self.plan.ranks[-1], group=self.group)
        return box[0]

    def from_all(self, value: T) -> list[T]:
        """Return the values of all ranks of the axis."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather(self, named: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield the (name, tensor, ...) of all ranks on every rank, one at a time, with whole tensors.

        Every rank of a stage gives the same names, and every rank consumes all.
        """
        for rank in range(self.size):
            own = iter(named) if rank == self.rank else iter(())
            while True:
                item = next(own, None)
                whole = [] if item is None else [whole_tensor(tensor).contiguous() for tensor in item[1:]]
                shapes = [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in whole]
                box: list[Any] = [None if item is None else (item[0], shapes)]
                dist.broadcast_object_list(box, group_src=rank, group=self.group)
                if box[0] is None:
                    break
                name, shapes = box[0]
                if item is None:
                    whole = [
                        torch.empty(shape, dtype=dtype, device=self.device if kind != "cpu" else kind)
                        for shape, dtype, kind in shapes
                    ]
                for tensor in whole:
                    dist.broadcast(tensor, group_src=rank, group=self.group)
                yield name, *whole
