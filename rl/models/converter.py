"""Model converters: changes between construction and sharding, such as LoRA or float8.

    config.trainer.converters = (Float8.Config(), LoRA.Config(rank=16))

Converters are applied in this order to a whole model on the meta device; sharding, compilation and
weights follow. Generators and Hugging Face folders get the plain model, so converters are unknown
outside the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rl.config.configurable import Configurable
from rl.distributed.mesh import Degrees
from rl.models.decoder import find_persistent_buffers
from rl.models.spec import ModelSpec


class ModelConverter(Configurable):
    """Base of all converters; only `convert` is required.

    A converter may replace modules, freeze parameters and add new ones. Existing parameters keep
    their names, shapes and dtypes.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Settings of a converter, and what they mean for generators."""

        owner: ClassVar[type[ModelConverter]]

        @property
        def keeps_bits(self) -> bool:
            """False if products round otherwise than those of the generators."""
            return True

        @property
        def is_served_apart(self) -> bool:
            """True if generators get what it adds beside the plain weights, not merged."""
            return False

    compute_dtype: ClassVar[str | None] = None
    """Dtype that factors of products are rounded to, None for the model's.

    The bound of logprob parity depends on it.
    """
    token_multiple: int = 1
    """Divisor of the number of tokens of every forward, ensured by padding."""

    def __init__(
        self, *, config: Config, spec: ModelSpec, degrees: Degrees, device: torch.device
    ) -> None:
        """Store the arguments; a subclass raises ValueError if the config cannot work here.

        Args:
            degrees: parallel degrees of the future layout.
            device: future device of the model; "meta" for checks alone.
        """
        self.config = config
        self.spec = spec
        self.degrees = degrees
        self.device = device

    def convert(self, model: nn.Module) -> None:
        """Change the model in place, which is whole and on the meta device.

        Raises ValueError if that cannot work.
        """
        raise NotImplementedError(f"{type(self).__qualname__} has no convert()")

    def saved_settings(self) -> dict[str, Any]:
        """Return the settings that a checkpoint's weights depend on, as JSON values.

        Called after `convert`. A checkpoint only opens with equal settings; without settings it
        opens with or without this converter.
        """
        return {}

    def weights_loaded(self, model: nn.Module, *, fresh: bool) -> None:
        """React to new weights in the sharded model.

        Args:
            fresh: only the plain model's weights were read or drawn, and this converter has to
                initialize its own. Otherwise a checkpoint restored both.
        """

    def post_optimizer_hook(self, model: nn.Module) -> None:
        """React to an optimizer step; called on every rank."""

    def plain_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return the plain model's value of a parameter in the layout of `tensor`; collective."""
        return tensor


class ModelConverters:
    """A sequence of converters, applied in order and undone in reverse order."""

    def __init__(
        self,
        configs: Sequence[ModelConverter.Config],
        *,
        spec: ModelSpec,
        degrees: Degrees,
        device: torch.device,
    ) -> None:
        """Build the converters; a ValueError tells the position of its converter in the config."""
        self.members: list[ModelConverter] = []
        for config in configs:
            with _add_position(len(self.members)):
                self.members.append(config.build(spec=spec, degrees=degrees, device=device))
        self.plain_names: tuple[str, ...] = ()
        """Parameters of the plain model, in order."""
        self.plain_buffers: tuple[str, ...] = ()
        """Persistent buffers of the plain model."""

    @property
    def token_multiple(self) -> int:
        return math.lcm(*(member.token_multiple for member in self.members))

    def convert(self, model: nn.Module) -> None:
        """Apply all converters.

        Raises ValueError if one of them fails or loses a parameter, or if a parameter is trained
        that generators would not get.
        """
        before = _list_shapes(model)
        # Generators and folders get these and nothing else, whatever the converters add.
        self.plain_names = tuple(before)
        self.plain_buffers = tuple(find_persistent_buffers(model))

        for number, member in enumerate(self.members):
            with _add_position(number):
                member.convert(model)
                after = _list_shapes(model)
                for name, shape in before.items():
                    if after.get(name) != shape:
                        raise ValueError(
                            f"{type(member).__qualname__} changed or lost parameter {name} of "
                            f"shape {list(shape)}: a converter keeps the parameters that it finds"
                        )
        self._check_served(model)

    def _check_served(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters())
        trained = [name for name in self.plain_names if parameters[name].requires_grad]
        for number, member in enumerate(self.members):
            if member.config.is_served_apart and trained:
                raise ValueError(
                    f"converters.{number}.merge=False: generators get the adapters alone and keep "
                    f"the other weights, but {trained[0]} is trained too: must be True"
                )

    def saved_settings(self) -> dict[str, dict[str, Any]]:
        """Return the members' settings by class name, numbered from the second of a class on."""
        settings_by_name: dict[str, dict[str, Any]] = {}
        for member in self.members:
            name = type(member).__qualname__
            settings = member.saved_settings()
            if not settings:
                continue
            if name in settings_by_name:
                name = f"{name}.{len(settings_by_name)}"
            settings_by_name[name] = settings
        return settings_by_name

    def weights_loaded(self, model: nn.Module, *, fresh: bool) -> None:
        for member in self.members:
            member.weights_loaded(model, fresh=fresh)

    def post_optimizer_hook(self, model: nn.Module) -> None:
        for member in self.members:
            member.post_optimizer_hook(model)

    def yield_plain_tensors(
        self, parameters: Mapping[str, nn.Parameter], *, merge: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the plain model's value of each of these parameters, in the parameter's layout.

        LoRA merges its adapter into the weight, float8 takes off its wrapper; without converters
        the parameters themselves are yielded. Parameters that converters added are skipped. Every
        rank must consume all.

        Args:
            merge: False leaves out what is served apart.
        """
        for name in self.plain_names:
            if name not in parameters:
                continue
            tensor = parameters[name].detach()
            # The last converter was applied to the results of the others.
            for member in reversed(self.members):
                if merge or not member.config.is_served_apart:
                    tensor = member.plain_tensor(name, tensor)
            yield name, tensor


def _list_shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


@contextmanager
def _add_position(number: int) -> Iterator[None]:
    """Prefix a ValueError with the converter's position in the config."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"converters.{number}: {error}") from error
