"""A converter of your own: what is trained, and how far it may go, without touching the core.

    python -m rl.train --module examples.custom_converter --config tiny_top_blocks \
        --trainer.converters.0.num_trained_blocks 2 --trainer.converters.0.max_abs 0.5

It freezes everything but the last blocks before the model is sharded, and after each optimizer step
brings their weights back between -max_abs and max_abs. Its fields are options of the command line
and lines in config.json like any other; which converters there are, a config function says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from actors.controller import Controller
from configs.sum_digits import tiny
from rl.config.tree import check_bounds
from rl.distributed.sharding import local_tensor
from rl.models.converter import ModelConverter
from rl.models.decoder import Decoder


class TopBlocks(ModelConverter):
    """Converter that trains the last blocks alone, within bounds."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConverter.Config):
        """Number of trained blocks, and the bound of their weights."""

        num_trained_blocks: int = 1
        """The last so many blocks are trained; embedding, head and the other blocks are frozen."""
        max_abs: float = 1.0
        """No trained weight gets larger than that."""

        def __post_init__(self) -> None:
            check_bounds(self, "num_trained_blocks", at_least=1)
            check_bounds(self, "max_abs", above=0)

    config: Config

    def convert(self, model: nn.Module) -> None:
        """Freeze, swap or add parts of the model."""
        # The model is whole here, and without memory: it is sharded after this.
        assert isinstance(model, Decoder)
        if self.config.num_trained_blocks > len(model.layers):
            raise ValueError(
                f"num_trained_blocks={self.config.num_trained_blocks}: the model has "
                f"{len(model.layers)}"
            )
        model.requires_grad_(False)
        for block in list(model.layers)[-self.config.num_trained_blocks :]:
            block.requires_grad_(True)

    @torch.no_grad()
    def post_optimizer_hook(self, model: nn.Module) -> None:
        """Bring the trained weights back into their bounds, on every rank after each step."""
        # A weight is sharded now: each rank has a part.
        for parameter in model.parameters():
            if parameter.requires_grad:
                local_tensor(parameter).clamp_(-self.config.max_abs, self.config.max_abs)


def tiny_top_blocks() -> Controller.Config:
    """The tiny run with the converter above: call another config, edit what it returns.

    The warm-up of the tiny run is made with the same converter, so its starting point is another
    one.
    """
    config = tiny()
    config.trainer.converters = (TopBlocks.Config(num_trained_blocks=2, max_abs=2.0),)
    return config
