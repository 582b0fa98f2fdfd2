"""Changes to a model between its construction and its layout: low-rank adapters, float8, a user's own.

    config.trainer.converters = (Float8.Config(), LoRA.Config(rank=16))

They are applied in this order, to a model that is still whole and on the meta device; sharding,
compilation and weights come after. What a generator or a Hugging Face folder gets is the model as it
was before, so no converter is known outside the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl.config.configurable import Configurable
from rl.distributed.mesh import Degrees
from rl.models.buffers import persistent_buffers
from rl.models.spec import ModelSpec, StateDictAdapter


class ModelConverter(Configurable):
    """Base of all converters; `convert` is the one method that each must have.

    A converter may swap modules, freeze parameters and add some. Every parameter that it finds keeps
    its name, shape and dtype.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    token_multiple: int = 1
    """The number of tokens of every forward is made a multiple of it, with padding."""

    def __init__(self, *, config: Config, spec: ModelSpec, degrees: Degrees, device: torch.device) -> None:
        """
        Args:
            degrees: of the layout that the model will have.
            device: where it will be; "meta" where only checks are made.

        Raises:
            ValueError: what is asked for cannot work here.
        """
        self.config = config
        self.spec = spec
        self.degrees = degrees
        self.device = device

    def convert(self, model: nn.Module) -> None:
        """Change `model` in place; it is whole and on the meta device.

        Raises:
            ValueError: the model lacks what the config names.
        """
        raise NotImplementedError(f"{type(self).__qualname__} has no convert()")

    def saved_settings(self) -> dict[str, Any]:
        """Settings that the meaning of a checkpoint's weights depends on, as JSON values; called after
        `convert`. It opens only where they are the same. Empty: whatever they are, and without this one."""
        return {}

    def weights_loaded(self, model: nn.Module, *, fresh: bool) -> None:
        """The weights of the sharded model were just set.

        Args:
            fresh: those of the plain model were, read or drawn, and what this converter added is to
                be set now. Otherwise a checkpoint restored both.
        """

    def post_optimizer_hook(self, model: nn.Module) -> None:
        """Called on every rank after each step of the optimizer."""

    def plain_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """What the parameter `name` is in the plain model, in the layout of `tensor`; every rank calls it
        for the same names in the same order."""
        return tensor

    def adapter(self, plain: StateDictAdapter) -> StateDictAdapter:
        """`plain`, and which matrices the parameters that this converter added are made of, for an
        optimizer that steps matrices; one that it leaves out is one matrix."""
        return plain


class ModelConverters:
    """Several converters as one, applied in order and undone in the opposite one."""

    def __init__(
        self,
        configs: Sequence[ModelConverter.Config],
        *,
        spec: ModelSpec,
        degrees: Degrees,
        device: torch.device,
    ) -> None:
        """Raises ValueError, starting with `converters.` and its number, for what one of them refuses."""
        self.members: list[ModelConverter] = []
        for config in configs:
            with _numbered(len(self.members)):
                self.members.append(config.build(spec=spec, degrees=degrees, device=device))
        self.plain_names: tuple[str, ...] = ()
        """Parameters of the model as it was before `convert`, in order."""
        self.plain_buffers: tuple[str, ...] = ()
        """Its persistent buffers."""

    @property
    def token_multiple(self) -> int:
        return math.lcm(*(member.token_multiple for member in self.members))

    def convert(self, model: nn.Module) -> None:
        """Raises ValueError as at the construction, and for a converter that lost a parameter."""
        before = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.plain_names, self.plain_buffers = tuple(before), tuple(persistent_buffers(model))
        for number, member in enumerate(self.members):
            with _numbered(number):
                member.convert(model)
                after = {name: parameter.shape for name, parameter in model.named_parameters()}
                for name, shape in before.items():
                    if after.get(name) != shape:
                        raise ValueError(
                            f"{type(member).__qualname__} changed or lost parameter {name} of shape "
                            f"{list(shape)}: a converter keeps the parameters that it finds"
                        )

    def saved_settings(self) -> dict[str, dict[str, Any]]:
        """Of the members that have some, by the name of their class and, from a second one on, a number."""
        found: dict[str, dict[str, Any]] = {}
        for member in self.members:
            name = type(member).__qualname__
            if settings := member.saved_settings():
                found[name if name not in found else f"{name}.{len(found)}"] = settings
        return found

    def weights_loaded(self, model: nn.Module, *, fresh: bool) -> None:
        for member in self.members:
            member.weights_loaded(model, fresh=fresh)

    def post_optimizer_hook(self, model: nn.Module) -> None:
        for member in self.members:
            member.post_optimizer_hook(model)

    def adapter(self, plain: StateDictAdapter) -> StateDictAdapter:
        """`plain`, and what the parameters of all members are made of."""
        for member in self.members:
            plain = member.adapter(plain)
        return plain

    def plain_tensors(self, parameters: Mapping[str, nn.Parameter]) -> Iterable[tuple[str, Tensor]]:
        """The plain model's parameters, one at a time, in the layout of the converted one.

        Lazily; every rank goes through all of them.
        """
        for name in self.plain_names:
            tensor = parameters[name].detach()
            for member in reversed(self.members):
                tensor = member.plain_tensor(name, tensor)
            yield name, tensor


@contextmanager
def _numbered(number: int) -> Iterator[None]:
    """What a converter refuses, with its place in the config."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"converters.{number}: {error}") from error
