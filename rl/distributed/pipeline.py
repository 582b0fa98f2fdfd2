"""Pipeline parallelism: the way of the micro-batches through the stages.

Each rank of the `pp` axis has a stage of the model, or several, and a schedule of
`torch.distributed.pipelining` orders their forwards and backwards (`rl.distributed.stages` plans
both). Between stages travel hidden states, and their gradients on the way back. All micro-batches
of a call have the same length.

Every rank has all micro-batches. What a schedule passes on is the number of one; a hook on each
stage replaces it by the stage's arguments. The last stage computes the loss within its forward, so
that its result is one number.

Shape legend: t tokens of a micro-batch on one context- and tensor-parallel rank, E model width.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl.distributed.mesh import ParallelismConfig
from rl.distributed.schedule_private import make_file_schedule
from rl.distributed.sharding import gather_whole, local_tensor, reshard
from rl.distributed.stages import StagePlan

T = TypeVar("T")

FORWARDS_OF_STAGE = 8
"""Micro-batches a stage of a forward without backward: each is held from its arrival until all are
sent.
"""

Arguments = tuple[Tensor, dict[str, Any]]
"""The model's input ids and its other arguments."""
HiddenStates = Callable[..., Tensor]
"""`torch.empty` with the size [t, E] and the dtype of hidden states, on the meta device."""


class _Reader:
    """Caller's `read`, within the last stage; its first error is kept until the pass is over."""

    def __init__(self, read: Callable[..., Tensor | None]) -> None:
        self._read = read
        self.error: Exception | None = None

    def read(self, batch: Any, values: tuple[Tensor, ...]) -> Tensor:
        """Return the number that `read` gives for a micro-batch's values.

        The number has a gradient in any case, as the schedule calls backward on it.
        """
        number: Tensor | None = None
        try:
            number = self._read(batch, *values)
        except Exception as error:  # noqa: BLE001 - Raised after the pass.
            if self.error is None:
                self.error = error
        return 0.0 * values[0].sum() if number is None else number


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
        """Weight of the embedding, if this rank has it, and the copy that serves as output head, if
        this rank has that; both None for a model whose head has a weight of its own."""
        self._arguments: Callable[[int, bool], Arguments] | None = None
        """(number of a micro-batch, whether the stage is the last) -> the stage's arguments."""

    def attach(self, parts: Sequence[nn.Module], *, tied: bool) -> None:
        """Take this rank's stages, sharded, in order."""
        self.parts = list(parts)
        if tied:
            # The first and the last stage may be on two ranks, so the head is a copy.
            first, last = self.stages[0] == 0, self.stages[-1] == self.num_stages - 1
            self.tied = (
                parts[0].get_parameter("embed_tokens.weight") if first else None,
                parts[-1].get_parameter("lm_head.weight") if last else None,
            )
        for stage, part in zip(self.stages, parts, strict=True):
            # Before FSDP's own hook, which casts the arguments.
            part.register_forward_pre_hook(
                lambda _, args, kwargs, stage=stage: self._replace_arguments(stage, args, kwargs),
                prepend=True,
                with_kwargs=True,
            )

    def _replace_arguments(
        self, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Tensor], dict[str, Any]]:
        """Return a stage's arguments, given hidden states and the number of a micro-batch."""
        assert self._arguments is not None, "a stage computes only within a pass"
        ids, options = self._arguments(int(kwargs["number"]), stage == self.num_stages - 1)
        # The first stage takes token ids; what the schedule gives it is only a number.
        return (args[0] if stage else ids,), options

    def num_allowed(self, num_micro_batches: int) -> int:
        """Return the smallest number of micro-batches, from this up, that the schedule takes."""
        file = self.plan.file
        if file is not None:
            return -(-num_micro_batches // file.num_micro_batches) * file.num_micro_batches
        number = max(num_micro_batches, self.num_stages)
        if self.config.pipeline_parallel_schedule == "Interleaved1F1B":
            # Rounds of about one micro-batch a rank have to divide the micro-batches.
            while number % max(1, number // self.size):
                number += 1
        return number

    def run(
        self,
        batches: Sequence[T],
        prepare: Callable[[T], tuple[T, *Arguments]],
        read: Callable[..., Tensor | None],
        *,
        hidden: HiddenStates,
        backward: bool,
    ) -> None:
        """Take all micro-batches forward through all stages and, with `backward`, back again.

        The backward starts from the numbers that `read` returns. An error of `read` is raised on
        all ranks, after the micro-batches: the other stages wait for gradients.

        Args:
            prepare: gives a micro-batch as this rank takes it, and its arguments; `head` among
                them is for the last stage, which calls `read` with the micro-batch and the head's
                values.
        """
        reader = _Reader(read)

        def make_arguments(number: int, is_last: bool) -> Arguments:
            batch, ids, options = prepare(batches[number])
            head = options.pop("head")
            if is_last:
                options["head"] = lambda states, weight: reader.read(batch, head(states, weight))
            return ids, options

        self._arguments = make_arguments
        try:
            self._pass(len(batches), hidden, backward=backward)
        finally:
            self._arguments = None
            head = self.tied[1]
            if head is not None:
                head.grad = None  # Also after an error.
        error = self.broadcast_from_last(_make_sendable(reader.error))
        if error is not None:
            raise error

    def _pass(self, num_micro_batches: int, hidden: HiddenStates, *, backward: bool) -> None:
        """Take the micro-batches through in groups, as many at once as the stages can hold."""
        self._copy_tied()
        if not backward:
            at_once = FORWARDS_OF_STAGE * self.num_stages
            for begin in range(0, num_micro_batches, at_once):
                self._forward(range(begin, min(begin + at_once, num_micro_batches)), hidden)
            return
        file = self.plan.file
        of_pass = num_micro_batches if file is None else file.num_micro_batches
        # A file describes a number of micro-batches, and is repeated until all have passed.
        for begin in range(0, num_micro_batches, of_pass):
            with self._add_earlier_gradients():
                self._forward_backward(range(begin, begin + of_pass), hidden)
        self._add_tied_gradient()

    @torch.no_grad()
    def _forward(self, numbers: Sequence[int], hidden: HiddenStates) -> None:
        """Take micro-batches through one stage of this rank after the other."""
        # Sent tensors are kept with their transfers: freed memory could be written meanwhile.
        sent: list[tuple[dist.Work | None, Tensor]] = []
        states: dict[tuple[int, int], Tensor] = {}
        """Hidden states for another stage of this rank, by stage and micro-batch."""
        for stage, part in zip(self.stages, self.parts, strict=True):
            source = self.plan.ranks[stage - 1] if stage else self.rank
            received: list[tuple[dist.Work | None, Tensor]] = []
            if source != self.rank:
                # All before the first send: NCCL takes those to and from one rank in their order.
                for _ in numbers:
                    x = hidden(device=self.device)
                    received.append((dist.irecv(x, group_src=source, group=self.group), x))
            for place, number in enumerate(numbers):
                states_in: Tensor | None = None
                if received:
                    work, states_in = received[place]
                    if work is not None:
                        work.wait()
                elif stage:
                    states_in = states.pop((stage, number))
                out = part(states_in, number=number)
                if stage == self.num_stages - 1:
                    continue
                to = self.plan.ranks[stage + 1]
                if to == self.rank:
                    states[stage + 1, number] = out
                else:
                    out = out.contiguous()
                    sent.append((dist.isend(out, group_dst=to, group=self.group), out))
        for work, _ in sent:
            if work is not None:
                work.wait()

    @contextmanager
    def _add_earlier_gradients(self) -> Iterator[None]:
        """Add the gradients from before the block to its own.

        A new `PipelineStage` drops the gradients of its parameters.
        """
        for part in self.parts:
            reshard(part)
        parameters: list[nn.Parameter] = []
        for part in self.parts:
            parameters += part.parameters()
        earlier = [parameter.grad for parameter in parameters]
        yield
        for parameter, gradient in zip(parameters, earlier, strict=True):
            if gradient is None:
                continue
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _forward_backward(self, numbers: Iterable[int], hidden: HiddenStates) -> None:
        # Here: it imports dynamo, which takes half a second, and few runs have a pipeline.
        from torch.distributed.pipelining import PipelineStage

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
                    # Shapes only, on the meta device: else PyTorch finds them by a first forward.
                    input_args=hidden(requires_grad=True) if stage else which[:1],
                    output_args=torch.empty(()) if is_last else hidden(requires_grad=True),
                    group=self.group,
                )
            )
        schedule = self._build_schedule(stages, len(which))
        try:
            schedule.step(which, number=which, target=which, return_outputs=False)
        except RuntimeError as error:
            # The pipeline wraps a stage's error in a description of all its tensors.
            raise error.__cause__ or error from None

    def _build_schedule(self, stages: list[Any], num_micro_batches: int) -> Any:
        from torch.distributed.pipelining.schedules import (
            PipelineScheduleSingle,
            get_schedule_class,
        )

        settings: dict[str, Any] = {"loss_fn": lambda output, _: output, "scale_grads": False}
        if self.plan.file is not None:
            return make_file_schedule(self.plan.file, stages, **settings)
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
        """Copy a parameter, or add its gradient, between the first and the last stage.

        Each rank moves its own part: both stages have the same layout.
        """

        def part_of(parameter: Tensor) -> Tensor:
            tensor = parameter.grad if backward else parameter.data
            assert tensor is not None
            return local_tensor(tensor)

        ends = (self.plan.ranks[-1], self.plan.ranks[0])
        sender, receiver = ends if backward else ends[::-1]
        moved: Tensor | None = None
        if source is not None:
            moved = part_of(source)
            if receiver != self.rank:
                dist.send(moved.contiguous(), group_dst=receiver, group=self.group)
        if target is None:
            return
        if moved is None:
            moved = torch.empty_like(part_of(target), memory_format=torch.contiguous_format)
            dist.recv(moved, group_src=sender, group=self.group)
        if backward:
            part_of(target).add_(moved)
        else:
            part_of(target).copy_(moved)

    def broadcast_from_last(self, value: T) -> T:
        """Return the last stage's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, group_src=self.plan.ranks[-1], group=self.group)
        return box[0]

    def gather_from_all(self, value: T) -> list[T]:
        """Return the values of all ranks of the axis."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather(self, named: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield the (name, tensor, ...) of all ranks on every rank, with whole tensors.

        Every rank of a stage gives the same names, and every rank consumes all.
        """
        # An entry at a time: a rank never holds more than its own part and one whole entry.
        for rank in range(self.size):
            own = iter(named) if rank == self.rank else iter(())
            while True:
                item = next(own, None)
                whole: list[Tensor] = []
                box: list[Any] = [None]
                if item is not None:
                    whole = [gather_whole(tensor).contiguous() for tensor in item[1:]]
                    shapes = [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in whole]
                    box = [(item[0], shapes)]

                # None ends the entries of a rank, so the others need not know their number.
                dist.broadcast_object_list(box, group_src=rank, group=self.group)
                if box[0] is None:
                    break
                name, shapes = box[0]
                if item is None:
                    for shape, dtype, kind in shapes:
                        device = self.device if kind != "cpu" else kind
                        whole.append(torch.empty(shape, dtype=dtype, device=device))
                for tensor in whole:
                    dist.broadcast(tensor, group_src=rank, group=self.group)
                yield name, *whole


def _make_sendable(error: Exception | None) -> Exception | None:
    """Return the error as other processes can receive it."""
    # Tried both ways: some exceptions pickle, but fail to be built from what they pickled.
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - Exceptions of other libraries may hold anything.
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
